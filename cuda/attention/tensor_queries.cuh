// SPDX-License-Identifier: Apache-2.0
// Loads the query rows of a query tile into shared memory, in the type in which they are multiplied
// (row_operands.cuh).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include <helix/dtype.hpp>

#include "cuda/attention/params.cuh"
#include "cuda/attention/row_operands.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// The layout of queries of kDim columns in shared memory, in elements. With 16-bit KV they lie row after
/// row, with 16 bytes between them for the banks. With e4m3 they lie as fragments, so that a lane gets its
/// part of an instruction in one load and in the right registers; from rows this takes four moves more.
/// Fragments bring 32 rows over e4m3 from 690 us to 604, and change nothing over 16-bit KV, which twice the
/// bytes bound (H200).
template <class KV, int kDim>
struct QueryPlaces {
  static constexpr bool kAreFragments = sizeof(KV) == 1;
  static constexpr int kRowStride = kAreFragments ? kDim : kDim + 8;

  /// Columns of a key from `column` on that a lane takes at a time, with four lanes side by side.
  static constexpr __device__ int wide_at(int column) {
    return std::min(16 / static_cast<int>(sizeof(KV)),
                    static_cast<int>(std::bit_floor(static_cast<unsigned>(kDim - column) / 4)));
  }
  /// Place of a lane's eight elements for instruction `i` along the columns of m16 tile `m`: two columns of
  /// rows g and g + 8, then the next two columns of both.
  static __device__ int fragment(int m, int i, int lane) {
    return ((m * (kDim / 16) + i) * kWarp + lane) * 8;
  }

  /// The place of columns [column, column + 2) of `row`, `column` even.
  static __device__ int pair(int row, int column) {
    if constexpr (!kAreFragments) return row * kRowStride + column;
    int first = 0;  // first of the columns that four lanes take at a time
    while (column >= first + 4 * wide_at(first)) first += 4 * wide_at(first);
    const int wide = wide_at(first);
    const int kq = (column - first) / wide;
    const int in_lane = (column - first) % wide;
    const int half = row % kMmaRows / 8;
    return fragment(row / kMmaRows, first / 16 + in_lane / 4, row % 8 * 4 + kq) +
           (in_lane / 2 % 2 * 2 + half) * 2;
  }
};

/// A thread's chunks of 16 bytes of a query tile of kRows rows. kRowLanes neighbouring threads share a row,
/// each with one chunk or none.
template <class KV, int kDim, int kRows, int kThreads>
struct TensorQueries {
  using T = MultipliedAs<KV>;
  using Places = QueryPlaces<KV, kDim>;
  static constexpr int kRowChunks = kDim / 8;
  static constexpr int kRowLanes = static_cast<int>(std::bit_ceil(unsigned{kRowChunks}));
  static constexpr int kCount = kRows * kRowLanes / kThreads;
  static_assert(kCount * kThreads == kRows * kRowLanes && kRowLanes <= kWarp);

  uint4 chunks[kCount];

  /// Starts to load the rows, with zeros for rows past the last.
  __device__ void read(const AttentionParams& p, const QueryTile& query_tile, int head) {
    const auto* q = static_cast<const std::uint16_t*>(p.q);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      const int row = i / kRowLanes;
      chunks[k] = uint4{0, 0, 0, 0};
      if (row < query_tile.num_rows && has_chunk(i)) {
        chunks[k] = *reinterpret_cast<const uint4*>(q + query_tile.token(p, row) * p.q_token_stride +
                                                    query_tile.query_head(p, head, row) * p.q_head_stride +
                                                    i % kRowLanes * 8);
      }
    }
  }

  /// Writes the rows to shared memory and, with e4m3, each row's RowScale::inverse() to `factors`; all
  /// threads of the block.
  __device__ void write(const AttentionParams& p, T* queries, float* factors) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      if constexpr (sizeof(KV) == 1) {
        const float factor = p.dtype == DType::bf16 ? make_f16(chunks[k]) : 1.0f;
        if (i % kRowLanes == 0) factors[i / kRowLanes] = factor;
      }
      if (!has_chunk(i)) continue;
      const int row = i / kRowLanes;
      const int column = i % kRowLanes * 8;
      if constexpr (Places::kAreFragments) {
        const unsigned words[4] = {chunks[k].x, chunks[k].y, chunks[k].z, chunks[k].w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
          *reinterpret_cast<unsigned*>(queries + Places::pair(row, column + 2 * j)) = words[j];
      } else {
        *reinterpret_cast<uint4*>(queries + Places::pair(row, column)) = chunks[k];
      }
    }
  }

 private:
  static __device__ __forceinline__ bool has_chunk(int i) {
    return kRowLanes == kRowChunks || i % kRowLanes < kRowChunks;
  }

  /// Converts this thread's chunk of a row from bf16 to f16, together with the row's other lanes. Returns
  /// RowScale::inverse().
  static __device__ float make_f16(uint4& chunk) {
    unsigned top = larger_magnitude(0, chunk);
#pragma unroll
    for (int offset = kRowLanes / 2; offset > 0; offset /= 2)
      top = ::max(top, __shfl_xor_sync(~0u, top, offset));
    const RowScale scale(top);
    scale.make_f16(chunk);
    return scale.inverse();
  }
};

}  // namespace helix::cuda
