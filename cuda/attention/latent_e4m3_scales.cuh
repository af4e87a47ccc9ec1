// SPDX-License-Identifier: Apache-2.0
// The scales of mixed rows, one for each 128 latent columns, and how the kernel over latents of e4m3 applies
// them to scores and weights.
#pragma once

#include "cuda/attention/latent_e4m3_block.cuh"
#include "cuda/attention/latent_e4m3_fragments.cuh"

namespace helix::cuda::latent_e4m3 {

/// The scales of this thread's two tokens. A token has one scale that is a power of two, and the ratio of
/// each of its columns' scales to it. Multiplying by the power of two is exact; the ratios are rounded to 11
/// bits. Scales below kMinScale, which vLLM gives columns of zeros, count as kMinScale: the inverse of a
/// smaller one would overflow what it multiplies.
struct TokenScales {
  static constexpr float kMinScale = 0x1p-60f;
  static constexpr int kMinExponent = 127 - 60;

  int exponent[2];   // biased
  __half2 ratio[4];  // for 128 columns each; both tokens in one word

  __device__ float inverse(int h) const {
    return __uint_as_float(static_cast<unsigned>(254 - exponent[h]) << 23);
  }
  __device__ float log2(int h) const { return static_cast<float>(exponent[h] - 127); }
  __device__ void load(int h, float4 scales) {
    const float most = fmaxf(fmaxf(scales.x, scales.y), fmaxf(scales.z, scales.w));
    const int up = static_cast<int>((__float_as_uint(most) + 0x7fffffu) >> 23);
    exponent[h] = most > 0.0f ? ::max(kMinExponent, ::min(253, up)) : 127;
    const float x[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const __half r = __float2half_rn(x[k] * inverse(h));
      ratio[k] = h == 0 ? __halves2half2(r, r) : __halves2half2(__low2half(ratio[k]), r);
    }
  }
};

/// The scales of a KV tile in shared memory, for this thread's two tokens h.
///
/// They multiply scores in f32: rounding an f16 factor of the keys would err in the same direction in 128
/// columns. If registers suffice, each scale's columns have score sums of their own. Otherwise one sum, which
/// begins with the rope columns, is rescaled from scale to scale, which waits for its products each time.
template <class K>
struct TileScales {
  static constexpr int kScales = K::kScaleBytes / 4;  // scales of a row
  static constexpr bool kHasSumsApart = K::kIsMixed && K::kRows < 64;
  using Scores = float[K::kRows / 2];
  using Parts = Scores[kHasSumsApart ? kScales : 1];

  unsigned tile;

  __device__ __forceinline__ unsigned at(int h) const {
    const int token = static_cast<int>(threadIdx.x) % kWarpGroup / kWarp * 16 +
                      static_cast<int>(threadIdx.x) % kWarp / 4 + 8 * h;
    return tile + K::kScalesAt + static_cast<unsigned>(token) * K::kScaleBytes;
  }
  __device__ __forceinline__ float of(int h, int k) const {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at(h) + static_cast<unsigned>(k) * 4u) : "memory");
    return fmaxf(x, TokenScales::kMinScale);
  }
  /// 1 / scale to an ulp, as one instruction.
  static __device__ __forceinline__ float fast_inverse(float scale) {
    float x;
    asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(scale));
    return x;
  }
  __device__ __forceinline__ TokenScales load() const {
    TokenScales scales;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float4 x;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                   : "r"(at(h))
                   : "memory");
      scales.load(h, x);
    }
    return scales;
  }

  /// Finds the factors of rescale() before the columns of scale `k`. There is no scale before the first one,
  /// nor after the last one (k = kScales).
  __device__ __forceinline__ void find_factors(int k, float (&factors)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float before = k > 0 ? of(h, k - 1) : 1.0f;
      factors[h] = k < kScales ? before * fast_inverse(of(h, k)) : before;
    }
  }
  /// Waits for the products of scores and multiplies them.
  __device__ __forceinline__ void rescale(const float (&factors)[2], Scores& scores) const {
    latent::finish(scores);
#pragma unroll
    for (int i = 0; i < K::kRows / 2; ++i) scores[i] *= factors[i / 2 % 2];
  }
  /// Waits for scores and for the sums over all scales' columns, and adds these.
  __device__ __forceinline__ void add(Parts& parts, Scores& scores) const {
    latent::finish(scores);
#pragma unroll
    for (int k = 0; k < kScales; ++k) {
      latent::finish(parts[k]);
      const float factors[2] = {of(0, k), of(1, k)};
#pragma unroll
      for (int i = 0; i < K::kRows / 2; ++i) scores[i] = fmaf(parts[k][i], factors[i / 2 % 2], scores[i]);
    }
  }
};

}  // namespace helix::cuda::latent_e4m3
