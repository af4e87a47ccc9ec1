// SPDX-License-Identifier: Apache-2.0
// The products of the kernel over latents for few query rows, by mma.sync.
#pragma once

#include "cuda/attention/narrow_latent_copies.cuh"
#include "cuda/attention/row_operands.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda::narrow_latent {

/// The products of one warp with a KV tile in shared memory.
template <class T>
class Products {
 public:
  static constexpr int kScoreTokens = 8;  ///< Keys of a warp: the n of one mma.sync.
  static constexpr int kKeyHalves = 2;    ///< Halves of a key's columns, which different warps multiply.
  static constexpr int kHalfSteps = kColumns / kProductDepth / kKeyHalves;
  static constexpr int kSumTiles = kChunkColumns / 8;
  static_assert(kWarps == kKeyHalves * kTokens / kScoreTokens && kWarps == kLatentColumns / kChunkColumns);

  /// `queries`: 16 rows in shared memory, `stride` elements apart.
  __device__ Products(const T* queries, int stride) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const T* from = queries + lane % 16 * stride + half() * kHalfSteps * kProductDepth + lane / 16 * 8;
    const auto at = static_cast<unsigned>(__cvta_generic_to_shared(from));
#pragma unroll
    for (int k = 0; k < kHalfSteps; ++k)
      load_matrices(queries_[k], at + static_cast<unsigned>(k * kProductDepth * 2));
  }

  static __device__ int warp() {
    return static_cast<int>(threadIdx.x) / kWarp;
  }
  static __device__ int half() {
    return warp() / (kTokens / kScoreTokens);
  }
  static __device__ int first_key() {
    return warp() % (kTokens / kScoreTokens) * kScoreTokens;
  }

  /// scores = queries keys^T for this warp's keys and half of their columns.
  __device__ __forceinline__ void multiply_keys(unsigned tile, float (&scores)[4]) const {
    const unsigned lane = threadIdx.x % kWarp;
    // An ldmatrix brings two steps, half a chunk of keys. The second half of the columns begins within a
    // chunk.
    const auto begin = static_cast<unsigned>(half());
    const unsigned row = tile + static_cast<unsigned>(first_key()) * kRowBytes;
    const unsigned even = row + begin * 4 * kChunkBytes + swizzled(lane % 8, lane / 8 + begin * 4);
    const unsigned odd = row + begin * 5 * kChunkBytes + swizzled(lane % 8, lane / 8 + (1 - begin) * 4);
    unsigned keys[kHalfSteps / 2][4];
#pragma unroll
    for (int k = 0; k < kHalfSteps / 2; ++k)
      load_matrices(keys[k], (k % 2 == 0 ? even : odd) + static_cast<unsigned>(k / 2) * kChunkBytes);
    constexpr int kSums = 3;  // accumulators in turn: a product's latency is longer than its issue interval
    float sums[kSums][4] = {};
#pragma unroll
    for (int k = 0; k < kHalfSteps; ++k) {
      const unsigned(&q)[4] = queries_[k];
      const unsigned* x = &keys[k / 2][k % 2 * 2];
      multiply<T>(sums[k % kSums], q[0], q[1], q[2], q[3], x[0], x[1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = sums[0][i] + sums[1][i] + sums[2][i];
  }

  /// sums += weights values for this warp's chunk of columns. The weights of 16 rows lie `stride` bytes
  /// apart.
  static __device__ __forceinline__ void add_values(unsigned weights, unsigned stride, unsigned tile,
                                                    float (&sums)[kSumTiles][4]) {
    constexpr int kSteps = kTokens / kProductDepth;
    const unsigned lane = threadIdx.x % kWarp;
    const unsigned values = tile + static_cast<unsigned>(warp()) * kChunkBytes;
    const unsigned at = values + swizzled(lane % 16, lane / 16);
    unsigned w[kSteps][4];
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      load_matrices(
          w[s], weights + lane % 16 * stride + lane / 16 * 16 + static_cast<unsigned>(s * kProductDepth * 2));
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      unsigned x[kSumTiles / 2][4];
#pragma unroll
      for (int n = 0; n < kSumTiles / 2; ++n)
        load_transposed_matrices(x[n], (at ^ static_cast<unsigned>(n) * 32u) +
                                           static_cast<unsigned>(s * kProductDepth) * kRowBytes);
#pragma unroll
      for (int n = 0; n < kSumTiles; ++n) {
        const unsigned* b = &x[n / 2][n % 2 * 2];
        multiply<T>(sums[n], w[s][0], w[s][1], w[s][2], w[s][3], b[0], b[1]);
      }
    }
  }

  /// Zeroes this warp's chunk for tokens outside of [first, last): what lies there may be infinite.
  static __device__ __forceinline__ void clear_values(unsigned tile, int first, int last) {
    constexpr int kRowLanes = static_cast<int>(kRowBytes) / 16;
    const unsigned values = tile + static_cast<unsigned>(warp()) * kChunkBytes + threadIdx.x % kWarp * 16u;
#pragma unroll
    for (int token = 0; token < kTokens; token += kWarp / kRowLanes) {
      const int own = token + static_cast<int>(threadIdx.x) % kWarp / kRowLanes;
      if (own < first || own >= last)
        store_shared(values + static_cast<unsigned>(token) * kRowBytes, uint4{});
    }
    fence_before_copy();
    __syncwarp();
  }

 private:
  unsigned queries_[kHalfSteps][4];
};

}  // namespace helix::cuda::narrow_latent
