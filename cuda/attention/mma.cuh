// SPDX-License-Identifier: Apache-2.0
// Partial attention by mma.sync and cp.async of compute capability 8.0, on every supported GPU: out =
// softmax(scale q k^T) v and its lse, for q of 16 bits, KV of 16 bits or of e4m3, rows of any strides and
// alignment.
//
// A block of four warps walks the KV tiles of its work item. Half-tiles, a tile's keys and then its values,
// pass through a ring of kStages stages in shared memory by asynchronous copies, kStages - 1 ahead, with one
// barrier each. Of a query tile of 64 rows each warp has 16, and multiplies all tokens. With 16 rows all
// warps have the same rows; each takes a quarter of every tile's tokens and has a softmax of its own, and
// they are merged where the KV split ends.
//
// Bound by memory for few rows. For many rows bound by shared memory, where reading a key's fragment serves
// only 16 rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/mma_products.cuh"
#include "cuda/attention/mma_queries.cuh"
#include "cuda/attention/mma_ring.cuh"
#include "cuda/attention/mma_rows.cuh"
#include "cuda/attention/mma_softmax.cuh"
#include "cuda/attention/mma_walk.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// ShortTileLimits for KV tiles twice as long.
struct MmaLimits : ShortTileLimits {
  static constexpr int kEpilogueTiles = 4;
  static constexpr int kShortSplitTiles = 2;
  static constexpr int kSplitTiles = 4;
};
/// MmaLimits for query tiles of many rows.
struct MmaRowsLimits : MmaLimits {
  static constexpr int kPaddingTiles = 4;
};

inline constexpr int kMmaWarps = 4;

/// The kernel for keys of up to kDim columns, values of up to kValueDim, and query tiles of 16 kRowWarps
/// rows. kHasRest: q and weights have more bits than KV, see MmaQueries.
template <class KV, int kDim, int kValueDim, int kRowWarps, int kTokens, int kStages, bool kHasRest>
struct Mma {
  using Limits = std::conditional_t<(kRowWarps > 1), MmaRowsLimits, MmaLimits>;
  using Plan = AttentionPlan<kTokens, Limits>;
  using Products = MmaProducts<KV>;
  using T = typename Products::T;
  static constexpr int kThreads = kMmaWarps * kWarp;
  static constexpr int kRingStages = kStages;
  static constexpr int kRows = kRowWarps * kMmaRows;
  static constexpr int kTokenWarps = kMmaWarps / kRowWarps;
  static constexpr int kStepTokens = kTokens / kTokenWarps;  ///< Tokens of a KV tile that a warp multiplies.
  static constexpr int kNTiles = kStepTokens / 8;
  static constexpr int kKeyBytes = kDim * static_cast<int>(sizeof(KV));
  static constexpr int kValueBytes = kValueDim * static_cast<int>(sizeof(KV));
  static constexpr int kStageBytes = kTokens * (std::max(kKeyBytes, kValueBytes) + kChunkBytes);
  using Queries = MmaQueries<KV, kDim, kRows, kHasRest>;
  using Sums = float[1][kValueDim / 8][4];
  static_assert(kStepTokens % 16 == 0 && kStages >= 2);

  static constexpr int kSumStride = kValueDim + 8;  ///< f32, padded: rows in different banks
  /// Rows whose sums, of all warps, fit into the ring at once.
  static constexpr int kGatherRows = [] {
    int rows = kRows;
    while (kTokenWarps * rows * kSumStride * 4 > kStages * kStageBytes && rows > 8) rows /= 2;
    return rows;
  }();

  using Ring = MmaRing<Mma>;

  struct Shared {
    union {
      alignas(128) std::byte stages[kStages][kStageBytes];
      float sums[kTokenWarps][kGatherRows][kSumStride];
    };
    alignas(16) T queries[Queries::kCount];
    float query_factors[kRows];
    TokenPlace places[2][kTokens];
    float max[kTokenWarps][kGatherRows];
    float sum[kTokenWarps][kGatherRows];
    Plan plan;
  };

  static __device__ void attend(const AttentionParams& p, const RowAlignment& alignment) {
    extern __shared__ __align__(128) std::byte memory[];
    auto& s = *reinterpret_cast<Shared*>(memory);
    const auto attend_part = [&](const Schedule<Plan>& schedule, const KvTileCursor& at,
                                 const QueryTile& query_tile, int kv_tiles) {
      constexpr int kElement = static_cast<int>(sizeof(KV));
      Ring ring{s,
                {p, s.plan, at.query_tile, at.kv_tile},
                {p.k, p.rope, at.head, p.key_columns * kElement, p.head_dim * kElement},
                {p.v, p.v, at.head, p.value_dim * kElement, p.value_dim * kElement},
                2 * kv_tiles,
                alignment.kv};
      ring.begin();
      Queries::load(p, query_tile, at.head, alignment.q, s.queries, s.query_factors);
      const SplitPartials partials{p, schedule.splits_of(at.query_tile, at.head)};
      attend_tiles(p, s, ring, query_tile, at.head, kv_tiles, partials);
      return partials;
    };
    walk_work_item(p, s.plan, attend_part);
  }

 private:
  static __device__ __forceinline__ void attend_tiles(const AttentionParams& p, Shared& s, Ring& ring,
                                                      const QueryTile& query_tile, int head, int count,
                                                      const SplitPartials& partials) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int row = warp % kRowWarps * kMmaRows;  // first row of this warp
    const int step = warp / kRowWarps * kStepTokens;
    const MmaBounds bounds(p, query_tile, row);
    const float key_scale = p.k_scale != nullptr ? p.k_scale[head] : 1.0f;
    const float value_scale = p.v_scale != nullptr ? p.v_scale[head] : 1.0f;
    const auto stages_at = static_cast<unsigned>(__cvta_generic_to_shared(s.stages));
    const auto queries = static_cast<unsigned>(__cvta_generic_to_shared(s.queries + row * Queries::kStride));
    __syncthreads();
    const MmaFactors factors(p, key_scale, s.query_factors + row);
    MmaRunning running;
    Sums sums;
#pragma unroll
    for (auto& x : sums[0]) x[0] = x[1] = x[2] = x[3] = 0.0f;
    int stage = 0;
    const auto next_stage = [&] {
      wait_for_copies<kStages - 2>();
      __syncthreads();
      ring.ask();
      const unsigned at = stages_at + static_cast<unsigned>(stage * kStageBytes);
      stage = stage + 1 == kStages ? 0 : stage + 1;
      return at;
    };
#pragma unroll 1
    for (int tile = 0; tile < count; ++tile) {
      const int token = ring.look_up.first + tile * kTokens + step;
      const bool sees = bounds.sees(token, kStepTokens);
      unsigned weights[1][kNTiles / 2][4];
      unsigned rests[1][kHasRest ? kNTiles / 2 : 1][4];
      const unsigned keys = next_stage() + static_cast<unsigned>(step * (kKeyBytes + kChunkBytes));
      if (sees) {
        float scores[kNTiles][4];
#pragma unroll
        for (auto& x : scores) x[0] = x[1] = x[2] = x[3] = 0.0f;
        Products::template multiply_keys<kDim, kKeyBytes + kChunkBytes>(queries, keys, scores);
        if constexpr (kHasRest) {
          Products::template multiply_keys<kDim, kKeyBytes + kChunkBytes>(
              queries + kRows * Queries::kStride * 2, keys, scores);
        }
        cap_and_mask(factors, bounds, token, scores);
        float tops[2];
        float shrink[2];
        top_scores(scores, tops);
        const bool shrinks = weigh_scores<T>(factors, tops, scores, running, shrink);
        if (__any_sync(~0u, shrinks)) shrink_sums(shrink, sums[0]);
        pack_weights<T>(scores, weights[0]);
        if constexpr (kHasRest) pack_rests(scores, weights[0], rests[0]);
      }
      const unsigned values = next_stage() + static_cast<unsigned>(step * (kValueBytes + kChunkBytes));
      if (sees) {
        Products::template add_values<kValueBytes + kChunkBytes>(weights, values, sums);
        if constexpr (kHasRest) Products::template add_values<kValueBytes + kChunkBytes>(rests, values, sums);
      }
    }
    __syncthreads();
    gather(s, partials, query_tile, head, value_scale, running, sums);
  }

  /// Merges the warps' sums through shared memory and writes the KV split.
  static __device__ __forceinline__ void gather(Shared& s, const SplitPartials& to,
                                                const QueryTile& query_tile, int head, float value_scale,
                                                MmaRunning& running, const Sums& sums) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int part = warp / kRowWarps;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      running.sum[half] += __shfl_xor_sync(~0u, running.sum[half], 1);
      running.sum[half] += __shfl_xor_sync(~0u, running.sum[half], 2);
    }
#pragma unroll 1
    for (int first = 0; first < query_tile.num_rows; first += kGatherRows) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp % kRowWarps * kMmaRows + half * 8 + lane / 4 - first;
        if (row < 0 || row >= kGatherRows) continue;
        if (lane % 4 == 0) {
          s.max[part][row] = running.max[half];
          s.sum[part][row] = running.sum[half];
        }
        Products::store_row(s.sums[part][row], half, value_scale, sums[0]);
      }
      __syncthreads();
      const BlockResult<kTokenWarps> result{
          &s.sums[0][0][0], kGatherRows * kSumStride, kSumStride, &s.max[0][0], &s.sum[0][0], kGatherRows};
      write_split(to, query_tile, head, first, ::min(kGatherRows, query_tile.num_rows - first), result);
      __syncthreads();
    }
  }
};

template <class KV, int kDim, int kValueDim, int kRowWarps, int kTokens, int kStages, bool kHasRest,
          int kBlocks>
__global__ __launch_bounds__(kMmaWarps* kWarp,
                             kBlocks) void attend_mma(const __grid_constant__ AttentionParams p,
                                                      RowAlignment alignment) {
  prefetch_params(p);
  follow_previous(p);
  Mma<KV, kDim, kValueDim, kRowWarps, kTokens, kStages, kHasRest>::attend(p, alignment);
  finish_messages(p);
}

}  // namespace helix::cuda
