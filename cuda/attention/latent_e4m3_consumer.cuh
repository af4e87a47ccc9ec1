// SPDX-License-Identifier: Apache-2.0
// The consumers of a block that attends to latents of e4m3: scores, weights and sums of values, all with the
// rows of the cache as the products' rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/latent_e4m3_block.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"

namespace helix::cuda::latent_e4m3 {

/// Weights are powers of two of a score over the row's pivot, in f16: the pivot is raised where one exceeds
/// 2^kMostExponent, so that the largest becomes 2^kTopExponent. What is 2^-31 of the largest still counts.
inline constexpr float kTopExponent = 7.0f;
inline constexpr float kMostExponent = 15.0f;

inline constexpr int kValueBlocks = kGroupColumns / kGroupRows;  ///< Products of a group's value columns.
inline constexpr int kPairColumns = 32;                          ///< That one matrix load brings.

/// Of this thread: token 16 * warp + lane / 4 + 8 * h, query row 8 * j + lane % 4 * 2 + i is element 4 * j +
/// 2 * h + i.
template <class K>
using Scores = float[K::kRows / 2];
/// Sums of values, likewise: value column h of a pair of columns instead of a token.
template <class K>
using Sums = float[kValueBlocks][K::kRows / 2];
/// Rows of a product in registers.
using Fragment = unsigned[4];

/// Adds up what `x` is in the threads of the group; a barrier of it.
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

/// The transposes of four 8 x 8 matrices of 16-bit elements.
__device__ __forceinline__ void load_transposed(unsigned (&x)[4], unsigned from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
#endif
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
/// columns are of it. The first is exact wherever it goes, the others are rounded to 11 bits.
struct TokenScales {
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
    exponent[h] = most > 0.0f ? ::max(1, ::min(253, up)) : 127;
    const float x[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const __half r = __float2half_rn(x[k] * inverse(h));
      ratio[k] = h == 0 ? __halves2half2(r, r) : __halves2half2(__low2half(ratio[k]), r);
    }
  }
};

/// What both groups do alike: group kGroup has the scores of KV tiles kGroup, kGroup + 2, ..., and half of
/// the value columns of all.
template <class K>
struct Consumer {
  const AttentionParams& p;
  Shared<K>& s;
  const int group;

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }
  static __device__ int first_row() { return lane() % 4 * 2; }  // of each eight query rows

  __device__ unsigned tile(const StagePlace<K>& place) const {
    return at(s.tiles[0]) + place.stage * K::kTileBytes;
  }

  /// Scores of a KV tile that has come, over the token's scale where there is one.
  __device__ __forceinline__ void multiply_keys(const StagePlace<K>& place, Scores<K>& scores,
                                                TokenScales& scales) const {
    barrier_wait(at(&s.full[place.stage]), place.parity);
    const unsigned rows = tile(place) + static_cast<unsigned>(warp() * 16) * K::kRowBytes;
    if constexpr (K::kIsMixed) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned from = rows + static_cast<unsigned>(lane() / 4 + 8 * h) * K::kRowBytes + K::kScalesAt;
        float4 x;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                     : "r"(from)
                     : "memory");
        scales.load(h, x);
      }
    }
    const unsigned from =
        rows + static_cast<unsigned>(lane() % 16) * K::kRowBytes + static_cast<unsigned>(lane() / 16) * 16u;
    const latent::OperandPlace queries(rows_operand(at(s.queries)));
    constexpr int kPairs = (kLatentColumns + (K::kIsMixed ? 0 : kRopeColumns)) / kPairColumns;
    Fragment raw[2];
    Fragment keys[2][2];
    load_matrices(raw[0], from);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (pair + 1 < kPairs)
        load_matrices(raw[(pair + 1) % 2], from + static_cast<unsigned>(pair + 1) * kPairColumns);
      const Fragment& x = raw[pair % 2];
      Fragment(&k)[2] = keys[pair % 2];
      widen(x[0], k[0][0], k[0][2]);
      widen(x[1], k[0][1], k[0][3]);
      widen(x[2], k[1][0], k[1][2]);
      widen(x[3], k[1][1], k[1][3]);
      if constexpr (K::kIsMixed) {
        const __half2 ratio = scales.ratio[pair / 4];
#pragma unroll
        for (int i = 0; i < 8; ++i)
          k[i / 4][i % 4] =
              multiply_pair(k[i / 4][i % 4], i % 2 == 0 ? __low2half2(ratio) : __high2half2(ratio));
      }
      products_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i)
        product<f16, K::kRows, false>(scores, k[i],
                                      queries.at(static_cast<unsigned>(pair / 2) * K::kQueryChunkBytes +
                                                 static_cast<unsigned>(pair % 2 * 2 + i) * 32u),
                                      pair + i > 0);
      products_commit();
      products_wait<1>();
    }
    if constexpr (K::kIsMixed) multiply_rope(from + K::kRopeAt, queries, scales, scores);
    latent::finish(scores);
    if constexpr (K::kIsMixed) {
#pragma unroll
      for (int i = 0; i < K::kRows / 2; ++i) scores[i] *= scales.scale(i / 2 % 2);
    }
  }

  /// Adds the rope columns of bf16.
  __device__ __forceinline__ void multiply_rope(unsigned from, const latent::OperandPlace& queries,
                                                const TokenScales& scales, Scores<K>& scores) const {
    const __nv_bfloat162 inverse[2] = {__float2bfloat162_rn(scales.inverse(0)),
                                       __float2bfloat162_rn(scales.inverse(1))};
    Fragment keys[2];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Fragment& k = keys[step % 2];
      load_matrices(k, from + static_cast<unsigned>(step) * 32u);
#pragma unroll
      for (int i = 0; i < 4; ++i) k[i] = multiply_pair(k[i], inverse[i % 2]);
      products_fence();
      product<bf16, K::kRows, false>(
          scores, k,
          queries.at(latent::kValueChunks * K::kQueryChunkBytes + static_cast<unsigned>(step) * 32u), 1);
      products_commit();
      products_wait<1>();
    }
  }

  /// Scores to exponents over the pivots; `is_whole`: all rows see all tokens of the tile. Returns the
  /// largest.
  __device__ __forceinline__ float find_exponents(int token, bool is_whole, const TokenScales& scales,
                                                  Scores<K>& scores) const {
    const bool is_capped = p.soft_cap > 0.0f;
    float most = -kInfinity;
#pragma unroll
    for (int j = 0; j < K::kRows / 8; ++j) {
      const int r = 8 * j + first_row();
      const float4 two = *reinterpret_cast<const float4*>(&s.row[r]);
      const float factor[2] = {two.x, two.z};
      const float pivot[2] = {two.y, two.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& x = scores[4 * j + k];
        const float more = K::kIsMixed ? scales.log2(k / 2) - pivot[k % 2] : -pivot[k % 2];
        if (is_capped) {
          x = fmaf(p.soft_cap * kLog2E, fast_tanh(x * factor[k % 2]), more);
        } else {
          x = fmaf(x, factor[k % 2], more);
        }
        if (!is_whole) {
          const int t = token + warp() * 16 + lane() / 4 + k / 2 * 8;
          if (t < s.low[r + k % 2] || t >= s.high[r + k % 2]) x = -kInfinity;
        }
        most = fmaxf(most, x);
      }
    }
    return most;
  }

  /// Raises the pivots of the rows that exceed kMostExponent, and sets those of the rows that see their first
  /// tokens.
  __device__ __forceinline__ void raise(Scores<K>& exponents) const {
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
      const bool raises = s.is_unset[r] ? top > -kInfinity : top > kMostExponent;
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
  }

  /// By what a raise of `of`'s tile shrinks two query rows from `row` on.
  __device__ __forceinline__ float2 shrink(int of, int row) const {
    const float2 by = *reinterpret_cast<const float2*>(&s.raise[of][row]);
    return {fast_exp2(-by.x), fast_exp2(-by.y)};
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
  using Totals = float[K::kRows / 4];  // of the weights: query row 8 * j + lane % 4 * 2 + i is 2 * j + i
  __device__ __forceinline__ void shrink_totals(int of, Totals& totals) const {
#pragma unroll
    for (int j = 0; j < K::kRows / 8; ++j) {
      const float2 by = shrink(of, 8 * j + first_row());
      totals[2 * j] *= by.x;
      totals[2 * j + 1] *= by.y;
    }
  }

  /// Exponents become weights, for both groups.
  __device__ __forceinline__ void weigh(const TokenScales& scales, Scores<K>& exponents,
                                        Totals& totals) const {
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
      s.ratios[group][columns][warp() * 16 + lane() / 4] = __half_as_ushort(__low2half(ratio));
      s.ratios[group][columns][warp() * 16 + lane() / 4 + 8] = __half_as_ushort(__high2half(ratio));
    }
    fence_before_copy();
  }

  /// sums += values of a tile times the weights of `of`'s tile; products are on their way at the end, and the
  /// tile is free.
  __device__ __forceinline__ void add_values(const StagePlace<K>& place, int of, Sums<K>& sums) const {
    barrier_wait(at(&s.full[place.stage]), place.parity);  // long past, but this group may not have seen it
    const unsigned from = tile(place) + static_cast<unsigned>(lane() % 16) * K::kRowBytes +
                          static_cast<unsigned>(lane() / 16) * 16u +
                          static_cast<unsigned>(group * kGroupColumns + warp() * kPairColumns);
    const latent::OperandPlace weights(columns_operand(
        at(s.weights[0]) + static_cast<unsigned>(of) * latent::kChunkBytes, latent::kChunkBytes));
    constexpr int kPairBlocks = kValueBlocks / 2;
    constexpr int kLoads = kSteps * kPairBlocks;
    const auto place_of = [&](int i) {
      return from + static_cast<unsigned>(i / kPairBlocks * kProductDepth) * K::kRowBytes +
             static_cast<unsigned>(i % kPairBlocks) * (kWarpGroup / kWarp * kPairColumns);
    };
    Fragment raw[2];
    Fragment values[2][2];
    load_transposed(raw[0], place_of(0));
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (i + 1 < kLoads) load_transposed(raw[(i + 1) % 2], place_of(i + 1));
      const int step = i / kPairBlocks;
      const int blocks = i % kPairBlocks * 2;
      Fragment(&v)[2] = values[i % 2];
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // columns k / 2 * 16, tokens k % 2 * 8 of the step
        const unsigned x = __byte_perm(raw[i % 2][k], 0, 0x3120);
        widen(x, v[k / 2][k % 2 * 2], v[k / 2][k % 2 * 2 + 1]);
      }
      if constexpr (K::kIsMixed) {
        const int columns = group * 2 + i % kPairBlocks;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const unsigned two = *reinterpret_cast<const unsigned*>(
              &s.ratios[of][columns][step * kProductDepth + k * 8 + first_row()]);
#pragma unroll
          for (int j = 0; j < 4; ++j)
            v[j / 2][k * 2 + j % 2] =
                multiply_pair(v[j / 2][k * 2 + j % 2], reinterpret_cast<const __half2&>(two));
        }
      }
      products_fence();
#pragma unroll
      for (int j = 0; j < 2; ++j)
        product<f16, K::kRows, true>(sums[blocks + j], v[j], weights.at(static_cast<unsigned>(step) * 2048u),
                                     1);
      products_commit();
      products_wait<1>();
    }
    barrier_arrive_if(lane() == 0, at(&s.empty[place.stage]));
  }
};

}  // namespace helix::cuda::latent_e4m3
