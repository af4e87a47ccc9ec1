// SPDX-License-Identifier: Apache-2.0
// The range of attention's weights: a weight is 2^(score - pivot of its row).
#pragma once

#include <type_traits>

#include <helix/dtype.hpp>

#include "cuda/runtime/math.cuh"

namespace helix::cuda {

/// Base-2 logarithm of the largest weight of type T. f16 weights go up to 2^8, because those below 2^-24
/// vanish: a million weights below the smallest f16 would be lost.
template <class T>
inline constexpr float kHeadroom = std::is_same_v<T, f16> ? 8.0f : 0.0f;

/// The factor from products to scores, kept above 0: 0 times the score -inf of a masked token would be NaN.
__device__ __forceinline__ float score_factor(float factor) {
  return factor < 0x1p-120f ? 0x1p-120f : factor;
}

/// The pivot of a row whose largest score is `top`; `factor` times a score is its exponent. For f16 it is
/// rounded up: otherwise the error of a large score may lift a weight above 2^kHeadroom, up to infinity.
template <class T>
__device__ __forceinline__ float pivot_of(float top, float factor) {
  return std::is_same_v<T, f16> ? __fmaf_ru(top, factor, -kHeadroom<T>) : top * factor;
}

}  // namespace helix::cuda
