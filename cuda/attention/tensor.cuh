// SPDX-License-Identifier: Apache-2.0
// Partial attention on Hopper's tensor cores, for q of 16 bits and KV of the same type or of e4m3.
//
// Each warp is a worker of its own: it takes every kWarps-th KV tile of the block's work item, asks for it
// kStages KV tiles ahead (how is a template parameter, as layouts differ), and multiplies it without waiting
// for another warp. The warps meet only where a KV split ends.
//
// Beside e4m3 queries and weights are f16. Queries of bf16 are scaled row by row, and the inverse, the scale
// of the keys and that of the scores are one factor of the row's scores; the scale of the values multiplies
// the sums where a KV split ends. Weights go up to 2^kHeadroom and not up to 1: the sum of a million weights
// below the least f16 would be missed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/kernel.hpp"
#include "cuda/attention/tensor_copies.cuh"
#include "cuda/attention/tensor_products.cuh"
#include "cuda/attention/tensor_queries.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

inline constexpr int kGatherRows = 8;     ///< Rows that the warps bring together at a time: half of kMmaRows.
inline constexpr float kHeadroom = 8.0f;  ///< Base-2 logarithm of the largest weight beside e4m3.

/// Blocks of that many warps that an SM holds.
constexpr int tensor_blocks_per_sm(int warps) {
  return warps > 4 ? 1 : kBlocksPerSm;
}

/// The kernel for one type of KV, two head sizes, a number of m16 tiles in a query tile and kTokens tokens in
/// a KV tile, of which kStepTokens are multiplied at a time. `Copies`, of tensor_copies.cuh, fetches KV
/// tiles.
template <class KV, int kDim, int kValueDim, int kMTiles, int kWarps, int kTokens, int kStages,
          template <int, int, int> class Copies, int kStepTokens>
struct Tensor {
  using Plan = AttentionPlan<kTokens>;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kRows = kMTiles * kMmaRows;
  static constexpr int kSumStride = kValueDim + 4;  // f32: rows 16 bytes apart in the banks
  static constexpr int kBlocks = tensor_blocks_per_sm(kWarps);

  using Products = TensorProducts<KV, kDim, kValueDim, kMTiles, kStepTokens>;
  using Scores = typename Products::Scores;
  using Weights = typename Products::Weights;
  using T = typename Products::T;  // of queries and weights
  using Queries = TensorQueries<KV, kDim, kRows, kThreads>;
  using TileCopies = Copies<Products::kKeyBytes, Products::kValueBytes, kTokens>;
  static constexpr bool kIsFp8 = Products::kIsFp8;
  static constexpr int kValuesAt = kTokens * Products::kKeyBytes;  // in a KV tile
  static constexpr int kStageBytes = kValuesAt + kTokens * Products::kValueBytes;
  /// Of a stage: e4m3 has one for its keys and one for its values, which arrive while keys are multiplied. It
  /// has as many instructions for half the bytes, so that they are worth hiding.
  static constexpr int kBarriers = kIsFp8 ? 2 : 1;
  static_assert(kTokens % kStepTokens == 0);

  struct Shared {
    alignas(128) std::byte stages[kWarps][kStages][kStageBytes];
    alignas(16) T queries[kRows * Products::Places::kRowStride];
    alignas(16) float sums[kWarps][kGatherRows][kSumStride];
    float max[kWarps][kGatherRows];
    float sum[kWarps][kGatherRows];
    alignas(8) unsigned long long barriers[kWarps][kStages][kBarriers];
    Plan plan;
    float query_factors[kIsFp8 ? kRows : 1];  // what a row of queries was divided by
  };

  /// One warp's copies of the KV tiles that it will multiply: every kWarps-th of the block's work item.
  struct Producer {
    const AttentionParams& p;
    const Plan& plan;
    KvTileCursor at;
    int next;  // KV tile of the work item
    int count;
    TileCopies copies;  // of KV tile `next`

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
      copies.template issue<kBarriers>(p, at, stage, barrier);
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

  /// The values of a KV tile whose keys are there.
  struct Arrival {
    unsigned barrier;
    unsigned parity;

    __device__ __forceinline__ void wait() const {
      if constexpr (kBarriers > 1) barrier_wait(barrier, parity);
    }
  };

  /// What this lane's warp has found of each query row: sums of values, max (base 2; e4m3: less kHeadroom),
  /// sum of weights.
  struct Found {
    typename Products::Sums acc;
    float max[kMTiles][2];
    float sum[kMTiles][2];
  };

  /// What e4m3 keys and values of a KV head are multiplied by.
  struct KvScales {
    float k = 1.0f;
    float v = 1.0f;
  };

  /// What makes a score of a product of each of this lane's query rows.
  struct RowFactors {
    float of[kMTiles][2];
  };

  static __device__ void attend(const AttentionParams& p) {
    extern __shared__ __align__(128) std::byte memory[];
    auto& s = *reinterpret_cast<Shared*>(memory);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (lane == 0) {
      for (int i = 0; i < kStages * kBarriers; ++i)
        barrier_init(static_cast<unsigned>(__cvta_generic_to_shared(&s.barriers[warp][0][i])),
                     TileCopies::kArrivals);
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
      Queries queries;
      queries.read(p, query_tile, at.head);
      const KvScales scales = read_scales(p, at.head);
      constexpr bool kQueriesFirst = TileCopies::kTakesLoadUnits;
      for (int i = 0; i < kStages && done == 0 && !kQueriesFirst; ++i)
        producer.issue(stage_at + static_cast<unsigned>(i * kStageBytes),
                       barrier_at + static_cast<unsigned>(i * kBarriers * 8));
      queries.write(p, s.queries, s.query_factors);
      const Bounds bounds =
          bounds_of(p, query_tile, {s.plan.begin_token[at.query_tile], s.plan.end_token[at.query_tile]});
      __syncthreads();
      const RowFactors factors = row_factors(p, s, scales);
      // Behind copies that take the load units, no warp would see the queries until all warps had issued
      // theirs.
      for (int i = 0; i < kStages && done == 0 && kQueriesFirst; ++i)
        producer.issue(stage_at + static_cast<unsigned>(i * kStageBytes),
                       barrier_at + static_cast<unsigned>(i * kBarriers * 8));

      Found found = nothing();
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
        producer.issue(stage_at + static_cast<unsigned>(stage * kStageBytes), barrier);
        if (++stage == kStages) {
          stage = 0;
          parity ^= 1u;
        }
      }
      const SplitPartials partials{p, schedule.splits_of(at.query_tile, at.head)};
      gather(s, partials, query_tile, at.head, scales.v, found);
      combine_splits(partials, query_tile, at.query_tile, at.head);
      at.advance(p, s.plan, count);
    }
  }

 private:
  static __device__ __forceinline__ KvScales read_scales(const AttentionParams& p, int head) {
    KvScales scales;
    if constexpr (kIsFp8) {
      if (p.k_scale != nullptr) scales.k = p.k_scale[head];
      if (p.v_scale != nullptr) scales.v = p.v_scale[head];
    }
    return scales;
  }

  static __device__ __forceinline__ RowFactors row_factors(const AttentionParams& p, const Shared& s,
                                                           const KvScales& scales) {
    const int g = static_cast<int>(threadIdx.x) % kWarp / 4;
    RowFactors factors;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factors.of[m][half] = p.scale;
        // A factor of 0 would make not a number of the scores -inf of what is masked.
        if constexpr (kIsFp8) {
          const float factor = p.scale * scales.k * s.query_factors[m * kMmaRows + half * 8 + g];
          factors.of[m][half] = factor < 0x1p-120f ? 0x1p-120f : factor;
        }
      }
    }
    return factors;
  }

  /// Zeros outside of tokens [first, last): what an earlier KV tile left there may be infinite.
  static __device__ void clear_values(std::byte* kv_tile, int first, int last) {
    auto* values = reinterpret_cast<uint4*>(kv_tile + kValuesAt);
    constexpr int kChunks = Products::kValueBytes / 16;
    for (int i = static_cast<int>(threadIdx.x) % kWarp; i < kTokens * kChunks; i += kWarp) {
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
      for (int i = 0; i < kValueDim / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) found.acc[m][i][j] = 0.0f;
      }
      found.max[m][0] = found.max[m][1] = -kInfinity;
      found.sum[m][0] = found.sum[m][1] = 0.0f;
    }
    return found;
  }

  static constexpr int kNTiles = kStepTokens / 8;

  /// kStepTokens of a KV tile from its token `step` on; `tile_token` is the KV tile's first token.
  static __device__ __forceinline__ void multiply_tokens(const AttentionParams& p, const T* queries,
                                                         const std::byte* kv_tile, int step, int tile_token,
                                                         const Arrival& values, const Bounds& bounds,
                                                         const RowFactors& factors, Found& found) {
    const int token = tile_token + step;
    Scores scores;
    Products::multiply_keys(queries, kv_tile + step * Products::kKeyBytes, scores);
    // Scores stay raw where they can: the factor goes into the exponent, (x - max) * factor.
    const bool is_capped = p.soft_cap > 0.0f;
    RowFactors exponents;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        exponents.of[m][half] = is_capped ? kLog2E : factors.of[m][half] * kLog2E;
    }
    if (is_capped) cap_scores(scores, factors, p.soft_cap);
    if (token < bounds.inner.begin || token + kStepTokens > bounds.inner.end)
      mask_scores(scores, token, bounds);
    Weights weights;
    weigh(scores, exponents, found, weights);
    values.wait();
    Products::add_values(kv_tile + kValuesAt + step * Products::kValueBytes, weights, found.acc);
  }

  /// One step of the running softmax: scores become weights, and what was found shrinks to the new max.
  static __device__ __forceinline__ void weigh(const Scores& scores, const RowFactors& exponents,
                                               Found& found, Weights& weights) {
    bool shrinks = false;
    float shrink[kMTiles][2];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = exponents.of[m][half];
        float top = -kInfinity;
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          top = fmaxf(top, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(kIsFp8 ? fmaf(top, factor, -kHeadroom) : top * factor, found.max[m][half]);
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
        for (int i = 0; i < kValueDim / 8; ++i) {
          found.acc[m][i][0] *= shrink[m][0];
          found.acc[m][i][1] *= shrink[m][0];
          found.acc[m][i][2] *= shrink[m][1];
          found.acc[m][i][3] *= shrink[m][1];
        }
      }
    }
  }

  static __device__ void cap_scores(Scores& scores, const RowFactors& factors, float cap) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      const float inner[2] = {factors.of[m][0] / cap, factors.of[m][1] / cap};
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[m][n][j] = cap * fast_tanh(scores[m][n][j] * inner[j / 2]);
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

  /// A row of this lane's sums, of the columns of `part`, into shared memory.
  template <class Part>
  static __device__ __forceinline__ void store_part(float* row, Part part, int half, float value_scale,
                                                    const float (&sums)[kValueDim / 8][4]) {
    const int kq = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Column kq * 2 + j of instruction e holds element e of that lane group's bytes. Half of the lanes take
      // the other column first: no two of a bank.
      const bool is_odd = (i != 0) != (kq >= 2);
      float x[Part::kWide];
#pragma unroll
      for (int e = 0; e < Part::kWide; ++e) {
        x[e] = is_odd ? sums[Part::kTile + e][2 * half + 1] : sums[Part::kTile + e][2 * half];
        if constexpr (kIsFp8) x[e] *= value_scale;
      }
      float* at = row + part.column_of(kq * 2 + (is_odd ? 1 : 0));
      if constexpr (Part::kWide == 2) {
        *reinterpret_cast<float2*>(at) = {x[0], x[1]};
      } else {
#pragma unroll
        for (int e = 0; e < Part::kWide; e += 4)
          *reinterpret_cast<float4*>(at + e) = {x[e], x[e + 1], x[e + 2], x[e + 3]};
      }
    }
  }

  /// Brings the warps' sums together through shared memory and writes the KV split.
  static __device__ void gather(Shared& s, const SplitPartials& to, const QueryTile& query_tile, int head,
                                float value_scale, Found& found) {
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
        const auto store = [&](auto part) {
          store_part(s.sums[warp][g], part, half, value_scale, found.acc[m]);
        };
        Products::for_each_part(store, [&](auto even, auto odd) {
          store(even);
          store(odd);
        });
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

template <class KV, int kDim, int kValueDim, int kMTiles, int kWarps, int kTokens, int kStages,
          template <int, int, int> class Copies, int kStepTokens>
__global__ __launch_bounds__(kWarps* kWarp, tensor_blocks_per_sm(kWarps)) void attend_tensor(
    const __grid_constant__ AttentionParams p) {
#if __CUDA_ARCH__ >= 900
  prefetch_params(p);
  follow_previous();
  Tensor<KV, kDim, kValueDim, kMTiles, kWarps, kTokens, kStages, Copies, kStepTokens>::attend(p);
  finish_messages(p);
#endif
}

}  // namespace helix::cuda
