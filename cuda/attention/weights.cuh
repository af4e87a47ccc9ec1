// SPDX-License-Identifier: Apache-2.0
// The range of attention's weights: powers of two of scores, less a pivot of their row.
#pragma once

#include <type_traits>

#include <helix/dtype.hpp>

#include "cuda/runtime/math.cuh"

namespace helix::cuda {

/// Base-2 logarithm of the largest weight of type T. Those of f16 go up to 2^8, for what is below 2^-24
/// vanishes: a million weights below the least f16 would be missed.
template <class T>
inline constexpr float kHeadroom = std::is_same_v<T, f16> ? 8.0f : 0.0f;

/// What makes scores of products, kept above 0: that would make not a number of the scores -inf of what is
/// masked.
__device__ __forceinline__ float score_factor(float factor) {
  return factor < 0x1p-120f ? 0x1p-120f : factor;
}

/// The pivot of a row whose largest score is `top`, `factor` of which is an exponent. Of f16 it is rounded
/// up: a weight may not exceed 2^kHeadroom by the error of a large score, or it is infinite.
template <class T>
__device__ __forceinline__ float pivot_of(float top, float factor) {
  return std::is_same_v<T, f16> ? __fmaf_ru(top, factor, -kHeadroom<T>) : top * factor;
}

}  // namespace helix::cuda
