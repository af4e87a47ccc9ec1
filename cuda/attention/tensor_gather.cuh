// SPDX-License-Identifier: Apache-2.0
// The end of a KV split in the tensor-core kernel: merges the results of a block's warps through shared
// memory.
#pragma once

#include "cuda/attention/combine.cuh"
#include "cuda/attention/tensor_softmax.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

inline constexpr int kGatherRows = 8;  ///< Rows that the warps merge at a time: half of kMmaRows.

/// The results of a block's warps, for kGatherRows rows at a time.
template <int kWarps, int kValueDim>
struct TensorSums {
  static constexpr int kStride = kValueDim + 4;  // f32, padded: rows 16 bytes apart in the banks

  alignas(16) float sums[kWarps][kGatherRows][kStride];
  float max[kWarps][kGatherRows];
  float sum[kWarps][kGatherRows];
};

/// Merges the results of kWarps warps.
template <class Softmax, int kWarps, int kValueDim, int kMTiles>
struct TensorGather {
  using Products = typename Softmax::Products;
  using Found = typename Softmax::Found;
  using Shared = TensorSums<kWarps, kValueDim>;
  static constexpr bool kIsFp8 = Softmax::kIsFp8;

  /// Stores a row of this lane's sums, the columns of `part`, in shared memory.
  template <class Part>
  static __device__ __forceinline__ void store_part(float* row, Part part, int half, float value_scale,
                                                    const float (&sums)[kValueDim / 8][4]) {
    const int kq = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Column kq * 2 + j of instruction e is element e of that lane group's columns. Half of the lanes store
      // their other column first, so that no two use the same bank.
      const bool is_odd = (i != 0) != (kq >= 2);
      float x[Part::kWide];
#pragma unroll
      for (int e = 0; e < Part::kWide; ++e) {
        x[e] = is_odd ? sums[Part::kTile + e][2 * half + 1] : sums[Part::kTile + e][2 * half];
        if constexpr (kIsFp8) x[e] *= value_scale;
      }
      float* at = row + part.column_of(kq * 2 + (is_odd ? 1 : 0));
      if constexpr (Part::kWide == 2) {
        *reinterpret_cast<float2*>(at) = {x[0], x[1]};
      } else {
#pragma unroll
        for (int e = 0; e < Part::kWide; e += 4)
          *reinterpret_cast<float4*>(at + e) = {x[e], x[e + 1], x[e + 2], x[e + 3]};
      }
    }
  }

  /// Collects the warps' sums in shared memory. Calls write(first row, rows, their BlockResult) for
  /// kGatherRows rows of the query tile after another.
  template <class Write>
  static __device__ void gather(Shared& s, const QueryTile& query_tile, float value_scale, const Found& found,
                                const Write& write) {
    // One loop, so that all rows run the same code: a launch runs it once and has to fetch it from memory.
#pragma unroll 1
    for (int first_row = 0; first_row < query_tile.num_rows; first_row += kGatherRows) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (first_row == m * kMmaRows + half * kGatherRows) store_rows(s, value_scale, found, m, half);
        }
      }
      __syncthreads();
      const BlockResult<kWarps> result{&s.sums[0][0][0], kGatherRows * Shared::kStride,
                                       Shared::kStride,  &s.max[0][0],
                                       &s.sum[0][0],     kGatherRows};
      write(first_row, min(kGatherRows, query_tile.num_rows - first_row), result);
      __syncthreads();
    }
  }

 private:
  /// Stores this warp's kGatherRows rows, half `half` of m16 tile `m`, in shared memory.
  static __device__ __forceinline__ void store_rows(Shared& s, float value_scale, const Found& found, int m,
                                                    int half) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int g = lane / 4;
    float sum = found.sum[m][half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (lane % 4 == 0) {
      s.max[warp][g] = found.max[m][half];
      s.sum[warp][g] = sum;
    }
    const auto store = [&](auto part) { store_part(s.sums[warp][g], part, half, value_scale, found.acc[m]); };
    Products::for_each_part(store, [&](auto even, auto odd) {
      store(even);
      store(odd);
    });
  }
};

}  // namespace helix::cuda
