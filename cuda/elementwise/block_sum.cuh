// SPDX-License-Identifier: Apache-2.0
// A sum over the threads of a block.
#pragma once

#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// Sum of x over the block, for all threads. A barrier: earlier writes to shared memory become visible to
/// all. At most one call per kernel. Blocks are whole warps; warps that add zeros do not change a bit.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[kWarp];
  const unsigned lane = threadIdx.x % kWarp;
  x = warp_sum(x);
  if (lane == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  return warp_sum(lane < blockDim.x / kWarp ? sums[lane] : 0.0f);
}

}  // namespace helix::cuda
