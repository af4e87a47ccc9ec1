// SPDX-License-Identifier: Apache-2.0
// The running softmax of the kernel over latents for few query rows.
#pragma once

#include "cuda/attention/narrow_latent_products.cuh"
#include "cuda/attention/plan.cuh"
#include "cuda/attention/weights.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda::narrow_latent {

/// The softmax of one warp's query rows of a tile; each lane has one token.
template <class T>
class Softmax {
 public:
  static constexpr int kRows = kMmaRows / kWarps;
  static_assert(kTokens == kWarp);

  __device__ Softmax(const AttentionParams& p, const QueryTileSpan& span)
      : cap_(p.soft_cap), factor_(score_factor(p.scale)), exponent_((cap_ > 0.0f ? 1.0f : factor_) * kLog2E) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const TokenRange seen = seen_by_row<true>(p, span, row(i));
      low_[i] = static_cast<int>(seen.begin);
      high_[i] = static_cast<int>(seen.end);
    }
  }

  static __device__ int row(int i) {
    return static_cast<int>(threadIdx.x) / kWarp * kRows + i;
  }

  /// Returns the weight of this lane's token `token`, whose raw score in the i-th row is `score`. Sets
  /// `shrink` to the rescale factor of the row's earlier sums.
  __device__ __forceinline__ float weigh(int i, int token, float score, float& shrink) {
    if (cap_ > 0.0f) score = cap_ * fast_tanh(score * (factor_ / cap_));
    if (token < low_[i] || token >= high_[i]) score = -kInfinity;
    const float max = fmaxf(pivot_of<T>(largest(score), exponent_), max_[i]);
    const float pivot = max == -kInfinity ? 0.0f : max;
    shrink = fast_exp2(max_[i] - pivot);
    max_[i] = max;
    const float weight = fast_exp2(fmaf(score, exponent_, -pivot));
    sum_[i] = fmaf(sum_[i], shrink, weight);
    return weight;
  }

  __device__ float max(int i) const {
    return max_[i];
  }
  __device__ float sum(int i) const {
    return warp_sum(sum_[i]);
  }

 private:
  /// The largest `x` over the lanes. Floats compare like their bits as integers, except that negative ones
  /// compare in reverse.
  static __device__ __forceinline__ float largest(float x) {
    const auto turned = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(turned(__reduce_max_sync(~0u, turned(__float_as_int(x)))));
  }

  float cap_;
  float factor_;    // factor from products to scores
  float exponent_;  // factor of capped scores in the exponent; without a cap, of products
  int low_[kRows];  // tokens that the row sees: [low, high)
  int high_[kRows];
  float max_[kRows] = {-kInfinity, -kInfinity};  // base 2, less kHeadroom
  float sum_[kRows] = {};                        // this lane's share
};

}  // namespace helix::cuda::narrow_latent
