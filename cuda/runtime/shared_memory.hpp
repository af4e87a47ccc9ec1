// SPDX-License-Identifier: Apache-2.0
// How much shared memory a device has.
#pragma once

namespace helix::cuda {

/// The shared memory available to kernels.
struct SharedMemory {
  int block_bytes = 0;  ///< Most bytes of one block.
  int sm_bytes = 0;     ///< Bytes of all blocks of an SM.
};

/// The least of all supported devices: compute capabilities 8.6, 8.9 and 12.0.
inline constexpr SharedMemory kMinSharedMemory{99 * 1024, 100 * 1024};

}  // namespace helix::cuda
