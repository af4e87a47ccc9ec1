// SPDX-License-Identifier: Apache-2.0
// Partial attention over latents (MLA) for up to 16 query rows, q and KV of one 16-bit type: out =
// softmax(scale q k^T) v and its lse. 16 rows are the heads of a rank where eight ranks divide 128. For few
// sequences of few tokens, where the latency from a launch's queries to its result bounds it; for others
// latent.cuh reads more at a time.
//
// The blocks of a cluster share a work item: they take its KV tiles in turn and combine their results of a
// query tile, so that a KV split belongs to a cluster. Shared memory holds a ring of kStages KV tiles of 32
// tokens, which one warp fetches by TMA, or all warps by cp.async (narrow_latent_copies.cuh). A block has
// eight warps. For each KV tile, a warp multiplies 8 keys by half of their columns, computes the weights of
// two rows, and accumulates 64 columns of the values. It computes the next tile's scores before it adds this
// tile's values, so one barrier a tile is enough: after it the weights and the next tile's scores are ready,
// and the previous tile's stage is free.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/mma_softmax.cuh"
#include "cuda/attention/narrow_latent_cluster.cuh"
#include "cuda/attention/narrow_latent_copies.cuh"
#include "cuda/attention/narrow_latent_products.cuh"
#include "cuda/attention/narrow_latent_softmax.cuh"
#include "cuda/attention/tensor_copies.cuh"
#include "cuda/runtime/async_copy.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda::narrow_latent {

inline constexpr int kStages = 4;
static_assert(kStages % 2 == 0);  // even: stages alternate between two places for scores and weights
/// Registers of a thread: leaves room for blocks of the preceding product on the SM.
inline constexpr int kRegisters = 208;

/// Limits of KV splits: a block reads a KV tile in a microsecond.
template <int kCluster>
struct Limits : ShortTileLimits {
  static constexpr int kEpilogueTiles = 5 * kCluster;
  static constexpr int kShortSplitTiles = 2 * kCluster;
  static constexpr int kSplitTiles = 2 * kCluster;
  static constexpr int kWholeTiles = 3 * kCluster;
};

/// One of the kCluster blocks that share a work item. Copies is a way to fetch KV tiles.
template <class T, int kCluster, class Copies>
struct Block {
  using Plan = AttentionPlan<kTokens, Limits<kCluster>, true, kCluster>;
  using Producer = TileProducer<Copies, Plan, kCluster, 1>;
  using WarpProducts = Products<T>;
  using Sums = float[WarpProducts::kSumTiles][4];
  static constexpr int kQueryStride = kColumns + 8;  // padded: eight rows in different banks
  static constexpr int kScoreStride = kTokens + 8;   // f32, padded: four rows in different banks
  static constexpr int kWeightStride = kTokens + 8;  // padded: eight rows in different banks

  /// What the warps exchange about a KV tile.
  struct TileShared {
    alignas(16) float scores[WarpProducts::kKeyHalves][kMmaRows][kScoreStride];
    alignas(16) T weights[kMmaRows][kWeightStride];
    float shrink[kMmaRows];  ///< Rescale factors of the sums of values.
  };

  struct Shared {
    alignas(1024) std::byte stages[kStages][kTileBytes];
    alignas(16) T queries[kMmaRows][kQueryStride];
    TileShared tiles[2];  ///< KV tiles alternate between them.
    alignas(16) float found[kCluster > 1 ? 4 : Found<kCluster>::kFloats];
    alignas(8) unsigned long long barriers[kStages];
    bool is_last;
    Plan plan;
  };

  static __device__ void attend(const AttentionParams& p, const typename Copies::Maps& maps) {
    extern __shared__ __align__(1024) std::byte memory[];
    auto& s = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
      Copies::prefetch(maps);
      for (auto& barrier : s.barriers) barrier_init(latent::at(&barrier), Copies::kArrivals);
      fence_barrier_init();
    }
    if (!p.reads_ahead) follow_previous(p);
    make_plan(p, s.plan);
    const Schedule<Plan> schedule(p, s.plan);
    const WorkItem item = schedule.work_item(latent::scheduled_block<kCluster>());
    if (item.is_none()) return;

    Cluster<kCluster> cluster(p, s.found);
    const int rank = latent::block_of_item<kCluster>();
    const bool copies = Copies::kTakesAllWarps || latent::uniform(static_cast<int>(threadIdx.x) / kWarp) == 0;
    Producer producer(p, maps, s.plan, copies ? item : WorkItem{item.start, 0}, rank);
    const auto fill = [&](int stage) {
      if (copies) producer.issue(latent::at(s.stages[stage]), latent::at(&s.barriers[stage]));
    };
    KvTileCursor at = item.start;
    int filled = 0;  // stages filled, up to kStages
    if (p.reads_ahead && copies) {
      const int settled = settled_tokens<true>(p, s.plan.query_tiles[at.query_tile]);
      for (; filled < kStages && producer.is_within(at.query_tile, settled); ++filled) fill(filled);
    }
    int mine = rank;  // this block's next KV tile of the work item
    int stage = 0;
    unsigned parity = 0;
    int done = 0;
    do {
      const int count = min(item.count - done, at.num_kv_tiles - at.kv_tile);
      const QueryTile query_tile = s.plan.query_tiles[at.query_tile];
      const QueryTileSpan span{query_tile, s.plan.first_page[at.query_tile],
                               s.plan.begin_token[at.query_tile], s.plan.end_token[at.query_tile]};
      Softmax<T> softmax(p, span);
      const SplitPartials partials{p, schedule.splits_of(at.query_tile, 0)};
      const QueryRow query_row(p, query_tile);
      const int first_token = s.plan.first_kv_tile_token(at.query_tile) + at.kv_tile * kTokens;
      if (done == 0 && p.reads_ahead) {
        wait_for_previous();
        start_next();  // not earlier: the next kernel would take memory bandwidth from this step's q and KV
        find_target_place(p);
      }
      if constexpr (Copies::kTakesAllWarps) {
        query_row.pass(s.queries, [&] {
          for (; filled < kStages; ++filled) fill(filled);
        });
      } else {
        query_row.copy(s.queries);
        for (; filled < kStages; ++filled) fill(filled);
        wait_for_all_copies();
      }
      __syncthreads();
      const WarpProducts products(s.queries[0], kQueryStride);
      Sums sums = {};
      const int end = done + count;
      const auto score = [&] {
        barrier_wait(latent::at(&s.barriers[stage]), parity);
        find_scores(products, latent::at(s.stages[stage]), s.tiles[stage % 2].scores);
      };
      if (mine < end) score();
      __syncthreads();
      int free_stage = -1;  // free after the next barrier
#pragma unroll 1
      while (mine < end) {
        const int token = first_token + (mine - done) * kTokens;
        const unsigned tile = latent::at(s.stages[stage]);
        TileShared& shared = s.tiles[stage % 2];
        find_weights(softmax, token, shared);
        const int tile_stage = stage;
        if (++stage == kStages) {
          stage = 0;
          parity ^= 1u;
        }
        if ((mine += kCluster) < end) score();
        __syncthreads();
        if (free_stage >= 0) fill(free_stage);
        free_stage = tile_stage;
        const int first = span.begin_token - token;
        const int last = span.end_token - token;
        if (first > 0 || last < kTokens) WarpProducts::clear_values(tile, first, last);
        add_values(shared, tile, sums);
      }
      cluster.await_readers();
      keep_rows(softmax, sums, cluster.own());
      end_split(partials, s, cluster, at.query_tile, query_tile);
      if (free_stage >= 0) fill(free_stage);
      done = end;
      at.advance(p, s.plan, count);
    } while (done < item.count);
  }

 private:
  static __device__ int lane() {
    return static_cast<int>(threadIdx.x) % kWarp;
  }

  /// This thread's share of a query row; 16 threads share a row.
  struct QueryRow {
    static constexpr int kRowThreads = kThreads / kMmaRows;
    static constexpr int kPartElements = 8;
    int row = static_cast<int>(threadIdx.x) / kRowThreads;
    int column = static_cast<int>(threadIdx.x) % kRowThreads * kPartElements;
    bool is_row;
    const T* from;

    __device__ QueryRow(const AttentionParams& p, const QueryTile& query_tile)
        : is_row(row < query_tile.num_rows) {
      const int seen = is_row ? row : 0;
      from = static_cast<const T*>(p.q) + query_tile.token(p, seen) * p.q_token_stride +
             query_tile.query_head(p, 0, seen) * p.q_head_stride + column;
    }

    /// Issues the copy of this thread's share, or of zeros past the last row.
    __device__ __forceinline__ void copy(T (&to)[kMmaRows][kQueryStride]) const {
#pragma unroll
      for (int i = 0; i < kColumns; i += kRowThreads * kPartElements) {
        if (column + i < kColumns) copy_chunk_or_zeros(latent::at(&to[row][column + i]), from + i, is_row);
      }
    }

    /// Copies the same through registers, and calls meanwhile() before it arrives. For threads that copy KV
    /// tiles too, because to wait for cp.async means to wait for all earlier ones of the thread.
    template <class Meanwhile>
    __device__ __forceinline__ void pass(T (&to)[kMmaRows][kQueryStride], const Meanwhile& meanwhile) const {
      constexpr int kStep = kRowThreads * kPartElements;
      uint4 parts[(kColumns + kStep - 1) / kStep] = {};
#pragma unroll
      for (int i = 0; i < kColumns; i += kStep) {
        if (is_row && column + i < kColumns) parts[i / kStep] = *reinterpret_cast<const uint4*>(from + i);
      }
      meanwhile();
#pragma unroll
      for (int i = 0; i < kColumns; i += kStep) {
        if (column + i < kColumns) *reinterpret_cast<uint4*>(&to[row][column + i]) = parts[i / kStep];
      }
    }
  };

  /// Computes this warp's share of a KV tile's scores, in shared memory for all warps.
  static __device__ __forceinline__ void find_scores(
      const WarpProducts& products, unsigned tile,
      float (&to)[WarpProducts::kKeyHalves][kMmaRows][kScoreStride]) {
    float scores[4];
    products.multiply_keys(tile, scores);
    float(&half)[kMmaRows][kScoreStride] = to[WarpProducts::half()];
    const int column = WarpProducts::first_key() + lane() % 4 * 2;
    *reinterpret_cast<float2*>(&half[lane() / 4][column]) = {scores[0], scores[1]};
    *reinterpret_cast<float2*>(&half[lane() / 4 + 8][column]) = {scores[2], scores[3]};
  }

  /// Computes the weights of a KV tile's tokens for this warp's rows, in shared memory for all warps.
  static __device__ __forceinline__ void find_weights(Softmax<T>& softmax, int token, TileShared& shared) {
#pragma unroll
    for (int i = 0; i < Softmax<T>::kRows; ++i) {
      const int row = softmax.row(i);
      float shrink;
      const float weight = softmax.weigh(
          i, token + lane(), shared.scores[0][row][lane()] + shared.scores[1][row][lane()], shrink);
      shared.weights[row][lane()] = from_float<T>(weight);
      if (lane() == 0) shared.shrink[row] = shrink;
    }
  }

  /// Adds the tile's weighted values to this warp's columns of the sums.
  static __device__ __forceinline__ void add_values(const TileShared& shared, unsigned tile, Sums& sums) {
    const float shrink[2] = {shared.shrink[lane() / 4], shared.shrink[lane() / 4 + 8]};
    if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) shrink_sums(shrink, sums);
    WarpProducts::add_values(latent::at(shared.weights), kWeightStride * 2, tile, sums);
  }

  /// Stores this block's results of a query tile.
  static __device__ __forceinline__ void keep_rows(const Softmax<T>& softmax, const Sums& sums,
                                                   const Found<kCluster>& to) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* values = to.sums(lane() / 4 + i * 8) + WarpProducts::warp() * kChunkColumns + lane() % 4 * 2;
#pragma unroll
      for (int n = 0; n < WarpProducts::kSumTiles; ++n)
        *reinterpret_cast<float2*>(values + n * 8) = {sums[n][2 * i], sums[n][2 * i + 1]};
    }
#pragma unroll
    for (int i = 0; i < Softmax<T>::kRows; ++i) {
      const float sum = softmax.sum(i);
      if (lane() == 0) {
        to.max(softmax.row(i)) = softmax.max(i);
        to.sum(softmax.row(i)) = sum;
      }
    }
  }

  /// Combines this block's rows over the cluster and writes them to out, or as split partials. The last block
  /// to arrive with its split of these rows combines all splits.
  static __device__ __forceinline__ void end_split(const SplitPartials& all, Shared& s,
                                                   Cluster<kCluster>& cluster, int u,
                                                   const QueryTile& query_tile) {
    const int split = latent::scheduled_block<kCluster>() - all.splits.first_block;
    cluster.combine(query_tile.num_rows,
                    [&](int row, int column, float max, float sum, const float4& columns) {
                      if (all.splits.count == 1) {
                        RowWriter(all.p, query_tile, 0, row, max, sum).write(column, columns);
                      } else {
                        *all.out(split, row, column) = columns;
                        *all.max(split, row) = max;
                        *all.sum(split, row) = sum;
                      }
                    });
    if (all.splits.count == 1) return;
    int* const counter = all.p.counters + u * kCluster + latent::block_of_item<kCluster>();
    count_split(
        all, [&] { return counter; }, static_cast<int>(threadIdx.x), s.is_last, [] { __syncthreads(); });
    if (!s.is_last) return;
    Cluster<kCluster>::for_each_part(query_tile.num_rows, [&](int row, int column) {
      combine_row(all, query_tile, 0, row, column, column + kWarp * kLaneColumns);
    });
  }
};

template <class T, int kCluster, class Copies>
__global__ __maxnreg__(kRegisters) void attend_narrow_latent(const __grid_constant__ AttentionParams p,
                                                             const __grid_constant__
                                                             typename Copies::Maps maps) {
#if __CUDA_ARCH__ >= 900
  prefetch_params(p);
  Block<T, kCluster, Copies>::attend(p, maps);
  wait_for_previous();  // in case the block had nothing to do
  start_next();
  finish_messages(p);
#endif
}

}  // namespace helix::cuda::narrow_latent
