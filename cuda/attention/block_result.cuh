// SPDX-License-Identifier: Apache-2.0
// The partial results of a block's warps for the rows of a query tile, in shared memory, and how they are
// merged.
#pragma once

#include "cuda/runtime/math.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// Returns the factor that rescales a part's sums from its own max to `top`, the largest max of all parts.
/// `sum` is the part's sum of weights. A part that saw nothing has sum 0 and max -inf, and `top` may be -inf
/// too: its factor is 0.
__device__ __forceinline__ float part_weight(float max, float sum, float top) {
  return sum == 0.0f ? 0.0f : exp2f(max - top);
}

/// Partial results of `kParts` warps for some rows of a query tile, in shared memory: unnormalised sums of
/// values and, for each row, the max (base 2) and the sum of weights.
template <int kParts>
struct BlockResult {
  const float* sums;  ///< [parts, rows, stride]
  int part_stride;
  int stride;
  const float* max;  ///< [parts, rows]
  const float* sum;  ///< [parts, rows]
  int rows;          ///< Rows of each part in max and sum.
};

/// One row of a BlockResult, its parts rescaled to their largest max. All lanes of a warp hold the same
/// values.
template <int kParts>
struct ResultRow {
  const float* sums;
  int part_stride;
  float weights[kParts];
  float max = -kInfinity;
  float sum = 0.0f;

  __device__ ResultRow(const BlockResult<kParts>& from, int row)
      : sums(from.sums + row * from.stride), part_stride(from.part_stride) {
#pragma unroll
    for (int k = 0; k < kParts; ++k) max = fmaxf(max, from.max[k * from.rows + row]);
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      const float part = from.sum[k * from.rows + row];
      weights[k] = part_weight(from.max[k * from.rows + row], part, max);
      sum = fmaf(part, weights[k], sum);
    }
  }

  __device__ float4 get(int column) const {
    float4 total{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      const float4 x = *reinterpret_cast<const float4*>(sums + k * part_stride + column);
      add_weighted(total, weights[k], x);
    }
    return total;
  }
};

/// Calls visit(row, the row's ResultRow) for each of the `num_rows` rows of `found`. The warps of the block
/// take rows in turn.
template <int kParts, class Visit>
__device__ __forceinline__ void for_each_row(const BlockResult<kParts>& found, int num_rows,
                                             const Visit& visit) {
  for (int row = static_cast<int>(threadIdx.x) / kWarp; row < num_rows;
       row += static_cast<int>(blockDim.x) / kWarp)
    visit(row, ResultRow<kParts>(found, row));
}

}  // namespace helix::cuda
