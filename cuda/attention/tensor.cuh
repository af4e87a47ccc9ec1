// SPDX-License-Identifier: Apache-2.0
// Partial attention by mma.sync on Hopper, for q of 16 bits and KV of the same type or of e4m3: out =
// softmax(scale q k^T) v and its lse.
//
// Each warp works on its own. It takes every kWarps-th KV tile of the block's work item, issues its copies
// kStages KV tiles ahead (`Copies` says how) into a ring of its own in shared memory, and multiplies it by
// all rows of the query tile. Warps meet only where a KV split ends, and merge their results.
//
// With e4m3 KV, queries and weights are f16. Queries of bf16 are scaled row by row; one factor of a row's
// scores combines the inverse of that scale, the keys' scale and the softmax scale. The values' scale
// multiplies the sums where a KV split ends. Weights go up to 2^kHeadroom: otherwise a million weights below
// the smallest f16 would be lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/kernel.hpp"
#include "cuda/attention/tensor_cluster.cuh"
#include "cuda/attention/tensor_copies.cuh"
#include "cuda/attention/tensor_gather.cuh"
#include "cuda/attention/tensor_queries.cuh"
#include "cuda/attention/tensor_softmax.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// Blocks of `warps` warps that an SM holds.
constexpr int tensor_blocks_per_sm(int warps) {
  return warps > 4 ? 1 : kBlocksPerSm;
}

/// The kernel for one type of KV, two head sizes, kMTiles m16 tiles in a query tile and kTokens tokens in a
/// KV tile, of which kStepTokens are multiplied at a time. `Copies`, of tensor_copies.cuh, fetches KV tiles.
template <class KV, int kDim, int kValueDim, int kMTiles, int kWarps, int kTokens, int kStages,
          template <int, int, int> class Copies, int kStepTokens>
struct Tensor {
  using Limits =
      std::conditional_t<tensor_blocks_per_sm(kWarps) == 1, WholeSmLimits<kTokens>, ShortTileLimits>;
  using Plan = AttentionPlan<kTokens, Limits, true>;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kRows = kMTiles * kMmaRows;
  static constexpr int kBlocks = tensor_blocks_per_sm(kWarps);
  /// Whether blocks form clusters where there is room: for one block an SM the epilogue decides the time.
  static constexpr bool kHasClusters = kBlocks == 1 && kDim == kValueDim;

  using Softmax = TensorSoftmax<KV, kDim, kValueDim, kMTiles, kStepTokens>;
  using Gather = TensorGather<Softmax, kWarps, kValueDim, kMTiles>;
  using Products = typename Softmax::Products;
  using Bounds = typename Softmax::Bounds;
  using RowFactors = typename Softmax::RowFactors;
  using Found = typename Softmax::Found;
  using KvScales = typename Softmax::KvScales;
  using T = typename Products::T;  // type of queries and weights
  using Queries = TensorQueries<KV, kDim, kRows, kThreads>;
  using TileCopies = Copies<Products::kKeyBytes, Products::kValueBytes, kTokens>;
  static constexpr bool kIsFp8 = Products::kIsFp8;
  static constexpr int kValuesAt = kTokens * Products::kKeyBytes;  // in a KV tile
  static constexpr int kStageBytes = kValuesAt + kTokens * Products::kValueBytes;
  /// mbarriers of a stage. e4m3 has one for keys and one for values, so that values arrive while keys are
  /// multiplied: it has as many instructions as 16 bits for half the bytes, so that they are worth hiding.
  static constexpr int kBarriers = kIsFp8 ? 2 : 1;
  using Producer = TileProducer<TileCopies, Plan, kWarps, kBarriers>;
  using Cluster = BlockCluster<kHasClusters, kRows, kValueDim>;
  static_assert(kTokens % kStepTokens == 0);

  struct Shared {
    alignas(128) std::byte stages[kWarps][kStages][kStageBytes];
    alignas(16) T queries[kRows * Products::Places::kRowStride];
    TensorSums<kWarps, kValueDim> sums;
    typename Cluster::Sums cluster;
    alignas(8) unsigned long long barriers[kWarps][kStages][kBarriers];
    Plan plan;
    float query_factors[kIsFp8 ? kRows : 1];  // RowScale::inverse() of each row
  };

  /// The arrival of a KV tile's values, after its keys.
  struct Arrival {
    unsigned barrier;
    unsigned parity;

    __device__ __forceinline__ void wait() const {
      if constexpr (kBarriers > 1) barrier_wait(barrier, parity);
    }
  };

  static __device__ void attend(const AttentionParams& p, const typename TileCopies::Maps& maps) {
    extern __shared__ __align__(128) std::byte memory[];
    auto& s = *reinterpret_cast<Shared*>(memory);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    Cluster cluster(s.cluster);
    if (threadIdx.x == 0) TileCopies::prefetch(maps);
    init_barriers(s.barriers[warp][0]);
    if (!p.reads_ahead) follow_previous(p);
    make_plan(p, s.plan);
    const Schedule<Plan> schedule(p, s.plan);
    const WorkItem item = schedule.work_item(static_cast<int>(blockIdx.x));
    if (item.is_none()) return;

    const auto stage_at = static_cast<unsigned>(__cvta_generic_to_shared(s.stages[warp]));
    const auto barrier_at = static_cast<unsigned>(__cvta_generic_to_shared(s.barriers[warp]));
    Producer producer(p, maps, s.plan, item, warp);
    KvTileCursor at = item.start;
    int mine = warp;  // this warp's next KV tile of the work item
    int stage = 0;
    unsigned parity = 0;
    const auto fill = [&](int i) {
      producer.issue(stage_at + static_cast<unsigned>(i * kStageBytes),
                     barrier_at + static_cast<unsigned>(i * kBarriers * 8));
    };
    int filled = 0;  // stages filled, up to kStages
    if (p.reads_ahead) {
      const int settled = settled_tokens(p, s.plan.query_tiles[at.query_tile]);
      for (; filled < kStages && producer.is_within(at.query_tile, settled); ++filled) fill(filled);
      wait_for_previous();
      start_next();  // not earlier: the next kernel would take memory bandwidth from this step's q and KV
    }
    int done = 0;
    do {
      const int count = min(item.count - done, at.num_kv_tiles - at.kv_tile);
      const QueryTile query_tile = s.plan.query_tiles[at.query_tile];
      // The queries are loaded first: after the copies of all blocks they would wait for microseconds.
      Queries queries;
      queries.read(p, query_tile, at.head);
      if (done == 0 && p.reads_ahead) find_target_place(p);
      const KvScales scales = Softmax::read_scales(p, at.head);
      constexpr bool kQueriesFirst = TileCopies::kTakesLoadUnits;
      for (; filled < kStages && !kQueriesFirst; ++filled) fill(filled);
      queries.write(p, s.queries, s.query_factors);
      const Bounds bounds = Softmax::bounds_of(
          p, query_tile, {s.plan.begin_token[at.query_tile], s.plan.end_token[at.query_tile]});
      __syncthreads();
      const RowFactors factors = Softmax::row_factors(p, s.query_factors, scales.k);
      // Copies by load units start only now: issued earlier, they would keep every warp from the queries
      // until all warps had issued their copies.
      for (; filled < kStages && kQueriesFirst; ++filled) fill(filled);

      Found found = Softmax::nothing();
      const int first_token = s.plan.first_kv_tile_token(at.query_tile) + at.kv_tile * kTokens;
      for (; mine < done + count; mine += kWarps) {
        const int token = first_token + (mine - done) * kTokens;
        std::byte* kv_tile = s.stages[warp][stage];
        const unsigned barrier = barrier_at + static_cast<unsigned>(stage * kBarriers * 8);
        barrier_wait(barrier, parity);
        const int first = ::max(0, s.plan.begin_token[at.query_tile] - token);
        const int last = ::max(0, s.plan.end_token[at.query_tile] - token);
        const bool is_whole = first == 0 && last >= kTokens;
        const Arrival values{barrier + (kBarriers - 1) * 8, parity};
        if (!is_whole) {
          values.wait();
          clear_values(kv_tile, first, last);
        }
#pragma unroll 1
        for (int step = 0; step < kTokens; step += kStepTokens)
          multiply_tokens(p, s.queries, kv_tile, step, token, values, bounds, factors, found);
        if (!is_whole) TileCopies::fence();
        __syncwarp();
        fill(stage);
        if (++stage == kStages) {
          stage = 0;
          parity ^= 1u;
        }
      }
      end_split({p, schedule.splits_of(at.query_tile, at.head)}, s, cluster, at, scales.v, found);
      at.advance(p, s.plan, count);
      done += count;
    } while (done < item.count);
  }

 private:
  /// Initialises this warp's mbarriers.
  static __device__ __forceinline__ void init_barriers(unsigned long long* barriers) {
    if (threadIdx.x % kWarp != 0) return;
    for (int i = 0; i < kStages * kBarriers; ++i)
      barrier_init(static_cast<unsigned>(__cvta_generic_to_shared(&barriers[i])), TileCopies::kArrivals);
    fence_barrier_init();
  }

  /// Merges the warps' results of the KV split at `at` and writes them. The cluster, or else the last block
  /// to arrive, combines the splits.
  static __device__ __forceinline__ void end_split(const SplitPartials& partials, Shared& s, Cluster& cluster,
                                                   const KvTileCursor& at, float value_scale, Found& found) {
    const QueryTile query_tile = s.plan.query_tiles[at.query_tile];
    const bool is_cluster = s.plan.is_one_split_each && cluster.has(partials.splits);
    if (is_cluster) cluster.await_others();
    Gather::gather(s.sums, query_tile, value_scale, found,
                   [&](int first_row, int num_rows, const BlockResult<kWarps>& result) {
                     write_split(partials, query_tile, at.head, first_row, num_rows, result, [&](int row) {
                       return is_cluster ? cluster.row(row) : partials.own_row(row);
                     });
                   });
    if (is_cluster) {
      cluster.combine(partials.p, query_tile, at.head);
    } else {
      combine_splits(partials, query_tile, at.query_tile, at.head);
    }
  }

  /// Zeroes the values of tokens outside of [first, last): what an earlier KV tile left there may be
  /// infinite.
  static __device__ void clear_values(std::byte* kv_tile, int first, int last) {
    auto* values = reinterpret_cast<uint4*>(kv_tile + kValuesAt);
    constexpr int kChunks = Products::kValueBytes / 16;
    for (int i = static_cast<int>(threadIdx.x) % kWarp; i < kTokens * kChunks; i += kWarp) {
      const int token = i / kChunks;
      if (token < first || token >= last) values[i] = uint4{0, 0, 0, 0};
    }
    __syncwarp();
  }

  /// Attends to kStepTokens tokens of a KV tile from its token `step` on; `tile_token` is the KV tile's first
  /// token.
  static __device__ __forceinline__ void multiply_tokens(const AttentionParams& p, const T* queries,
                                                         const std::byte* kv_tile, int step, int tile_token,
                                                         const Arrival& values, const Bounds& bounds,
                                                         const RowFactors& factors, Found& found) {
    const int token = tile_token + step;
    typename Softmax::Scores scores;
    Products::multiply_keys(queries, kv_tile + step * Products::kKeyBytes, scores);
    // Without a soft cap scores stay raw: the factor goes into the exponent, (x - max) * factor.
    const bool is_capped = p.soft_cap > 0.0f;
    RowFactors exponents;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        exponents.of[m][half] = is_capped ? kLog2E : factors.of[m][half] * kLog2E;
    }
    if (is_capped) Softmax::cap_scores(scores, factors, p.soft_cap);
    if (token < bounds.inner.begin || token + kStepTokens > bounds.inner.end)
      Softmax::mask_scores(scores, token, bounds);
    typename Softmax::Weights weights;
    Softmax::weigh(scores, exponents, found, weights);
    values.wait();
    Products::add_values(kv_tile + kValuesAt + step * Products::kValueBytes, weights, found.acc);
  }
};

template <class KV, int kDim, int kValueDim, int kMTiles, int kWarps, int kTokens, int kStages,
          template <int, int, int> class Copies, int kStepTokens>
__global__ __launch_bounds__(kWarps* kWarp, tensor_blocks_per_sm(kWarps)) void attend_tensor(
    const __grid_constant__ AttentionParams p,
    const __grid_constant__ typename Copies<16, 16, kWarp>::Maps maps) {
#if __CUDA_ARCH__ >= 900
  prefetch_params(p);
  Tensor<KV, kDim, kValueDim, kMTiles, kWarps, kTokens, kStages, Copies, kStepTokens>::attend(p, maps);
  wait_for_previous();  // in case the block had nothing to do
  start_next();
  finish_messages(p);
#endif
}

}  // namespace helix::cuda
