// SPDX-License-Identifier: Apache-2.0
// The products of a block that attends to latents of e4m3: scores and sums of values, both with the rows of
// the cache as the products' rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/latent_e4m3_block.cuh"
#include "cuda/attention/latent_e4m3_fragments.cuh"
#include "cuda/attention/latent_e4m3_softmax.cuh"
#include "cuda/runtime/wgmma_product.cuh"

namespace helix::cuda::latent_e4m3 {

/// What both groups do alike: group `group` has the scores of KV tiles group, group + 2, ..., and half of
/// the value columns of all.
template <class K, class Group>
struct Products {
  Shared<K>& s;
  Group group;

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }

  __device__ unsigned tile(const StagePlace<K>& place) const {
    return at(s.tiles[0]) + place.stage * K::kTileBytes;
  }

  /// The queries' columns [16 * step, + 16).
  __device__ __forceinline__ std::uint64_t query_operand(int step) const {
    return rows_operand(at(s.queries) + static_cast<unsigned>(step / kSteps) * K::kQueryChunkBytes +
                        static_cast<unsigned>(step % kSteps) * 32u);
  }

  /// Scores of a KV tile that has come, its scales applied where it has some.
  __device__ __forceinline__ void multiply_keys(const StagePlace<K>& place, Scores<K>& scores,
                                                TokenScales& scales) const {
    barrier_wait(at(&s.full[place.stage]), place.parity);
    const unsigned rows = tile(place) + static_cast<unsigned>(warp() * 16) * K::kRowBytes;
    if constexpr (K::kIsMixed) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float4 x;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                     : "r"(scales_at(rows, h))
                     : "memory");
        scales.load(h, x);
      }
    }
    const unsigned from =
        rows + static_cast<unsigned>(lane() % 16) * K::kRowBytes + static_cast<unsigned>(lane() / 16) * 16u;
    constexpr int kPairs = (kLatentColumns + (K::kIsMixed ? 0 : kRopeColumns)) / kPairColumns;
    constexpr int kLoads = K::kStageLoads;
    constexpr int kScaleLoads = 128 / kPairColumns;  // of columns of one scale
    static_assert(kPairs % kLoads == 0 && kScaleLoads % kLoads == 0);
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
      }
      if (K::kIsMixed && stage > 0 && stage * kLoads % kScaleLoads == 0)
        rescale(rows, stage * kLoads / kScaleLoads - 1, scales, scores);
      products_fence();
#pragma unroll
      for (int i = 0; i < 2 * kLoads; ++i)
        product<f16, K::kRows, false>(scores, k[i], query_operand(stage * 2 * kLoads + i), stage + i > 0);
      products_commit();
      products_wait<1>();
    }
    if constexpr (K::kIsMixed) {
      rescale(rows, 3, scales, scores);
      multiply_rope(from + K::kRopeAt, scales, scores);
    }
    latent::finish(scores);
    if constexpr (K::kIsMixed) {
#pragma unroll
      for (int i = 0; i < K::kRows / 2; ++i) scores[i] *= scales.scale(i / 2 % 2);
    }
  }

  /// Where the scales of this thread's token `h` lie, in rows of the cache from `rows` on.
  static __device__ __forceinline__ unsigned scales_at(unsigned rows, int h) {
    return rows + static_cast<unsigned>(lane() / 4 + 8 * h) * K::kRowBytes + K::kScalesAt;
  }

  /// Brings the scores of columns up to those of scale `k` from that scale's to the next one's, after the
  /// last to the token's: in f32, where a factor on the keys in f16 would be off alike for 128 columns.
  __device__ __forceinline__ void rescale(unsigned rows, int k, const TokenScales& scales,
                                          Scores<K>& scores) const {
    latent::finish(scores);
    const auto scale_of = [&](int h, int i) {
      float x;
      asm volatile("ld.shared.f32 %0, [%1];"
                   : "=f"(x)
                   : "r"(scales_at(rows, h) + static_cast<unsigned>(i) * 4u)
                   : "memory");
      return fmaxf(x, TokenScales::kLeastScale);
    };
    float factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      factors[h] = scale_of(h, k) * (k < 3 ? __frcp_rn(scale_of(h, k + 1)) : scales.inverse(h));
#pragma unroll
    for (int i = 0; i < K::kRows / 2; ++i) scores[i] *= factors[i / 2 % 2];
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

  /// Values of load `i` of a tile times the ratios of the tokens' scales.
  __device__ __forceinline__ void scale_values(int of, int i, Fragment& first, Fragment& second) const {
    constexpr int kStepLoads = kValueBlocks / 2;
    const auto& ratios = s.ratios[of][group * kStepLoads + i % kStepLoads];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const unsigned two = *reinterpret_cast<const unsigned*>(
          &ratios[i / kStepLoads * kProductDepth + k * 8 + lane() % 4 * 2]);
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
