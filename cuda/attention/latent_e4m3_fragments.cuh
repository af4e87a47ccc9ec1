// SPDX-License-Identifier: Apache-2.0
// Pieces of rows of the cache in registers, and what they are multiplied by, in attention over latents of
// e4m3.
#pragma once

#include "cuda/attention/latent_e4m3_block.cuh"
#include "cuda/runtime/convert.cuh"

namespace helix::cuda::latent_e4m3 {

/// Rows of a product in registers.
using Fragment = unsigned[4];

/// Whether `x` holds in any thread of the group; a barrier of it.
__device__ __forceinline__ bool group_or(int barrier, bool x) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred in, out;\n"
      "setp.ne.b32 in, %1, 0;\n"
      "barrier.cta.red.or.pred out, %2, %3, in;\n"
      "selp.b32 %0, 1, 0, out;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<int>(x)), "r"(barrier), "n"(kWarpGroup)
      : "memory");
  return any != 0;
}

__device__ __forceinline__ unsigned multiply_pair(unsigned x, __half2 y) {
  const __half2 z = __hmul2(reinterpret_cast<const __half2&>(x), y);
  return reinterpret_cast<const unsigned&>(z);
}
__device__ __forceinline__ unsigned multiply_pair(unsigned x, __nv_bfloat162 y) {
  const __nv_bfloat162 z = __hmul2(reinterpret_cast<const __nv_bfloat162&>(x), y);
  return reinterpret_cast<const unsigned&>(z);
}

/// The scales of this thread's two tokens: a power of two, the token's scale, and what the scales of the
/// columns are of it. The first is exact wherever it goes, the others are rounded to 11 bits. Scales below
/// kLeastScale, as vLLM gives columns of zeros, count as that: the inverse of a smaller one would overflow
/// what it multiplies.
struct TokenScales {
  static constexpr float kLeastScale = 0x1p-60f;
  static constexpr int kLeastExponent = 127 - 60;

  int exponent[2];   // biased
  __half2 ratio[4];  // of 128 columns each, of both tokens

  __device__ float scale(int h) const { return __uint_as_float(static_cast<unsigned>(exponent[h]) << 23); }
  __device__ float inverse(int h) const {
    return __uint_as_float(static_cast<unsigned>(254 - exponent[h]) << 23);
  }
  __device__ float log2(int h) const { return static_cast<float>(exponent[h] - 127); }
  __device__ void load(int h, float4 scales) {
    const float most = fmaxf(fmaxf(scales.x, scales.y), fmaxf(scales.z, scales.w));
    const int up = static_cast<int>((__float_as_uint(most) + 0x7fffffu) >> 23);
    exponent[h] = most > 0.0f ? ::max(kLeastExponent, ::min(253, up)) : 127;
    const float x[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const __half r = __float2half_rn(x[k] * inverse(h));
      ratio[k] = h == 0 ? __halves2half2(r, r) : __halves2half2(__low2half(ratio[k]), r);
    }
  }
};

}  // namespace helix::cuda::latent_e4m3
