// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies into shared memory, counted in groups per thread (cp.async, compute capability 8.0).
#pragma once

#include <cstddef>

namespace helix::cuda {

/// Copies the first `valid` of kBytes bytes and zeros the others. Addresses are multiples of kBytes.
template <int kBytes>
__device__ __forceinline__ void copy_async(unsigned to, const void* from, int valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(valid), "n"(kBytes)
                 : "memory");
  }
}

/// Copies 16 bytes, bypassing L1, or writes zeros unless `copies`.
__device__ __forceinline__ void copy_chunk_or_zeros(unsigned to, const void* from, bool copies) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copies ? 16 : 0)
               : "memory");
}

/// Ends a group of this thread's copies; the group may be empty.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits for all of this thread's copies, including those not yet in a group.
__device__ __forceinline__ void wait_for_all_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

/// Waits until at most the last kGroups groups of this thread are pending.
template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace helix::cuda
