// SPDX-License-Identifier: Apache-2.0
// The running softmax of the kernels of mma.cuh and mma_latent.cuh, for one warp's 16 query rows. A lane has
// rows lane / 4 and lane / 4 + 8, as in the accumulators of m16n8k16.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/params.cuh"
#include "cuda/attention/weights.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// The local tokens that a warp's query rows see.
struct MmaBounds {
  int low[2];  ///< This lane's rows: [low, high).
  int high[2];
  int inner_begin = 0;  ///< Tokens that both of this lane's rows see.
  int inner_end = INT32_MAX;
  int outer_begin;  ///< Tokens that any row of the warp sees.
  int outer_end;

  /// The bounds of rows [first_row, first_row + 16) of a query tile; all lanes.
  __device__ MmaBounds(const AttentionParams& p, const QueryTile& query_tile, int first_row) {
    int begin = INT32_MAX;
    int end = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8 + static_cast<int>(threadIdx.x) % kWarp / 4;
      TokenRange seen{0, 0};
      if (row < query_tile.num_rows) {
        seen = visible(p, p.positions[query_tile.token(p, row)]);
        inner_begin = ::max(inner_begin, static_cast<int>(seen.begin));
        inner_end = ::min(inner_end, static_cast<int>(seen.end));
        if (seen.size() > 0) {
          begin = ::min(begin, static_cast<int>(seen.begin));
          end = ::max(end, static_cast<int>(seen.end));
        }
      }
      low[half] = static_cast<int>(seen.begin);
      high[half] = static_cast<int>(seen.end);
    }
    outer_begin = __reduce_min_sync(~0u, begin);
    outer_end = __reduce_max_sync(~0u, end);
  }

  __device__ __forceinline__ bool sees(int token, int tokens) const {
    return token < outer_end && token + tokens > outer_begin;
  }
};

/// The factors from raw products to scores, and from scores to exponents, of a lane's rows.
struct MmaFactors {
  float scores[2];
  float exponents[2];
  float cap;  ///< Soft cap; 0: none. With a cap, `exponents` multiply capped scores, else raw products.

  __device__ MmaFactors(const AttentionParams& p, float key_scale, const float* query_factors)
      : cap(p.soft_cap) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scores[half] = score_factor(p.scale * key_scale *
                                  query_factors[half * 8 + static_cast<int>(threadIdx.x) % kWarp / 4]);
      exponents[half] = (cap > 0.0f ? 1.0f : scores[half]) * kLog2E;
    }
  }
};

/// The running softmax of a lane's two rows: max (base 2, less kHeadroom), and this lane's share of the sum
/// of weights.
struct MmaRunning {
  float max[2] = {-kInfinity, -kInfinity};
  float sum[2] = {0.0f, 0.0f};
};

/// Applies the soft cap, and sets the scores of tokens that a row does not see to -inf. `token` is the first
/// token.
template <int kNTiles>
__device__ __forceinline__ void cap_and_mask(const MmaFactors& factors, const MmaBounds& bounds, int token,
                                             float (&scores)[kNTiles][4]) {
  if (factors.cap > 0.0f) {
    const float inner[2] = {factors.scores[0] / factors.cap, factors.scores[1] / factors.cap};
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[n][j] = factors.cap * fast_tanh(scores[n][j] * inner[j / 2]);
    }
  }
  if (token >= bounds.inner_begin && token + kNTiles * 8 <= bounds.inner_end) return;
  const int kq = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = token + n * 8 + kq * 2 + j % 2;
      if (at < bounds.low[j / 2] || at >= bounds.high[j / 2]) scores[n][j] = -kInfinity;
    }
  }
}

/// The largest score of each of the lane's rows.
template <int kNTiles>
__device__ __forceinline__ void top_scores(const float (&scores)[kNTiles][4], float (&tops)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = -kInfinity;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    tops[half] = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  }
}

/// One step of the running softmax: turns scores into weights; `tops` is the largest score of each row. Sets
/// `shrink` to the rescale factor of each row's earlier sums. Returns false if it is 1 in all of the lane's
/// rows.
template <class T, int kNTiles>
__device__ __forceinline__ bool weigh_scores(const MmaFactors& factors, const float (&tops)[2],
                                             float (&scores)[kNTiles][4], MmaRunning& running,
                                             float (&shrink)[2]) {
  bool shrinks = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = factors.exponents[half];
    const float top = fmaxf(pivot_of<T>(tops[half], factor), running.max[half]);
    const float pivot = top == -kInfinity ? 0.0f : top;
    shrink[half] = fast_exp2(running.max[half] - pivot);
    shrinks |= running.max[half] != top;
    running.max[half] = top;
    float added = 0.0f;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int j = 2 * half; j < 2 * half + 2; ++j) {
        scores[n][j] = fast_exp2(fmaf(scores[n][j], factor, -pivot));
        added += scores[n][j];
      }
    }
    running.sum[half] = fmaf(running.sum[half], shrink[half], added);
  }
  return shrinks;
}

/// Packs weights as operands of the second product, 16 tokens each.
template <class T, int kNTiles>
__device__ __forceinline__ void pack_weights(const float (&weights)[kNTiles][4],
                                             unsigned (&operands)[kNTiles / 2][4]) {
#pragma unroll
  for (int s = 0; s < kNTiles / 2; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      operands[s][i] = pack<T>(weights[2 * s + i / 2][i % 2 * 2], weights[2 * s + i / 2][i % 2 * 2 + 1]);
  }
}

/// Packs the bits of the weights that the bf16 `operands` leave over, as operands too.
template <int kNTiles>
__device__ __forceinline__ void pack_rests(const float (&weights)[kNTiles][4],
                                           const unsigned (&operands)[kNTiles / 2][4],
                                           unsigned (&rests)[kNTiles / 2][4]) {
#pragma unroll
  for (int s = 0; s < kNTiles / 2; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = weights[2 * s + i / 2] + i % 2 * 2;
      rests[s][i] = pack<bf16>(x[0] - __uint_as_float(operands[s][i] << 16),
                               x[1] - __uint_as_float(operands[s][i] & 0xffff0000u));
    }
  }
}

template <int kTiles>
__device__ __forceinline__ void shrink_sums(const float (&shrink)[2], float (&sums)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[i][j] *= shrink[j / 2];
  }
}

}  // namespace helix::cuda
