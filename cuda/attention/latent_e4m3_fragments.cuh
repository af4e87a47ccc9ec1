// SPDX-License-Identifier: Apache-2.0
// Register operands of the kernel over latents of e4m3.
#pragma once

#include "cuda/attention/latent_e4m3_block.cuh"
#include "cuda/runtime/convert.cuh"

namespace helix::cuda::latent_e4m3 {

/// This thread's part of a wgmma operand in registers.
using Fragment = unsigned[4];

/// Returns whether `x` holds in any thread of the warp group; synchronises the group at named barrier
/// `barrier`.
__device__ __forceinline__ bool group_or(int barrier, bool x) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred in, out;\n"
      "setp.ne.b32 in, %1, 0;\n"
      "barrier.cta.red.or.pred out, %2, %3, in;\n"
      "selp.b32 %0, 1, 0, out;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<int>(x)), "r"(barrier), "n"(kWarpGroup)
      : "memory");
  return any != 0;
}

__device__ __forceinline__ unsigned multiply_pair(unsigned x, __half2 y) {
  const __half2 z = __hmul2(reinterpret_cast<const __half2&>(x), y);
  return reinterpret_cast<const unsigned&>(z);
}

}  // namespace helix::cuda::latent_e4m3
