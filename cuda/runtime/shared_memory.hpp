// SPDX-License-Identifier: Apache-2.0
// How much shared memory a device has.
#pragma once

namespace helix::cuda {

/// Shared memory that kernels may ask for.
struct SharedMemory {
  int block_bytes = 0;  ///< One block, at most.
  int sm_bytes = 0;     ///< All blocks of an SM.
};

/// The least that any supported device has: compute capabilities 8.6, 8.9 and 12.0.
inline constexpr SharedMemory kMinSharedMemory{99 * 1024, 100 * 1024};

}  // namespace helix::cuda
