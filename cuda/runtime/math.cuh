// SPDX-License-Identifier: Apache-2.0
// Fast f32 functions, and those that CUDA has no name for.
#pragma once

namespace helix::cuda {

inline constexpr float kInfinity = __builtin_huge_valf();

/// An integer in the order of `x`, which is not NaN: flips the sign bit, and all bits of negative numbers; -0
/// counts as 0.
__device__ __forceinline__ unsigned ordered_bits(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 1u << 31;
}

/// 2^x in the special function unit: error 2 ulp; results below 2^-126 are zero.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// total += weight * x, for four elements.
__device__ __forceinline__ void add_weighted(float4& total, float weight, const float4& x) {
  total.x = fmaf(x.x, weight, total.x);
  total.y = fmaf(x.y, weight, total.y);
  total.z = fmaf(x.z, weight, total.z);
  total.w = fmaf(x.w, weight, total.w);
}

/// silu(gate) * up.
__device__ __forceinline__ float swiglu(float gate, float up) {
  return gate / (1.0f + expf(-gate)) * up;
}

/// tanh with an absolute error of 2^-22, below 1/8 a relative one, as soft caps of any size multiply it.
/// tanhf takes more than twice the instructions.
__device__ __forceinline__ float fast_tanh(float x) {
  const float square = x * x;
  const float small = fmaf(x * square, fmaf(square, 2.0f / 15.0f, -1.0f / 3.0f), x);
  const float large = 1.0f - __fdividef(2.0f, fast_exp2(x * 2.885390081777927f) + 1.0f);  // 2 log2(e)
  return fabsf(x) < 0.125f ? small : large;
}

}  // namespace helix::cuda
