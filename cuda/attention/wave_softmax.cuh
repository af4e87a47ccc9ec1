// SPDX-License-Identifier: Apache-2.0
// The running softmax of the kernel for many query rows (waves.cuh), in the registers of the multiplying warp
// groups.
#pragma once

#include <climits>
#include <type_traits>

#include "cuda/attention/row_operands.cuh"
#include "cuda/attention/wave_block.cuh"
#include "cuda/attention/wave_e4m3.cuh"
#include "cuda/attention/wave_result.cuh"
#include "cuda/attention/weights.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"

namespace helix::cuda {

/// The running softmax of a thread's two rows of a part, over KV of type KV.
template <class KV, class S>
struct WaveSoftmax {
  using T = MultipliedAs<KV>;  // type of the weights
  static constexpr bool kIsFp8 = sizeof(KV) == 1;
  using Scores = float[S::kTokens / 2];
  using Weights = unsigned[S::kTokens / kProductDepth][4];

  const AttentionParams& p;
  int thread;           // number among the multiplying threads
  int inner_begin = 0;  // local tokens that all of the warp's rows see
  int inner_end = 0;
  WaveScales<kIsFp8> scales{};

  __device__ __forceinline__ int row() const {  // first row of this lane, in the query tile
    return thread / kWarp * 16 + thread % kWarp / 4;
  }

  /// The factor in the exponent of a score of row `h`.
  __device__ __forceinline__ float factor(int h) const {
    return p.soft_cap > 0.0f ? kLog2E : scales.of_scores(p, h) * kLog2E;
  }
  __device__ __forceinline__ bool is_inner(int token) const {
    return token >= inner_begin && token + S::kTokens <= inner_end;
  }

  __device__ __forceinline__ void begin_part(const RowBounds<S::kRows>& bounds) {
    int first = 0;
    int last = INT_MAX;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      first = ::max(first, bounds.begin[row() + 8 * h]);
      last = ::min(last, bounds.end[row() + 8 * h]);
    }
    inner_begin = __reduce_max_sync(~0u, first);
    inner_end = __reduce_min_sync(~0u, last);
  }

  __device__ __forceinline__ void cap_and_mask(const RowBounds<S::kRows>& bounds, Scores& scores,
                                               int token) const {
    if (p.soft_cap > 0.0f) {
      const float into[2] = {scales.of_scores(p, 0) / p.soft_cap, scales.of_scores(p, 1) / p.soft_cap};
#pragma unroll
      for (int i = 0; i < S::kTokens / 2; ++i)
        scores[i] = p.soft_cap * fast_tanh(scores[i] * into[i / 2 % 2]);
    }
    if (is_inner(token)) return;
    const int lane_token = token + thread % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int begin = bounds.begin[row() + 8 * h] - lane_token;
      const int end = bounds.end[row() + 8 * h] - lane_token;
#pragma unroll
      for (int j = 0; j < S::kTokens / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 8 * j + i;
          if (at < begin || at >= end) scores[4 * j + 2 * h + i] = -kInfinity;
        }
      }
    }
  }

  /// One step of the running softmax: turns scores into weights, still in f32. Sets `shrink` to the rescale
  /// factors of the earlier sums.
  __device__ __forceinline__ void weigh(Scores& scores, RowSums<S::kValueDim>& found,
                                        float (&shrink)[2]) const {
    const float factors[2] = {factor(0), factor(1)};
    // Several maxima and sums of each row, because each update of one waits for the last.
    constexpr int kChains = 4;
    float top[2][kChains];
    float added[2][kChains];
#pragma unroll
    for (int j = 0; j < S::kTokens / 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* x = &scores[4 * j + 2 * h];
        float& to = top[h][j % kChains];
        to = j < kChains ? fmaxf(x[0], x[1]) : fmaxf(to, fmaxf(x[0], x[1]));
      }
    }
    float pivot[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float highest = fmaxf(fmaxf(top[h][0], top[h][1]), fmaxf(top[h][2], top[h][3]));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      highest = fmaxf(pivot_of<T>(highest, factors[h]), found.max[h]);
      pivot[h] = highest == -kInfinity ? 0.0f : highest;
      shrink[h] = fast_exp2(found.max[h] - pivot[h]);
      found.max[h] = highest;
    }
#pragma unroll
    for (int j = 0; j < S::kTokens / 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* x = &scores[4 * j + 2 * h];
        x[0] = fast_exp2(fmaf(x[0], factors[h], -pivot[h]));
        x[1] = fast_exp2(fmaf(x[1], factors[h], -pivot[h]));
        float& to = added[h][j % kChains];
        to = j < kChains ? x[0] + x[1] : to + (x[0] + x[1]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      found.sum[h] = fmaf(found.sum[h], shrink[h], (added[h][0] + added[h][1]) + (added[h][2] + added[h][3]));
    }
  }

  static __device__ __forceinline__ void pack_weights(const Scores& scores, Weights& weights) {
#pragma unroll
    for (int k = 0; k < S::kTokens / kProductDepth; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][i] = pack<T>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
    }
  }

  static __device__ __forceinline__ void shrink_sums(RowSums<S::kValueDim>& found, const float (&shrink)[2]) {
    // Testing whether any factor is below 1 takes as long as 64 multiplications among other instructions.
    if (S::kValueDim > 128 && !__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < S::kValueDim / 2; ++i) found.d[i] *= shrink[i / 2 % 2];
  }
};

}  // namespace helix::cuda
