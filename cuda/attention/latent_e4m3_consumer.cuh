// SPDX-License-Identifier: Apache-2.0
// The consumers of a block that attends to latents of e4m3: scores, weights and sums of values, all with the
// rows of the cache as the products' rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/latent_e4m3_block.cuh"
#include "cuda/attention/latent_e4m3_fragments.cuh"
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
/// Sums of weights, of query row 8 * j + lane % 4 * 2 + i element 2 * j + i.
template <class K>
using Totals = float[K::kRows / 4];
/// What both groups do alike: group kGroup has the scores of KV tiles kGroup, kGroup + 2, ..., and half of
/// the value columns of all.
template <class K, class Group>
struct Consumer {
  const AttentionParams& p;
  Shared<K>& s;
  Group group;

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }
  static __device__ int first_row() { return lane() % 4 * 2; }  // of each eight query rows

  __device__ unsigned tile(const StagePlace<K>& place) const {
    return at(s.tiles[0]) + place.stage * K::kTileBytes;
  }

  /// The queries' columns [16 * step, + 16).
  __device__ __forceinline__ std::uint64_t query_operand(int step) const {
    return rows_operand(at(s.queries) + static_cast<unsigned>(step / kSteps) * K::kQueryChunkBytes +
                        static_cast<unsigned>(step % kSteps) * 32u);
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
    constexpr int kPairs = (kLatentColumns + (K::kIsMixed ? 0 : kRopeColumns)) / kPairColumns;
    constexpr int kLoads = K::kStageLoads;
    static_assert(kPairs % kLoads == 0);
    const auto load = [&](Fragment(&raw)[kLoads], int stage) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l)
        load_matrices(raw[l], from + static_cast<unsigned>(stage * kLoads + l) * kPairColumns);
    };
    Fragment raw[2][kLoads];
    Fragment keys[2][2 * kLoads];
    load(raw[0], 0);
#pragma unroll
    for (int stage = 0; stage < kPairs / kLoads; ++stage) {
      if (stage + 1 < kPairs / kLoads) load(raw[(stage + 1) % 2], stage + 1);
      Fragment(&k)[2 * kLoads] = keys[stage % 2];
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        const Fragment& x = raw[stage % 2][l];
        widen(x[0], k[2 * l][0], k[2 * l][2]);
        widen(x[1], k[2 * l][1], k[2 * l][3]);
        widen(x[2], k[2 * l + 1][0], k[2 * l + 1][2]);
        widen(x[3], k[2 * l + 1][1], k[2 * l + 1][3]);
        if constexpr (K::kIsMixed) {
          const __half2 ratio = scales.ratio[(stage * kLoads + l) / 4];
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            unsigned& two = k[2 * l + i / 4][i % 4];
            two = multiply_pair(two, i % 2 == 0 ? __low2half2(ratio) : __high2half2(ratio));
          }
        }
      }
      products_fence();
#pragma unroll
      for (int i = 0; i < 2 * kLoads; ++i)
        product<f16, K::kRows, false>(scores, k[i], query_operand(stage * 2 * kLoads + i), stage + i > 0);
      products_commit();
      products_wait<1>();
    }
    if constexpr (K::kIsMixed) multiply_rope(from + K::kRopeAt, scales, scores);
    latent::finish(scores);
    if constexpr (K::kIsMixed) {
#pragma unroll
      for (int i = 0; i < K::kRows / 2; ++i) scores[i] *= scales.scale(i / 2 % 2);
    }
  }

  /// Adds the rope columns of bf16.
  __device__ __forceinline__ void multiply_rope(unsigned from, const TokenScales& scales,
                                                Scores<K>& scores) const {
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
      product<bf16, K::kRows, false>(scores, k, query_operand(latent::kValueChunks * kSteps + step), 1);
      products_commit();
      products_wait<1>();
    }
  }

  /// Scores to exponents over the pivots; `is_whole`: all rows see all tokens of the tile. Returns the
  /// largest.
  __device__ __forceinline__ float find_exponents(int token, bool is_whole, const TokenScales& scales,
                                                  Scores<K>& scores) const {
    const bool is_capped = p.soft_cap > 0.0f;
    if (is_capped) cap(scores);
    float most = -kInfinity;
#pragma unroll
    for (int j = 0; j < K::kRows / 8; ++j) {
      const float4 two = *reinterpret_cast<const float4*>(&s.row[8 * j + first_row()]);
      const float factor[2] = {is_capped ? 1.0f : two.x, is_capped ? 1.0f : two.z};
      const float pivot[2] = {two.y, two.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& x = scores[4 * j + k];
        x = fmaf(x, factor[k % 2], K::kIsMixed ? scales.log2(k / 2) - pivot[k % 2] : -pivot[k % 2]);
        most = fmaxf(most, x);
      }
    }
    return is_whole ? most : mask(token, scores);
  }
  __device__ __forceinline__ void cap(Scores<K>& scores) const {
    const float top = p.soft_cap * kLog2E;
#pragma unroll
    for (int j = 0; j < K::kRows / 8; ++j) {
      const float4 two = *reinterpret_cast<const float4*>(&s.row[8 * j + first_row()]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& x = scores[4 * j + k];
        x = top * fast_tanh(x * (k % 2 == 0 ? two.x : two.z));
      }
    }
  }
  /// What rows do not see becomes nothing. Returns the largest of the rest.
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
  __device__ __forceinline__ void shrink_totals(int of, Totals<K>& totals) const {
#pragma unroll
    for (int j = 0; j < K::kRows / 8; ++j) {
      const float2 by = shrink(of, 8 * j + first_row());
      totals[2 * j] *= by.x;
      totals[2 * j + 1] *= by.y;
    }
  }

  /// Exponents become weights, for both groups.
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
      s.ratios[group][columns][warp() * 16 + lane() / 4] = __half_as_ushort(__low2half(ratio));
      s.ratios[group][columns][warp() * 16 + lane() / 4 + 8] = __half_as_ushort(__high2half(ratio));
    }
    fence_before_copy();
  }

  /// Values of load `i` of a tile times the ratios of the tokens' scales.
  __device__ __forceinline__ void scale_values(int of, int i, Fragment& first, Fragment& second) const {
    constexpr int kStepLoads = kValueBlocks / 2;
    const auto& ratios = s.ratios[of][group * kStepLoads + i % kStepLoads];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const unsigned two =
          *reinterpret_cast<const unsigned*>(&ratios[i / kStepLoads * kProductDepth + k * 8 + first_row()]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        first[k * 2 + h] = multiply_pair(first[k * 2 + h], reinterpret_cast<const __half2&>(two));
        second[k * 2 + h] = multiply_pair(second[k * 2 + h], reinterpret_cast<const __half2&>(two));
      }
    }
  }

  /// sums += values of a tile times the weights of group `of`'s tile; products are on their way at the end,
  /// and the tile is free.
  __device__ __forceinline__ void add_values(const StagePlace<K>& place, int of, Sums<K>& sums) const {
    barrier_wait(at(&s.full[place.stage]), place.parity);  // long past, but this group may not have seen it
    const unsigned from = tile(place) + static_cast<unsigned>(lane() % 16) * K::kRowBytes +
                          static_cast<unsigned>(lane() / 16) * 16u +
                          static_cast<unsigned>(group * kGroupColumns + warp() * kPairColumns);
    constexpr int kLoads = K::kStageLoads;
    constexpr int kStepLoads = kValueBlocks / 2;  // of 16 tokens
    const auto load = [&](Fragment(&raw)[kLoads], int stage) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        const int i = stage * kLoads + l;
        load_transposed_matrices(
            raw[l], from + static_cast<unsigned>(i / kStepLoads * kProductDepth) * K::kRowBytes +
                        static_cast<unsigned>(i % kStepLoads) * (kWarpGroup / kWarp * kPairColumns));
      }
    };
    Fragment raw[2][kLoads];
    Fragment values[2][2 * kLoads];
    load(raw[0], 0);
    constexpr int kStages = kSteps * kStepLoads / kLoads;
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (stage + 1 < kStages) load(raw[(stage + 1) % 2], stage + 1);
      Fragment(&v)[2 * kLoads] = values[stage % 2];
#pragma unroll
      for (int k = 0; k < 4 * kLoads; ++k) {  // of a load: columns k / 2 * 16, tokens k % 2 * 8 of the step
        const unsigned x = __byte_perm(raw[stage % 2][k / 4][k % 4], 0, 0x3120);
        widen(x, v[k / 2][k % 2 * 2], v[k / 2][k % 2 * 2 + 1]);
      }
      if constexpr (K::kIsMixed) {
#pragma unroll
        for (int l = 0; l < kLoads; ++l) scale_values(of, stage * kLoads + l, v[2 * l], v[2 * l + 1]);
      }
      products_fence();
#pragma unroll
      for (int k = 0; k < 2 * kLoads; ++k) {
        const int i = stage * kLoads + k / 2;
        const std::uint64_t weights = columns_operand(
            at(s.weights[of]) + static_cast<unsigned>(i / kStepLoads) * 2048u, latent::kChunkBytes);
        product<f16, K::kRows, true>(sums[i % kStepLoads * 2 + k % 2], v[k], weights, 1);
      }
      products_commit();
      products_wait<1>();
    }
    barrier_arrive_if(lane() == 0, at(&s.empty[place.stage]));
  }
};

}  // namespace helix::cuda::latent_e4m3
