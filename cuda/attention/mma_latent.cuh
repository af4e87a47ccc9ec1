// SPDX-License-Identifier: Apache-2.0
// Partial attention over latents of 512 columns and 64 of rope (MLA) by mma.sync and cp.async of compute
// capability 8.0, on every supported GPU: out = softmax(scale q k^T) v and its lse, for q of 16 bits, KV of
// 16 bits or of e4m3, rows of any strides and alignment.
//
// A block of eight warps has 16 to 64 query rows and KV tiles of 32 tokens, whose rows are keys and values at
// once. A warp computes scores of 16 rows and 16 tokens, and the weights meet in shared memory. Each warp
// accumulates 64 value columns of all rows. With two stages the next tile is copied while this one is
// multiplied. With one stage, for devices whose shared memory has no room for two, the block waits for every
// tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/latent_shape.hpp"
#include "cuda/attention/mma_products.cuh"
#include "cuda/attention/mma_queries.cuh"
#include "cuda/attention/mma_ring.cuh"
#include "cuda/attention/mma_rows.cuh"
#include "cuda/attention/mma_softmax.cuh"
#include "cuda/attention/mma_walk.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

inline constexpr int kMmaLatentWarps = 8;

/// The kernel for query tiles of 16 kRowWarps rows. kHasRest: q and weights have more bits than KV, see
/// MmaQueries.
template <class KV, int kRowWarps, int kStages, bool kHasRest>
struct MmaLatent {
  static constexpr int kTokens = 32;  ///< Tokens of a KV tile.
  static constexpr int kTokenWarps = 2;
  using Plan = AttentionPlan<kTokens>;
  using Products = MmaProducts<KV>;
  using T = typename Products::T;
  static constexpr int kThreads = kMmaLatentWarps * kWarp;
  static constexpr int kTileStages = kStages;
  static constexpr int kRows = kRowWarps * kMmaRows;
  static constexpr int kElement = static_cast<int>(sizeof(KV));
  static constexpr int kRowBytes = kLatentKeyColumns * kElement;
  static constexpr int kRowStride = kRowBytes + kChunkBytes;
  static constexpr int kStageBytes = kTokens * kRowStride;
  static constexpr int kWarpColumns = kLatentColumns / kMmaLatentWarps;
  static constexpr int kWeightStride = kTokens + kChunkBytes / 2;  ///< Elements.
  static constexpr int kParts = kHasRest ? 2 : 1;  ///< bf16 terms of a query element and of a weight.
  using Queries = MmaQueries<KV, kLatentKeyColumns, kRows, kHasRest>;
  using Sums = float[kRowWarps][kWarpColumns / 8][4];
  static_assert(kTokenWarps * kRowWarps <= kMmaLatentWarps);

  static constexpr int kSumStride = kLatentColumns + 8;  ///< f32, padded: rows in different banks
  /// Rows whose sums fit into the stages at once.
  static constexpr int kGatherRows = [] {
    int rows = kRows;
    while (rows * kSumStride * 4 > kStages * kStageBytes) rows /= 2;
    return rows;
  }();

  using Tiles = MmaLatentTiles<MmaLatent>;

  struct Shared {
    union {
      alignas(128) std::byte stages[kStages][kStageBytes];
      float sums[kGatherRows][kSumStride];
    };
    alignas(16) T queries[Queries::kCount];
    alignas(16) T weights[kParts][kRows][kWeightStride];
    float query_factors[kRows];
    TokenPlace places[2][kTokens];
    float tops[kTokenWarps][kRows];  ///< Largest score of each row; in the epilogue its sum of weights.
    float shrink[kRows];  ///< Rescale factor of each row's sums of values; in the epilogue its max.
    Plan plan;
  };

  static __device__ void attend(const AttentionParams& p, const RowAlignment& alignment) {
    extern __shared__ __align__(128) std::byte memory[];
    auto& s = *reinterpret_cast<Shared*>(memory);
    const auto attend_part = [&](const Schedule<Plan>& schedule, const KvTileCursor& at,
                                 const QueryTile& query_tile, int count) {
      Tiles tiles{s,
                  {p, s.plan, at.query_tile, at.kv_tile},
                  {p.k, p.rope, 0, kLatentColumns * kElement, kRowBytes},
                  count,
                  alignment.kv};
      tiles.begin();
      Queries::load(p, query_tile, 0, alignment.q, s.queries, s.query_factors);
      const SplitPartials partials{p, schedule.splits_of(at.query_tile, at.head)};
      attend_tiles(p, s, tiles, query_tile, count, partials);
      return partials;
    };
    walk_work_item(p, s.plan, attend_part);
  }

 private:
  static __device__ __forceinline__ void attend_tiles(const AttentionParams& p, Shared& s, Tiles& tiles,
                                                      const QueryTile& query_tile, int count,
                                                      const SplitPartials& partials) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const bool scores_here = warp < kTokenWarps * kRowWarps;
    const int row = warp % kRowWarps * kMmaRows;  // first row of this warp's scores
    const int half = warp / kRowWarps % kTokenWarps;
    const float scale = p.k_scale != nullptr ? p.k_scale[0] : 1.0f;
    const MmaBounds bounds(p, query_tile, row);
    __syncthreads();
    const MmaFactors factors(p, scale, s.query_factors + row);
    MmaRunning running;
    Sums sums;
#pragma unroll
    for (auto& tile : sums) {
#pragma unroll
      for (auto& x : tile) x[0] = x[1] = x[2] = x[3] = 0.0f;
    }
#pragma unroll 1
    for (int tile = 0; tile < count; ++tile) {
      const unsigned rows = tiles.wait();
      const int token = tiles.look_up.first + tile * kTokens + half * 16;
      float scores[2][4];
      if (scores_here) find_scores(s, rows, row, half, token, factors, bounds, scores);
      __syncthreads();
      if (scores_here) weigh(s, row, half, factors, running, scores);
      __syncthreads();
      add_values(s, rows, warp, sums);
    }
    gather(s, partials, query_tile, scale, scores_here, row, half, running, sums);
  }

  /// Computes this warp's scores, of 16 rows and 16 tokens, and shares the largest of each row in shared
  /// memory.
  static __device__ __forceinline__ void find_scores(Shared& s, unsigned rows, int row, int half, int token,
                                                     const MmaFactors& factors, const MmaBounds& bounds,
                                                     float (&scores)[2][4]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (auto& x : scores) x[0] = x[1] = x[2] = x[3] = 0.0f;
    if (bounds.sees(token, 16)) {
      const unsigned keys = rows + static_cast<unsigned>(half * 16 * kRowStride);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const T* queries = s.queries + (part * kRows + row) * Queries::kStride;
        Products::template multiply_keys<kLatentKeyColumns, kRowStride>(
            static_cast<unsigned>(__cvta_generic_to_shared(queries)), keys, scores);
      }
    }
    cap_and_mask(factors, bounds, token, scores);
    float tops[2];
    top_scores(scores, tops);
    if (lane % 4 == 0) {
      s.tops[half][row + lane / 4] = tops[0];
      s.tops[half][row + lane / 4 + 8] = tops[1];
    }
  }

  /// Turns this warp's scores into weights, in shared memory for all warps.
  static __device__ __forceinline__ void weigh(Shared& s, int row, int half, const MmaFactors& factors,
                                               MmaRunning& running, float (&scores)[2][4]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    float tops[2];
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = row + lane / 4 + i * 8;
      tops[i] = fmaxf(s.tops[0][at], s.tops[1][at]);
    }
    weigh_scores<T>(factors, tops, scores, running, shrink);
    unsigned weights[1][4];
    unsigned rests[1][4];
    pack_weights<T>(scores, weights);
    if constexpr (kHasRest) pack_rests(scores, weights, rests);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = row + lane / 4 + i % 2 * 8;
      const int column = half * 16 + i / 2 * 8 + lane % 4 * 2;
      *reinterpret_cast<unsigned*>(&s.weights[0][at][column]) = weights[0][i];
      if constexpr (kHasRest) *reinterpret_cast<unsigned*>(&s.weights[1][at][column]) = rests[0][i];
      if (half == 0 && lane % 4 == 0 && i < 2) s.shrink[at] = shrink[i];
    }
  }

  /// Adds the tile's weighted values to this warp's columns of the sums.
  static __device__ __forceinline__ void add_values(const Shared& s, unsigned rows, int warp, Sums& sums) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int m = 0; m < kRowWarps; ++m) {
      const float shrink[2] = {s.shrink[m * kMmaRows + lane / 4], s.shrink[m * kMmaRows + lane / 4 + 8]};
      if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) shrink_sums(shrink, sums[m]);
    }
    const unsigned values = rows + static_cast<unsigned>(warp * kWarpColumns * kElement);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      unsigned weights[kRowWarps][kTokens / 16][4];
#pragma unroll
      for (int m = 0; m < kRowWarps; ++m) {
#pragma unroll
        for (int step = 0; step < kTokens / 16; ++step) {
          const T* from = &s.weights[part][m * kMmaRows + lane % 16][step * 16 + lane / 16 * 8];
          load_matrices(weights[m][step], static_cast<unsigned>(__cvta_generic_to_shared(from)));
        }
      }
      Products::template add_values<kRowStride>(weights, values, sums);
    }
  }

  /// Collects the warps' columns in shared memory and writes the KV split.
  static __device__ __forceinline__ void gather(Shared& s, const SplitPartials& to,
                                                const QueryTile& query_tile, float scale, bool scores_here,
                                                int row, int half, MmaRunning& running, const Sums& sums) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      running.sum[i] += __shfl_xor_sync(~0u, running.sum[i], 1);
      running.sum[i] += __shfl_xor_sync(~0u, running.sum[i], 2);
      if (scores_here && lane % 4 == 0) {
        s.tops[half][row + lane / 4 + i * 8] = running.sum[i];
        s.shrink[row + lane / 4 + i * 8] = running.max[i];
      }
    }
    __syncthreads();
    if (threadIdx.x < kRows) s.tops[0][threadIdx.x] += s.tops[1][threadIdx.x];
#pragma unroll
    for (int first = 0; first < kRows; first += kGatherRows) {
      if (first >= query_tile.num_rows) break;
#pragma unroll
      for (int m = 0; m < kRowWarps; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = m * kMmaRows + i * 8 + lane / 4 - first;
          if (at < 0 || at >= kGatherRows) continue;
          Products::store_row(s.sums[at] + warp * kWarpColumns, i, scale, sums[m]);
        }
      }
      __syncthreads();
      const BlockResult<1> result{&s.sums[0][0], 0, kSumStride, s.shrink + first, s.tops[0] + first, kRows};
      write_split(to, query_tile, 0, first, ::min(kGatherRows, query_tile.num_rows - first), result);
      __syncthreads();
    }
  }
};

}  // namespace helix::cuda
