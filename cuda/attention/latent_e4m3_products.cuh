// SPDX-License-Identifier: Apache-2.0
// The products of the kernel over latents of e4m3: scores, and sums of values. In both the cache is the
// register operand, and query rows are the columns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/latent_e4m3_block.cuh"
#include "cuda/attention/latent_e4m3_fragments.cuh"
#include "cuda/attention/latent_e4m3_scales.cuh"
#include "cuda/attention/latent_e4m3_softmax.cuh"
#include "cuda/runtime/wgmma_product.cuh"

namespace helix::cuda::latent_e4m3 {

/// The products of consumer group `group`, which computes the scores of KV tiles group, group + 2, ..., and
/// has half of the value columns of all tiles.
template <class K>
struct Products {
  Shared<K>& s;
  int group;

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }

  __device__ unsigned tile(const StagePlace<K>& place) const {
    return at(s.tiles[0]) + place.stage * K::kTileBytes;
  }

  /// Operand of the queries' columns [16 * step, + 16); `queries` is that of the first columns.
  static __device__ __forceinline__ std::uint64_t query_operand(const latent::OperandPlace& queries,
                                                                int step) {
    return queries.at(static_cast<unsigned>(step / kSteps) * K::kQueryChunkBytes +
                      static_cast<unsigned>(step % kSteps) * 32u);
  }
  __device__ __forceinline__ latent::OperandPlace queries() const {
    return latent::OperandPlace::once_a_warp(rows_operand(at(s.queries)));
  }
  /// Operand of the weights of group `of`'s tile, which follow the queries in shared memory. It is computed
  /// from that of the queries: once_a_warp() waits longer, and without either each product waits for its
  /// operand.
  static __device__ __forceinline__ latent::OperandPlace weights(const latent::OperandPlace& queries,
                                                                 int of) {
    constexpr auto kFirst = static_cast<unsigned>(columns_operand(K::kQueryBytes, latent::kChunkBytes)) -
                            static_cast<unsigned>(rows_operand(0));
    latent::OperandPlace place = queries;
    place.low += kFirst + static_cast<unsigned>(of) * (latent::kChunkBytes / 16u);
    return place;
  }

  /// Offset of this lane's ldmatrix of the warp's 16 rows in a swizzled chunk of 128 bytes a row. XOR it with
  /// the byte offset of further columns of the chunk, a multiple of 32.
  static __device__ __forceinline__ unsigned lane_in_chunk() {
    return swizzled(static_cast<unsigned>(warp() * 16 + lane() % 16), static_cast<unsigned>(lane() / 16));
  }
  /// Address of key columns [32 * pair, + 32) for this lane, whose lane_in_chunk() is `lane_at`.
  static __device__ __forceinline__ unsigned keys_at(unsigned tile, unsigned lane_at, int pair) {
    constexpr int kChunkPairs = kTileChunkColumns / kPairColumns;
    const unsigned step = static_cast<unsigned>(pair % kChunkPairs) * kPairColumns;
    if (pair >= kLatentColumns / kPairColumns) {  // rope columns of e4m3
      const unsigned half =
          swizzled_half(static_cast<unsigned>(warp() * 16 + lane() % 16), static_cast<unsigned>(lane() / 16));
      return tile + K::kRopeAt + (half ^ step);
    }
    return tile + static_cast<unsigned>(pair / kChunkPairs) * kTileChunkBytes + (lane_at ^ step);
  }

  /// Waits for a KV tile and computes its scores, times the scales of mixed rows; `queries` is queries().
  __device__ __forceinline__ void multiply_keys(const StagePlace<K>& place,
                                                const latent::OperandPlace& queries, Scores<K>& scores,
                                                TokenScales& scales) const {
    barrier_wait(at(&s.full[place.stage]), place.parity);
    const unsigned from = tile(place);
    const unsigned lane_at = lane_in_chunk();
    const TileScales<K> tile_scales{from};
    constexpr int kPairs = (kLatentColumns + (K::kIsMixed ? 0 : kRopeColumns)) / kPairColumns;
    constexpr int kLoads = K::kStageLoads;
    // loads that cover the columns of one scale
    constexpr int kScaleLoads = kTileChunkColumns / kPairColumns;
    static_assert(kPairs % kLoads == 0 && kScaleLoads % kLoads == 0);
    const auto load = [&](Fragment(&raw)[kLoads], int stage) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) load_matrices(raw[l], keys_at(from, lane_at, stage * kLoads + l));
    };
    Fragment raw[2][kLoads];
    Fragment keys[2][2 * kLoads];
    constexpr bool kHasSumsApart = TileScales<K>::kHasSumsApart;
    constexpr int kStages = kPairs / kLoads;
    typename TileScales<K>::Parts parts;
    float factors[2];  // found before products that they wait for, not after
    load(raw[0], 0);
    if constexpr (K::kIsMixed) {
      if constexpr (!kHasSumsApart) tile_scales.find_factors(0, factors);
      multiply_rope(from + K::kRopeAt, lane_at, queries, scores);
    }
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (stage + 1 < kStages) load(raw[(stage + 1) % 2], stage + 1);
      if (K::kIsMixed && stage + 1 == kStages) scales = tile_scales.load();
      Fragment(&k)[2 * kLoads] = keys[stage % 2];
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        const Fragment& x = raw[stage % 2][l];
        widen(x[0], k[2 * l][0], k[2 * l][2]);
        widen(x[1], k[2 * l][1], k[2 * l][3]);
        widen(x[2], k[2 * l + 1][0], k[2 * l + 1][2]);
        widen(x[3], k[2 * l + 1][1], k[2 * l + 1][3]);
      }
      const int scale = stage * kLoads / kScaleLoads;
      const bool begins = stage * kLoads % kScaleLoads == 0;
      const bool ends = (stage + 1) * kLoads % kScaleLoads == 0;
      if constexpr (K::kIsMixed && !kHasSumsApart) {
        if (begins) tile_scales.rescale(factors, scores);
        if (ends) tile_scales.find_factors(scale + 1, factors);
      }
      Scores<K>& to = kHasSumsApart ? parts[scale] : scores;
      products_fence();
#pragma unroll
      for (int i = 0; i < 2 * kLoads; ++i)
        product<f16, K::kRows, false>(to, k[i], query_operand(queries, stage * 2 * kLoads + i),
                                      i > 0 || !(kHasSumsApart ? begins : !K::kIsMixed && stage == 0));
      products_commit();
      products_wait<1>();
    }
    if constexpr (kHasSumsApart) {
      tile_scales.add(parts, scores);
    } else if constexpr (K::kIsMixed) {
      tile_scales.rescale(factors, scores);
    } else {
      latent::finish(scores);
    }
  }

  /// Issues scores = the products of the rope columns of bf16.
  __device__ __forceinline__ void multiply_rope(unsigned from, unsigned lane_at,
                                                const latent::OperandPlace& queries,
                                                Scores<K>& scores) const {
    Fragment rope[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      load_matrices(rope[step], from + (lane_at ^ static_cast<unsigned>(step) * 32u));
    products_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      product<bf16, K::kRows, false>(scores, rope[step],
                                     query_operand(queries, latent::kValueChunks * kSteps + step), step > 0);
    products_commit();
  }

  /// Multiplies the values of load `i` by the scale ratios of their tokens, of group `of`'s tile.
  __device__ __forceinline__ void scale_values(int of, int i, Fragment& first, Fragment& second) const {
    constexpr int kStepLoads = kValueBlocks / 2;
    const auto token =
        static_cast<unsigned>(i / kStepLoads * kProductDepth + lane() % 4 * 2);  // and 1, 8, 9 on
    const uint2 four = *reinterpret_cast<const uint2*>(
        &s.ratios[of][group * kStepLoads + i % kStepLoads][ratio_place(token)]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const unsigned two = k == 0 ? four.x : four.y;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        first[k * 2 + h] = multiply_pair(first[k * 2 + h], reinterpret_cast<const __half2&>(two));
        second[k * 2 + h] = multiply_pair(second[k * 2 + h], reinterpret_cast<const __half2&>(two));
      }
    }
  }

  /// Issues sums += values weights for a tile of group `of`; `queries` is queries(). Returns with products in
  /// flight, after releasing the tile.
  __device__ __forceinline__ void add_values(const StagePlace<K>& place, const latent::OperandPlace& queries,
                                             int of, Sums<K>& sums) const {
    // completed long ago, but this group may not have seen it
    barrier_wait(at(&s.full[place.stage]), place.parity);
    const unsigned from =
        tile(place) + static_cast<unsigned>(group) * (kGroupColumns / kTileChunkColumns) * kTileChunkBytes +
        swizzled(static_cast<unsigned>(lane() % 16), static_cast<unsigned>(warp() * 2 + lane() / 16));
    const latent::OperandPlace weights = Products::weights(queries, of);
    constexpr int kLoads = K::kStageLoads;
    constexpr int kStepLoads = kValueBlocks / 2;  // loads for 16 tokens: one a chunk
    static_assert(kWarpGroup / kWarp * kPairColumns == kTileChunkColumns);
    const auto load = [&](Fragment(&raw)[kLoads], int stage) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        const int i = stage * kLoads + l;
        load_transposed_matrices(
            raw[l], from + static_cast<unsigned>(i / kStepLoads * kProductDepth * kTileChunkColumns) +
                        static_cast<unsigned>(i % kStepLoads) * kTileChunkBytes);
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
        product<f16, K::kRows, true>(sums[i % kStepLoads * 2 + k % 2], v[k],
                                     weights.at(static_cast<unsigned>(i / kStepLoads) * 2048u), 1);
      }
      products_commit();
      products_wait<1>();
    }
    barrier_arrive_if(lane() == 0, at(&s.empty[place.stage]));
  }
};

}  // namespace helix::cuda::latent_e4m3
