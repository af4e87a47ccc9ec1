// SPDX-License-Identifier: Apache-2.0
// The two products of the kernels of mma.cuh and mma_latent.cuh, for one warp and 16 query rows: queries by
// keys, and weights by values. Both are m16n8k16, with operands loaded by ldmatrix from the rows of
// mma_rows.cuh.
//
// e4m3 is widened to f16 in registers, exactly. ldmatrix treats two e4m3 elements as one of 16 bits. Of a
// key, a lane thus gets four neighbouring columns, and the queries' columns are ordered to match. Of values,
// it gets two columns of two tokens and pairs them by column, so that one product has the even columns and
// the next the odd ones.
#pragma once

#include <cstddef>

#include "cuda/attention/mma_rows.cuh"
#include "cuda/attention/row_operands.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

template <class KV>
struct MmaProducts {
  using T = MultipliedAs<KV>;
  static constexpr bool kIsFp8 = sizeof(KV) == 1;
  static constexpr int kStepBytes = 2 * kChunkBytes;  ///< Bytes of a row that one ldmatrix covers.

  /// scores += queries keys^T for 8 kNTiles keys. Both addresses are those of the first row. Query rows are
  /// kDim elements and a chunk apart, keys kKeyStride bytes.
  template <int kDim, int kKeyStride, int kNTiles>
  static __device__ __forceinline__ void multiply_keys(unsigned queries, unsigned keys,
                                                       float (&scores)[kNTiles][4]) {
    static_assert(kNTiles % 2 == 0);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    queries += static_cast<unsigned>(lane % 16 * (kDim * 2 + kChunkBytes) + lane / 16 * kChunkBytes);
    keys += static_cast<unsigned>((lane / 16 * 8 + lane % 8) * kKeyStride + lane / 8 % 2 * kChunkBytes);
    constexpr int kSteps = kDim * static_cast<int>(sizeof(KV)) / kStepBytes;
    static_assert(kSteps * kStepBytes == kDim * static_cast<int>(sizeof(KV)));
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      constexpr int kQueries = kIsFp8 ? 2 : 1;  // fragments of 16 columns
      unsigned q[kQueries][4];
#pragma unroll
      for (int i = 0; i < kQueries; ++i)
        load_matrices(q[i], queries + static_cast<unsigned>((k * kQueries + i) * 32));
#pragma unroll
      for (int n = 0; n < kNTiles; n += 2) {
        unsigned x[4];
        load_matrices(x, keys + static_cast<unsigned>(n * 8 * kKeyStride + k * kStepBytes));
        if constexpr (kIsFp8) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            unsigned low;
            unsigned high;
            widen(x[i], low, high);
            multiply_one(scores[n + i / 2], q[i % 2], low, high);
          }
        } else {
          multiply_one(scores[n], q[0], x[0], x[1]);
          multiply_one(scores[n + 1], q[0], x[2], x[3]);
        }
      }
    }
  }

  /// sums += weights values for 16 kSteps tokens, 8 kTiles columns and kMTiles times 16 query rows. `values`
  /// is the address of the first value row.
  template <int kValueStride, int kMTiles, int kSteps, int kTiles>
  static __device__ __forceinline__ void add_values(const unsigned (&weights)[kMTiles][kSteps][4],
                                                    unsigned values, float (&sums)[kMTiles][kTiles][4]) {
    constexpr int kLoadTiles = kStepBytes / static_cast<int>(sizeof(KV)) / 8;
    static_assert(kTiles % kLoadTiles == 0);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    values += static_cast<unsigned>(lane % 16 * kValueStride + lane / 16 * kChunkBytes);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int n = 0; n < kTiles; n += kLoadTiles) {
        unsigned x[4];
        load_transposed_matrices(
            x, values + static_cast<unsigned>(s * 16 * kValueStride + n / kLoadTiles * kStepBytes));
        const auto multiply_tile = [&](int tile, unsigned b0, unsigned b1) {
#pragma unroll
          for (int m = 0; m < kMTiles; ++m) multiply_one(sums[m][tile], weights[m][s], b0, b1);
        };
        if constexpr (kIsFp8) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            unsigned even[2];
            unsigned odd[2];
            widen(__byte_perm(x[2 * i], 0, 0x3120), even[0], odd[0]);
            widen(__byte_perm(x[2 * i + 1], 0, 0x3120), even[1], odd[1]);
            multiply_tile(n + 2 * i, even[0], even[1]);
            multiply_tile(n + 2 * i + 1, odd[0], odd[1]);
          }
        } else {
          multiply_tile(n, x[0], x[1]);
          multiply_tile(n + 1, x[2], x[3]);
        }
      }
    }
  }

  /// Stores the sums of one of this lane's two rows, times `scale`; `to` points at column 0.
  template <int kTiles>
  static __device__ __forceinline__ void store_row(float* to, int half, float scale,
                                                   const float (&sums)[kTiles][4]) {
    const int kq = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      const float* even = sums[n] + 2 * half;
      const float* odd = sums[n + 1] + 2 * half;
      if constexpr (kIsFp8) {
        *reinterpret_cast<float4*>(to + n * 8 + kq * 4) = {even[0] * scale, odd[0] * scale, even[1] * scale,
                                                           odd[1] * scale};
      } else {
        *reinterpret_cast<float2*>(to + n * 8 + kq * 2) = {even[0] * scale, even[1] * scale};
        *reinterpret_cast<float2*>(to + n * 8 + 8 + kq * 2) = {odd[0] * scale, odd[1] * scale};
      }
    }
  }

 private:
  static __device__ __forceinline__ void multiply_one(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                                      unsigned b1) {
    multiply<T>(d, a[0], a[1], a[2], a[3], b0, b1);
  }
};

}  // namespace helix::cuda
