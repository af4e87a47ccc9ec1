// SPDX-License-Identifier: Apache-2.0
// Partial attention on Hopper's tensor cores, for q and KV of one 16-bit type.
//
// Each warp is a worker of its own: it takes every kWarps-th KV tile of the block's work item, asks for it
// kStages KV tiles ahead (how is a template parameter, as layouts differ), and multiplies it without waiting
// for another warp. The warps meet only where a KV split ends.
//
// Both products are m16n8k16 with the queries as rows. The fragments come straight from the unswizzled rows:
// the order of the summed dimension is free as long as both sides agree, so a lane takes 16 contiguous bytes
// of a key where the instruction names scattered columns, and of V it pairs two tokens' elements in
// registers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/kernel.hpp"
#include "cuda/attention/tensor_copies.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

inline constexpr int kMmaRows = 16;    ///< Query rows of a matrix instruction.
inline constexpr int kGatherRows = 8;  ///< Rows that the warps bring together at a time: half of these.

/// Blocks of that many warps that an SM holds.
constexpr int tensor_blocks_per_sm(int warps) {
  return warps > 4 ? 1 : kBlocksPerSm;
}

/// The kernel for one type, head size and number of m16 tiles in a query tile. `Copies`, of
/// tensor_copies.cuh, fetches KV tiles.
template <class T, int kDim, int kMTiles, int kWarps, int kStages, template <int> class Copies>
struct Tensor {
  using Plan = AttentionPlan<kKvTileTokens>;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kRows = kMTiles * kMmaRows;
  static constexpr int kQueryStride = kDim + 8;  // elements: rows 16 bytes apart in the banks
  static constexpr int kSumStride = kDim + 4;    // f32: likewise
  static constexpr int kBlocks = tensor_blocks_per_sm(kWarps);
  static constexpr int kTileBytes = kKvTileTokens * kDim * 2;  // of keys, or of values
  static constexpr int kStageBytes = 2 * kTileBytes;

  struct Shared {
    alignas(128) std::byte stages[kWarps][kStages][kStageBytes];
    alignas(16) T queries[kRows * kQueryStride];
    alignas(16) float sums[kWarps][kGatherRows][kSumStride];
    float max[kWarps][kGatherRows];
    float sum[kWarps][kGatherRows];
    alignas(8) unsigned long long barriers[kWarps][kStages];
    Plan plan;
  };

  /// One warp's copies of the KV tiles that it will multiply: every kWarps-th of the block's work item.
  struct Producer {
    const AttentionParams& p;
    const Plan& plan;
    KvTileCursor at;
    int next;  // KV tile of the work item
    int count;
    Copies<kDim> copies;  // of KV tile `next`

    __device__ Producer(const AttentionParams& params, const Plan& the_plan, const WorkItem& item)
        : p(params),
          plan(the_plan),
          at(item.start),
          next(static_cast<int>(threadIdx.x) / kWarp),
          count(item.count) {
      if (next >= count) return;
      at.advance(p, plan, next);
      copies.look_up(p, plan, at);
    }

    __device__ void issue(unsigned stage, unsigned barrier) {
      if (next >= count) return;
      copies.issue(p, at, stage, barrier);
      next += kWarps;
      if (next < count) {
        at.advance(p, plan, kWarps);
        copies.look_up(p, plan, at);
      }
    }
  };

  /// Local tokens that this lane's query rows see, and what all of them see.
  struct Bounds {
    int low[kMTiles][2];
    int high[kMTiles][2];
    TokenRange inner{0, INT64_MAX};
  };

  /// What this lane's warp has found of each query row: sums of values, max (base 2), sum of weights.
  struct Found {
    float acc[kMTiles][kDim / 8][4];
    float max[kMTiles][2];
    float sum[kMTiles][2];
  };

  static __device__ void attend(const AttentionParams& p) {
    extern __shared__ __align__(128) std::byte memory[];
    auto& s = *reinterpret_cast<Shared*>(memory);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (lane == 0) {
      for (int stage = 0; stage < kStages; ++stage)
        barrier_init(static_cast<unsigned>(__cvta_generic_to_shared(&s.barriers[warp][stage])),
                     Copies<kDim>::kArrivals);
      fence_barrier_init();
    }
    make_plan(p, s.plan);
    const Schedule<Plan> schedule(p, s.plan);
    const WorkItem item = schedule.work_item(static_cast<int>(blockIdx.x));
    if (item.count == 0) return;

    const auto stage_at = static_cast<unsigned>(__cvta_generic_to_shared(s.stages[warp]));
    const auto barrier_at = static_cast<unsigned>(__cvta_generic_to_shared(s.barriers[warp]));
    Producer producer(p, s.plan, item);
    KvTileCursor at = item.start;
    int mine = warp;  // this warp's next KV tile of the work item
    int stage = 0;
    unsigned parity = 0;
    for (int done = 0, count = 0; done < item.count; done += count) {
      count = min(item.count - done, at.num_kv_tiles - at.kv_tile);
      const QueryTile query_tile = s.plan.query_tiles[at.query_tile];
      // Behind the copies of all blocks the queries would wait for microseconds, so they are asked for first.
      const QueryRows queries = read_queries(p, query_tile, at.head);
      constexpr bool kQueriesFirst = Copies<kDim>::kTakesLoadUnits;
      for (int i = 0; i < kStages && done == 0 && !kQueriesFirst; ++i)
        producer.issue(stage_at + static_cast<unsigned>(i * kStageBytes),
                       barrier_at + static_cast<unsigned>(i * 8));
      write_queries(queries, s.queries);
      const Bounds bounds =
          bounds_of(p, query_tile, {s.plan.begin_token[at.query_tile], s.plan.end_token[at.query_tile]});
      __syncthreads();
      // Behind copies that take the load units, no warp would see the queries until all warps had issued
      // theirs.
      for (int i = 0; i < kStages && done == 0 && kQueriesFirst; ++i)
        producer.issue(stage_at + static_cast<unsigned>(i * kStageBytes),
                       barrier_at + static_cast<unsigned>(i * 8));

      Found found = nothing();
      const int first_token = s.plan.first_kv_tile_token(at.query_tile) + at.kv_tile * kKvTileTokens;
      for (; mine < done + count; mine += kWarps) {
        const int token = first_token + (mine - done) * kKvTileTokens;
        std::byte* kv_tile = s.stages[warp][stage];
        const unsigned barrier = barrier_at + static_cast<unsigned>(stage * 8);
        barrier_wait(barrier, parity);
        const int first = ::max(0, s.plan.begin_token[at.query_tile] - token);
        const int last = ::max(0, s.plan.end_token[at.query_tile] - token);
        const bool is_whole = first == 0 && last >= kKvTileTokens;
        if (!is_whole) clear_values(kv_tile, first, last);
        multiply_kv_tile(p, s.queries, kv_tile, token, bounds, found);
        if (!is_whole) Copies<kDim>::fence();
        __syncwarp();
        producer.issue(stage_at + static_cast<unsigned>(stage * kStageBytes), barrier);
        if (++stage == kStages) {
          stage = 0;
          parity ^= 1u;
        }
      }
      const SplitPartials partials{p, schedule.splits_of(at.query_tile, at.head)};
      gather(s, partials, query_tile, at.head, found);
      combine_splits(partials, query_tile, at.query_tile, at.head);
      at.advance(p, s.plan, count);
    }
  }

 private:
  /// A thread's part of a query tile, in chunks of 16 bytes.
  struct QueryRows {
    static constexpr int kRowChunks = kDim / 8;
    static constexpr int kCount = kRows * kRowChunks / kThreads;
    static_assert(kCount * kThreads == kRows * kRowChunks);
    uint4 chunks[kCount];
  };

  static __device__ QueryRows read_queries(const AttentionParams& p, const QueryTile& query_tile, int head) {
    const T* q = static_cast<const T*>(p.q);
    QueryRows result;
#pragma unroll
    for (int k = 0; k < QueryRows::kCount; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      const int row = i / QueryRows::kRowChunks;
      result.chunks[k] = uint4{0, 0, 0, 0};
      if (row < query_tile.num_rows) {
        result.chunks[k] = *reinterpret_cast<const uint4*>(
            q + query_tile.token(p, row) * p.q_token_stride +
            query_tile.query_head(p, head, row) * p.q_head_stride + i % QueryRows::kRowChunks * 8);
      }
    }
    return result;
  }

  static __device__ void write_queries(const QueryRows& from, T* queries) {
#pragma unroll
    for (int k = 0; k < QueryRows::kCount; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      *reinterpret_cast<uint4*>(queries + i / QueryRows::kRowChunks * kQueryStride +
                                i % QueryRows::kRowChunks * 8) = from.chunks[k];
    }
  }

  /// Zeros outside of tokens [first, last): what an earlier KV tile left there may be infinite.
  static __device__ void clear_values(std::byte* kv_tile, int first, int last) {
    auto* values = reinterpret_cast<uint4*>(kv_tile + kTileBytes);
    constexpr int kChunks = kDim / 8;
    for (int i = static_cast<int>(threadIdx.x) % kWarp; i < kKvTileTokens * kChunks; i += kWarp) {
      const int token = i / kChunks;
      if (token < first || token >= last) values[i] = uint4{0, 0, 0, 0};
    }
    __syncwarp();
  }

  static __device__ __forceinline__ Bounds bounds_of(const AttentionParams& p, const QueryTile& query_tile,
                                                     TokenRange all) {
    const int g = static_cast<int>(threadIdx.x) % kWarp / 4;
    const bool is_one_token = query_tile.token(p, 0) == query_tile.token(p, query_tile.num_rows - 1);
    Bounds bounds;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * kMmaRows + half * 8 + g;
        TokenRange seen{0, 0};
        if (row < query_tile.num_rows)
          seen = is_one_token ? all : visible(p, p.positions[query_tile.token(p, row)]);
        bounds.low[m][half] = static_cast<int>(seen.begin);
        bounds.high[m][half] = static_cast<int>(seen.end);
        if (row < query_tile.num_rows) {
          bounds.inner.begin = ::max(bounds.inner.begin, seen.begin);
          bounds.inner.end = ::min(bounds.inner.end, seen.end);
        }
      }
    }
    return bounds;
  }

  static __device__ __forceinline__ Found nothing() {
    Found found;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) found.acc[m][i][j] = 0.0f;
      }
      found.max[m][0] = found.max[m][1] = -kInfinity;
      found.sum[m][0] = found.sum[m][1] = 0.0f;
    }
    return found;
  }

  static constexpr int kNTiles = kKvTileTokens / 8;
  using Scores = float[kMTiles][kNTiles][4];
  using Weights = unsigned[kMTiles][kNTiles][2];  // pairs of tokens, of rows g and g + 8

  static __device__ __forceinline__ void multiply_kv_tile(const AttentionParams& p, const T* queries,
                                                          const std::byte* kv_tile, int token,
                                                          const Bounds& bounds, Found& found) {
    Scores scores;
    multiply_keys(queries, reinterpret_cast<const T*>(kv_tile), scores);
    // Scores stay raw where they can: the scale goes into the exponent, (x - max) * scale.
    float factor = p.scale * kLog2E;
    if (p.soft_cap > 0.0f) {
      cap_scores(scores, p.scale, p.soft_cap);
      factor = kLog2E;
    }
    if (token < bounds.inner.begin || token + kKvTileTokens > bounds.inner.end)
      mask_scores(scores, token, bounds);
    Weights weights;
    weigh(scores, factor, found, weights);
    add_values(reinterpret_cast<const T*>(kv_tile + kTileBytes), weights, found);
  }

  /// scores = queries keys^T of a KV tile.
  static __device__ __forceinline__ void multiply_keys(const T* queries, const T* keys, Scores& scores) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int g = lane / 4;   // row of the queries, token of the keys
    const int kq = lane % 4;  // quarter of the summed dimension
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[m][n][j] = 0.0f;
      }
    }
#pragma unroll
    for (int step = 0; step < kDim / 32; ++step) {
      const int chunk = (4 * step + kq) * 8;
      uint4 q[kMTiles][2];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          q[m][half] =
              *reinterpret_cast<const uint4*>(queries + (m * kMmaRows + half * 8 + g) * kQueryStride + chunk);
        }
      }
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        const uint4 k = *reinterpret_cast<const uint4*>(keys + (n * 8 + g) * kDim + chunk);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          multiply<T>(scores[m][n], q[m][0].x, q[m][1].x, q[m][0].y, q[m][1].y, k.x, k.y);
          multiply<T>(scores[m][n], q[m][0].z, q[m][1].z, q[m][0].w, q[m][1].w, k.z, k.w);
        }
      }
    }
  }

  /// One step of the running softmax: scores become weights, and what was found shrinks to the new max.
  static __device__ __forceinline__ void weigh(const Scores& scores, float factor, Found& found,
                                               Weights& weights) {
    bool shrinks = false;
    float shrink[kMTiles][2];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -kInfinity;
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          top = fmaxf(top, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(top * factor, found.max[m][half]);
        const float pivot = top == -kInfinity ? 0.0f : top;
        shrink[m][half] = fast_exp2(found.max[m][half] - pivot);
        shrinks |= found.max[m][half] != top;
        found.max[m][half] = top;
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          const float x = fast_exp2(fmaf(scores[m][n][2 * half], factor, -pivot));
          const float y = fast_exp2(fmaf(scores[m][n][2 * half + 1], factor, -pivot));
          added += x + y;
          weights[m][n][half] = pack<T>(x, y);
        }
        found.sum[m][half] = fmaf(found.sum[m][half], shrink[m][half], added);
      }
    }
    if (__any_sync(~0u, shrinks)) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i) {
          found.acc[m][i][0] *= shrink[m][0];
          found.acc[m][i][1] *= shrink[m][0];
          found.acc[m][i][2] *= shrink[m][1];
          found.acc[m][i][3] *= shrink[m][1];
        }
      }
    }
  }

  /// found.acc += weights values of a KV tile.
  static __device__ __forceinline__ void add_values(const T* values, const Weights& weights, Found& found) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int g = lane / 4;   // column of the values
    const int kq = lane % 4;  // quarter of the summed dimension
#pragma unroll
    for (int block = 0; block < kKvTileTokens / 16; ++block) {
      const T* row = values + (block * 16 + kq * 2) * kDim;
      if constexpr (kDim == 64) {
        multiply_values(load_values(row, g), 0, block, weights, found.acc);
      } else {
#pragma unroll
        for (int part = 0; part < kDim / 64; part += 2) {
          // Rows are whole banks apart, so half of the lanes take the other part first.
          const bool is_odd = kq % 2 != 0;
          const Values x = load_values(row, chunk_of(g, part + (is_odd ? 1 : 0)));
          const Values y = load_values(row, chunk_of(g, part + (is_odd ? 0 : 1)));
          multiply_values(select(is_odd, y, x), part, block, weights, found.acc);
          multiply_values(select(is_odd, x, y), part + 1, block, weights, found.acc);
        }
      }
    }
  }

  static __device__ void cap_scores(Scores& scores, float scale, float cap) {
    const float factor = scale / cap;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[m][n][j] = cap * fast_tanh(scores[m][n][j] * factor);
      }
    }
  }

  /// -inf for tokens outside of what a row sees.
  static __device__ void mask_scores(Scores& scores, int token, const Bounds& bounds) {
    const int kq = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = token + n * 8 + kq * 2 + j % 2;
          if (at < bounds.low[m][j / 2] || at >= bounds.high[m][j / 2]) scores[m][n][j] = -kInfinity;
        }
      }
    }
  }

  /// Eight columns of the four tokens that a lane gives to one instruction.
  struct Values {
    unsigned words[4][4];
  };

  /// The 8 columns, out of each 64, of lane group `g` in part `part`.
  static __device__ int chunk_of(int g, int part) {
    return part * 8 + (part % 2 != 0 ? (g + 4) % 8 : g);
  }

  static __device__ __forceinline__ Values load_values(const T* row, int chunk) {
    constexpr int kTokens[4] = {0, 1, 8, 9};
    Values values;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 x = *reinterpret_cast<const uint4*>(row + kTokens[i] * kDim + chunk * 8);
      values.words[i][0] = x.x;
      values.words[i][1] = x.y;
      values.words[i][2] = x.z;
      values.words[i][3] = x.w;
    }
    return values;
  }

  static __device__ __forceinline__ Values select(bool condition, const Values& x, const Values& y) {
    Values values;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) values.words[i][j] = condition ? x.words[i][j] : y.words[i][j];
    }
    return values;
  }

  /// acc += weights of 16 tokens x 64 columns of values.
  static __device__ __forceinline__ void multiply_values(const Values& v, int part, int block,
                                                         const Weights& weights,
                                                         float (&acc)[kMTiles][kDim / 8][4]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const unsigned halves = e % 2 == 0 ? 0x5410u : 0x7632u;  // both tokens' lower or upper ones
      const unsigned b0 = __byte_perm(v.words[0][e / 2], v.words[1][e / 2], halves);
      const unsigned b1 = __byte_perm(v.words[2][e / 2], v.words[3][e / 2], halves);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        multiply<T>(acc[m][part * 8 + e], weights[m][2 * block][0], weights[m][2 * block][1],
                    weights[m][2 * block + 1][0], weights[m][2 * block + 1][1], b0, b1);
      }
    }
  }

  /// Brings the warps' sums together through shared memory and writes the KV split.
  static __device__ void gather(Shared& s, const SplitPartials& to, const QueryTile& query_tile, int head,
                                Found& found) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int g = lane / 4;
    const int kq = lane % 4;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first_row = m * kMmaRows + half * kGatherRows;
        if (first_row >= query_tile.num_rows) continue;
        found.sum[m][half] += __shfl_xor_sync(~0u, found.sum[m][half], 1);
        found.sum[m][half] += __shfl_xor_sync(~0u, found.sum[m][half], 2);
        if (kq == 0) {
          s.max[warp][g] = found.max[m][half];
          s.sum[warp][g] = found.sum[m][half];
        }
#pragma unroll
        for (int part = 0; part < kDim / 64; ++part) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            // Column kq * 2 + j of instruction part * 8 + e holds element e of that lane group's 16 bytes.
            // Half of the lanes take the other column first: no two of a bank.
            const bool is_odd = (i != 0) != (kq >= 2);
            float x[8];
#pragma unroll
            for (int e = 0; e < 8; ++e)
              x[e] = is_odd ? found.acc[m][part * 8 + e][2 * half + 1] : found.acc[m][part * 8 + e][2 * half];
            auto* at =
                reinterpret_cast<float4*>(&s.sums[warp][g][chunk_of(kq * 2 + (is_odd ? 1 : 0), part) * 8]);
            at[0] = {x[0], x[1], x[2], x[3]};
            at[1] = {x[4], x[5], x[6], x[7]};
          }
        }
        __syncthreads();
        const BlockResult<kWarps> result{
            &s.sums[0][0][0], kGatherRows * kSumStride, kSumStride, &s.max[0][0], &s.sum[0][0], kGatherRows};
        write_split(to, query_tile, head, first_row, min(kGatherRows, query_tile.num_rows - first_row),
                    result);
        __syncthreads();
      }
    }
  }
};

template <class T, int kDim, int kMTiles, int kWarps, int kStages, template <int> class Copies>
__global__ __launch_bounds__(kWarps* kWarp, tensor_blocks_per_sm(kWarps)) void attend_tensor(
    const __grid_constant__ AttentionParams p) {
#if __CUDA_ARCH__ >= 900
  prefetch_params(p);
  wait_for_previous();
  Tensor<T, kDim, kMTiles, kWarps, kStages, Copies>::attend(p);
  finish_messages(p);
#endif
}

/// Launches of the kernel with one way to fetch KV tiles.
template <template <int> class Copies>
struct TensorLaunch {
  template <class T, int kDim, int kMTiles, int kWarps, int kStages>
  static void launch(const AttentionParams& p, int blocks, StreamHandle stream) {
    using Kernel = Tensor<T, kDim, kMTiles, kWarps, kStages, Copies>;
    constexpr int kBytes = static_cast<int>(sizeof(typename Kernel::Shared));
    constexpr int kOther = 1024 + 64;  // the system's, and static ones
    static_assert(Kernel::kBlocks * (kBytes + kOther) <= 228 * 1024);
    const auto kernel = attend_tensor<T, kDim, kMTiles, kWarps, kStages, Copies>;
    HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    launch_early(kernel, blocks, Kernel::kThreads, kBytes, stream, true, p);
  }

  template <class T>
  static void launch_dim(const AttentionParams& p, const AttentionGrid& grid) {
    // Measured on H200: eight warps an SM hide each other's latencies; deeper stages add nothing.
    const bool is_wide = p.query_tile_rows > kMmaRows;
    // Where each query tile is split over many SMs, its epilogue is what counts: half as many splits to
    // combine.
    const int sms = grid.blocks / kBlocksPerSm;
    if (grid.is_whole && p.head_dim == 128 && 2 * p.num_query_tiles * p.kv_heads <= sms)
      return is_wide ? launch<T, 128, 2, 8, 1>(p, sms, grid.stream)
                     : launch<T, 128, 1, 8, 1>(p, sms, grid.stream);
    switch (p.head_dim) {
      case 64:
        return is_wide ? launch<T, 64, 2, 4, 2>(p, grid.blocks, grid.stream)
                       : launch<T, 64, 1, 4, 2>(p, grid.blocks, grid.stream);
      case 128:
        return is_wide ? launch<T, 128, 2, 4, 1>(p, grid.blocks, grid.stream)
                       : launch<T, 128, 1, 4, 1>(p, grid.blocks, grid.stream);
      default:
        return launch<T, 256, 1, 2, 1>(p, grid.blocks, grid.stream);
    }
  }

  /// AttentionKernel::launch.
  static void run(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
    if (call.dtype == DType::bf16) {
      launch_dim<bf16>(p, grid);
    } else {
      launch_dim<f16>(p, grid);
    }
  }
};

/// What every way to fetch KV tiles needs: the device, one 16-bit type, a head size that is built, no
/// latents.
inline bool fits_tensor(const AttentionCall& call) {
  const KvFormat& format = call.kv.format;
  const std::int64_t dim = format.head_dim;
  return call.is_hopper && !format.is_latent && call.dtype == format.dtype && size_bytes(call.dtype) == 2 &&
         format.value_dim == dim && (dim == 64 || dim == 128 || dim == 256) && call.q_alignment == 16 &&
         call.kv_alignment == 16;
}

/// Rows of a query tile: as many as registers hold.
inline int tensor_query_tile_rows(std::int64_t head_dim, std::int64_t) {
  return head_dim == 256 ? kMmaRows : 2 * kMmaRows;
}

inline int tensor_sm_rows(std::int64_t head_dim, std::int64_t value_dim) {
  return kBlocksPerSm * tensor_query_tile_rows(head_dim, value_dim);
}

}  // namespace helix::cuda
