// SPDX-License-Identifier: Apache-2.0
// Sums over the blocks of a cluster (compute capability 9.0).
#pragma once

#include <cooperative_groups.h>

#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// Sum of x over the cluster, for all threads. All blocks of the cluster must call it.
__device__ __forceinline__ float cluster_sum(float x, int parts) {
  __shared__ float warps[kWarp];
  const unsigned lane = threadIdx.x % kWarp;
  x = warp_sum(x);
  if (lane == 0) warps[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = warp_sum(lane < blockDim.x / kWarp ? warps[lane] : 0.0f);
#if __CUDA_ARCH__ >= 900
  if (parts > 1) {
    __shared__ float whole;
    const auto cluster = cooperative_groups::this_cluster();
    if (threadIdx.x == 0) whole = x;
    cluster.sync();
    x = 0.0f;
    for (int i = 0; i < parts; ++i) x += *cluster.map_shared_rank(&whole, static_cast<unsigned>(i));
    asm volatile("barrier.cluster.arrive;" ::: "memory");  // see leave_cluster_sum()
  } else {
    __syncthreads();
  }
#else
  (void)parts;
  __syncthreads();
#endif
  return x;
}

/// Call after cluster_sum(), before the block ends or sums again: others may still read its sum.
__device__ __forceinline__ void leave_cluster_sum([[maybe_unused]] int parts) {
#if __CUDA_ARCH__ >= 900
  if (parts > 1) asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

}  // namespace helix::cuda
