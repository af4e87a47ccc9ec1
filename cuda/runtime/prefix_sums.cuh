// SPDX-License-Identifier: Apache-2.0
// Prefix sums by one warp, and binary search in them.
#pragma once

#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// Sum of x over the lower lanes.
__device__ inline int sum_before(int x) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int sum = x;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int other = __shfl_up_sync(~0u, sum, offset);
    if (lane >= offset) sum += other;
  }
  return sum - x;
}

/// Replaces x[0, n) by its exclusive sums and x[n] by the total. Called by the first warp, whose lanes take
/// kEach numbers at a time.
template <int kEach = 1, class Count>
__device__ inline void exclusive_sum(Count* x, int n) {
  const int lane = static_cast<int>(threadIdx.x);
  int before = 0;
#pragma unroll 1
  for (int first = lane * kEach; first - lane * kEach < n; first += kWarp * kEach) {
    int values[kEach];
    int sum = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      values[k] = first + k < n ? x[first + k] : 0;
      sum += values[k];
    }
    int next = before + sum_before(sum);
    before = __shfl_sync(~0u, next + sum, kWarp - 1);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (first + k < n) x[first + k] = static_cast<Count>(next);
      next += values[k];
    }
  }
  if (lane == 0) x[n] = static_cast<Count>(before);
  __syncwarp();
}

/// Largest i with x[i] <= value, among x[0, n].
template <class Count>
__device__ inline int find_last(const Count* x, int n, int value) {
  int low = 0;
  int high = n;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (x[middle] <= value ? low : high) = middle;
  }
  return low;
}

}  // namespace helix::cuda
