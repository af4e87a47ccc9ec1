// SPDX-License-Identifier: Apache-2.0
// The running softmax of the kernel over latents of e4m3: turns the scores of a KV tile into exponents
// relative to the rows' pivots and into weights, and rescales earlier sums where a pivot is raised.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/latent_e4m3_block.cuh"
#include "cuda/attention/latent_e4m3_fragments.cuh"
#include "cuda/attention/latent_e4m3_scales.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"

namespace helix::cuda::latent_e4m3 {

// Weights are f16, whatever the type of q.
inline constexpr float kTopExponent = latent::kTopExponent<f16>;
inline constexpr float kMaxExponent = latent::kMaxExponent<f16>;

/// Blocks of 64 value columns of a group: a product each.
inline constexpr int kValueBlocks = kGroupColumns / kGroupRows;
inline constexpr int kPairColumns = 32;  ///< Columns that one ldmatrix brings.

/// A thread's scores: element 4 * j + 2 * h + i is of token 16 * warp + lane / 4 + 8 * h and query row 8 * j
/// + lane % 4 * 2 + i.
template <class K>
using Scores = float[K::kRows / 2];
/// A thread's sums of values: elements as in Scores, but h is the value column of a pair of columns.
template <class K>
using Sums = float[kValueBlocks][K::kRows / 2];
/// A thread's sums of weights: element 2 * j + i is of query row 8 * j + lane % 4 * 2 + i.
template <class K>
using Totals = float[K::kRows / 4];

/// The softmax of a thread of consumer group `group`, for the group's current KV tile.
template <class K>
struct Softmax {
  const AttentionParams& p;
  Shared<K>& s;
  int group;

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }
  // first of this thread's two, of each eight query rows
  static __device__ int first_row() { return lane() % 4 * 2; }

  /// Turns scores into exponents relative to the pivots. Returns the largest. `is_whole`: all rows see all
  /// tokens of the tile.
  __device__ __forceinline__ float find_exponents(int token, bool is_whole, const TokenScales& scales,
                                                  Scores<K>& scores) const {
    const bool is_capped = p.soft_cap > 0.0f;
    if (is_capped) cap(scores);
    // Several running maxima, because each update of one waits for the last: 470 us against 475 (128 heads, 8
    // sequences of 131072 tokens, H200). Mixed rows have one: with several they took 652, against 626.
    constexpr int kMaxima = K::kIsMixed ? 1 : 4;
    float most[kMaxima];
#pragma unroll
    for (float& x : most) x = -kInfinity;
#pragma unroll
    for (int j = 0; j < K::kRows / 8; ++j) {
      const float4 two = *reinterpret_cast<const float4*>(&s.row[8 * j + first_row()]);
      const float factor[2] = {two.x, two.z};
      const float pivot[2] = {two.y, two.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& x = scores[4 * j + k];
        x = fmaf(x, factor[k % 2], K::kIsMixed ? scales.log2(k / 2) - pivot[k % 2] : -pivot[k % 2]);
        most[k % kMaxima] = fmaxf(most[k % kMaxima], x);
      }
    }
    if (!is_whole) return mask(token, scores);
#pragma unroll
    for (int k = 1; k < kMaxima; ++k) most[0] = fmaxf(most[0], most[k]);
    return most[0];
  }
  __device__ __forceinline__ void cap(Scores<K>& scores) const {
    const float top = p.soft_cap * kLog2E;
#pragma unroll
    for (int j = 0; j < K::kRows / 8; ++j) {
      const float2 two = *reinterpret_cast<const float2*>(&s.cap_factor[8 * j + first_row()]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& x = scores[4 * j + k];
        x = top * fast_tanh(x * (k % 2 == 0 ? two.x : two.y));
      }
    }
  }
  /// Sets the exponents of tokens that a row does not see to -inf. Returns the largest of the rest.
  __device__ __forceinline__ float mask(int token, Scores<K>& exponents) const {
    const int first = token + warp() * 16 + lane() / 4;
    float most = -kInfinity;
#pragma unroll
    for (int j = 0; j < K::kRows / 8; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int r = 8 * j + first_row() + k % 2;
        const int t = first + k / 2 * 8;
        float& x = exponents[4 * j + k];
        x = s.low[r] <= t && t < s.high[r] ? x : -kInfinity;
        most = fmaxf(most, x);
      }
    }
    return most;
  }

  /// Raises the pivots of rows whose exponents exceed kMaxExponent, and sets the pivots of rows that see
  /// their first tokens. Adapts the exponents. Returns whether any row still has no pivot.
  __device__ __forceinline__ bool raise(Scores<K>& exponents) const {
#pragma unroll
    for (int j = 0; j < K::kRows / 8; ++j) {
      float top[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[i] = fmaxf(exponents[4 * j + i], exponents[4 * j + 2 + i]);
#pragma unroll
        for (int offset = 4; offset < kWarp; offset *= 2)
          top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], offset));
      }
      if (lane() < 4)
        *reinterpret_cast<float2*>(&s.top[group][warp()][8 * j + first_row()]) = {top[0], top[1]};
    }
    group_sync(kOneGroup + group, kWarpGroup);
    const int r = static_cast<int>(threadIdx.x) % kWarpGroup;
    bool is_left = false;
    if (r < K::kRows) {
      float top = -kInfinity;
      for (int w = 0; w < 4; ++w) top = fmaxf(top, s.top[group][w][r]);
      const bool raises = s.is_unset[r] ? top > -kInfinity : top > kMaxExponent;
      const float by = raises ? top - kTopExponent : 0.0f;
      s.raise[group][r] = by;
      s.row[r].pivot += by;
      is_left = s.is_unset[r] && !raises;
      s.is_unset[r] = is_left;
    }
    is_left = group_or(kOneGroup + group, is_left);
    if (r == 0) s.are_unset = is_left;
#pragma unroll
    for (int j = 0; j < K::kRows / 8; ++j) {
      const float2 by = *reinterpret_cast<const float2*>(&s.raise[group][8 * j + first_row()]);
#pragma unroll
      for (int k = 0; k < 4; ++k) exponents[4 * j + k] -= k % 2 == 0 ? by.x : by.y;
    }
    return is_left;
  }

  /// Rescale factors of query rows `row` and row + 1, after group `of`'s tile raised their pivots. A row's
  /// first pivot may be below 0, where the factor could be infinite: nothing is summed yet, so it is 1.
  __device__ __forceinline__ float2 shrink(int of, int row) const {
    const float2 by = *reinterpret_cast<const float2*>(&s.raise[of][row]);
    return {fast_exp2(fminf(-by.x, 0.0f)), fast_exp2(fminf(-by.y, 0.0f))};
  }
  __device__ __forceinline__ void shrink_sums(int of, Sums<K>& sums) const {
#pragma unroll
    for (int j = 0; j < K::kRows / 8; ++j) {
      const float2 by = shrink(of, 8 * j + first_row());
#pragma unroll
      for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sums[block][4 * j + k] *= k % 2 == 0 ? by.x : by.y;
      }
    }
  }
  __device__ __forceinline__ void shrink_totals(int of, Totals<K>& totals) const {
#pragma unroll
    for (int j = 0; j < K::kRows / 8; ++j) {
      const float2 by = shrink(of, 8 * j + first_row());
      totals[2 * j] *= by.x;
      totals[2 * j + 1] *= by.y;
    }
  }

  /// Turns exponents into weights, which both groups find in shared memory, and adds them to `totals`.
  __device__ __forceinline__ void weigh(const TokenScales& scales, Scores<K>& exponents,
                                        Totals<K>& totals) const {
    const unsigned row = static_cast<unsigned>(warp() * 16 + lane() % 16);
    const unsigned to = at(s.weights[group]) + row * 128u;
#pragma unroll
    for (int j = 0; j < K::kRows / 8; j += 2) {
      unsigned x[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // query rows 8 * (j + k / 2), token h = k % 2
        const int first = 4 * (j + k / 2) + 2 * (k % 2);
        const float a = fast_exp2(exponents[first]);
        const float b = fast_exp2(exponents[first + 1]);
        const float share = K::kIsMixed ? scales.inverse(k % 2) : 1.0f;
        float(&two)[2] = reinterpret_cast<float(&)[2]>(totals[2 * (j + k / 2)]);
        two[0] = fmaf(a, share, two[0]);
        two[1] = fmaf(b, share, two[1]);
        x[k] = pack<f16>(a, b);
      }
      const auto part = static_cast<unsigned>(j) + static_cast<unsigned>(lane()) / 16u;
      store_matrices(to + ((part ^ row % 8u) * 16u), x[0], x[1], x[2], x[3]);
    }
    if constexpr (K::kIsMixed) {
      const int columns = lane() % 4;
      const __half2 ratio = columns < 2 ? (columns == 0 ? scales.ratio[0] : scales.ratio[1])
                                        : (columns == 2 ? scales.ratio[2] : scales.ratio[3]);
      const auto token = static_cast<unsigned>(warp() * 16 + lane() / 4);
      s.ratios[group][columns][ratio_place(token)] = __half_as_ushort(__low2half(ratio));
      s.ratios[group][columns][ratio_place(token + 8u)] = __half_as_ushort(__high2half(ratio));
    }
    fence_before_copy();
  }
};

}  // namespace helix::cuda::latent_e4m3
