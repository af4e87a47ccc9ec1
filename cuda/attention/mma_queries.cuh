// SPDX-License-Identifier: Apache-2.0
// Loads the rows of a query tile into shared memory for the kernels of mma.cuh and mma_latent.cuh, converted
// to the type in which they are multiplied.
//
// - bf16 queries with f16 or e4m3 KV: each row is multiplied by a power of two (row_operands.cuh), which is
//   divided out of its scores.
// - f16 queries with bf16 KV: a row is split into two bf16 rows, the second with the bits that the first
//   leaves over. Products take twice as long, and lose nothing.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/mma_rows.cuh"
#include "cuda/attention/params.cuh"
#include "cuda/attention/row_operands.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// Query rows of kDim columns for KV of type KV, with zeros past their own columns. kHasRest: each row has a
/// second term, kRows rows further on.
template <class KV, int kDim, int kRows, bool kHasRest>
struct MmaQueries {
  using T = MultipliedAs<KV>;
  static constexpr int kStride = kDim + kChunkBytes / 2;  // elements
  static constexpr int kCount = (kHasRest ? 2 : 1) * kRows * kStride;
  static constexpr int kChunks = kDim / 8;
  static constexpr int kLaneChunks = (kChunks + kWarp - 1) / kWarp;
  static_assert(!kHasRest || std::is_same_v<T, bf16>);

  /// Loads the rows, with zeros for rows past the last, and writes the factor of each row's scores to
  /// `factors`. A warp loads a row, a lane eight columns. All threads of the block.
  static __device__ void load(const AttentionParams& p, const QueryTile& query_tile, int head, int alignment,
                              T* queries, float* factors) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warps = static_cast<int>(blockDim.x) / kWarp;
#pragma unroll 4
    for (int row = static_cast<int>(threadIdx.x) / kWarp; row < kRows; row += warps) {
      uint4 chunks[kLaneChunks];
#pragma unroll
      for (int k = 0; k < kLaneChunks; ++k) chunks[k] = uint4{0, 0, 0, 0};
      if (row < query_tile.num_rows) {
        const auto* q = static_cast<const std::uint16_t*>(p.q) + query_tile.token(p, row) * p.q_token_stride +
                        query_tile.query_head(p, head, row) * p.q_head_stride;
#pragma unroll
        for (int k = 0; k < kLaneChunks; ++k)
          chunks[k] = read(q, (lane + k * kWarp) * 8, p.head_dim, alignment);
      }
      if constexpr (kHasRest) {
        store_both(queries + row * kStride, chunks);
      } else {
        float factor = 1.0f;
        if (std::is_same_v<T, f16> && p.dtype == DType::bf16) factor = make_f16(chunks);
        if (lane == 0) factors[row] = factor;
#pragma unroll
        for (int k = 0; k < kLaneChunks; ++k)
          if (lane + k * kWarp < kChunks) store(queries + row * kStride, lane + k * kWarp, chunks[k]);
      }
      if (kHasRest && lane == 0) factors[row] = 1.0f;
    }
  }

 private:
  static __device__ __forceinline__ uint4 read(const std::uint16_t* row, int column, int columns,
                                               int alignment) {
    if (alignment == 16 && column + 8 <= columns) return *reinterpret_cast<const uint4*>(row + column);
    unsigned words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = column + 2 * j;
      const unsigned low = at < columns ? row[at] : 0u;
      const unsigned high = at + 1 < columns ? row[at + 1] : 0u;
      words[j] = low | high << 16;
    }
    return {words[0], words[1], words[2], words[3]};
  }

  /// Stores columns [8 chunk, 8 chunk + 8). With e4m3 keys the columns are permuted: a lane gets four
  /// neighbouring columns of a key, and multiplies two of them where the instruction expects two and two
  /// eight further on.
  static __device__ __forceinline__ void store(T* row, int chunk, const uint4& x) {
    if constexpr (sizeof(KV) == 1) {
      auto* words = reinterpret_cast<uint2*>(row + chunk / 2 * 16);
      words[chunk % 2] = {x.x, x.z};
      words[2 + chunk % 2] = {x.y, x.w};
    } else {
      *reinterpret_cast<uint4*>(row + chunk * 8) = x;
    }
  }

  /// Stores a row of f16 as the sum of two rows of bf16.
  static __device__ __forceinline__ void store_both(T* row, const uint4 (&chunks)[kLaneChunks]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int k = 0; k < kLaneChunks; ++k) {
      const unsigned words[4] = {chunks[k].x, chunks[k].y, chunks[k].z, chunks[k].w};
      unsigned first[4];
      unsigned rest[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = __half22float2(reinterpret_cast<const __half2&>(words[j]));
        first[j] = pack<bf16>(x.x, x.y);
        rest[j] =
            pack<bf16>(x.x - __uint_as_float(first[j] << 16), x.y - __uint_as_float(first[j] & 0xffff0000u));
      }
      if (lane + k * kWarp >= kChunks) continue;
      store(row, lane + k * kWarp, {first[0], first[1], first[2], first[3]});
      store(row + kRows * kStride, lane + k * kWarp, {rest[0], rest[1], rest[2], rest[3]});
    }
  }

  /// Converts this warp's row from bf16 to f16. Returns RowScale::inverse().
  static __device__ __forceinline__ float make_f16(uint4 (&chunks)[kLaneChunks]) {
    unsigned top = 0;
#pragma unroll
    for (const uint4& chunk : chunks) top = larger_magnitude(top, chunk);
    const RowScale scale(__reduce_max_sync(~0u, top));
#pragma unroll
    for (uint4& chunk : chunks) scale.make_f16(chunk);
    return scale.inverse();
  }
};

}  // namespace helix::cuda
