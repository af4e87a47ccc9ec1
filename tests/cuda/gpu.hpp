// SPDX-License-Identifier: Apache-2.0
// Tests that need GPUs: skipped, and counted by ctest as skipped, where there are too few.
#pragma once

#include <iostream>

#include <cuda_runtime_api.h>

#include <helix/cuda/runtime.hpp>

namespace helix::test {

/// Whether the first GPU is of compute capability 9.
inline bool is_hopper() {
  int major = 0;
  HELIX_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  return major == 9;
}

}  // namespace helix::test

/// Leaves the test case, with the words that ctest looks for, unless there are at least `count` GPUs.
#define HELIX_REQUIRE_GPUS(count)                                                                       \
  do {                                                                                                  \
    if (::helix::cuda::device_count() < (count)) {                                                      \
      std::cout << "skipped: needs " << (count) << " GPUs, there are " << ::helix::cuda::device_count() \
                << " " << ::helix::cuda::no_device_reason() << std::endl;                               \
      return;                                                                                           \
    }                                                                                                   \
  } while (false)

/// The same unless the first of them is of compute capability 9.
#define HELIX_REQUIRE_HOPPER()                                                  \
  do {                                                                          \
    HELIX_REQUIRE_GPUS(1);                                                      \
    if (!::helix::test::is_hopper()) {                                          \
      std::cout << "skipped: needs a GPU of compute capability 9" << std::endl; \
      return;                                                                   \
    }                                                                           \
  } while (false)
