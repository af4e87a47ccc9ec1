// SPDX-License-Identifier: Apache-2.0
// Macros for tests that need GPUs: with too few GPUs they are skipped, and ctest counts them as skipped.
#pragma once

#include <sstream>
#include <string>

#include <cuda_runtime_api.h>

#include <helix/cuda/runtime.hpp>

#include "support/skipped.hpp"

namespace helix::test {

/// Whether the first GPU is of compute capability 9.
inline bool is_hopper() {
  int major = 0;
  HELIX_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  return major == 9;
}

inline std::string lacks_gpus(int count) {
  std::ostringstream text;
  text << "needs " << count << " GPUs, there are " << cuda::device_count() << " " << cuda::no_device_reason();
  return text.str();
}

}  // namespace helix::test

/// Returns from the test case unless there are at least `count` GPUs.
#define HELIX_REQUIRE_GPUS(count)                            \
  do {                                                       \
    if (::helix::cuda::device_count() < (count)) {           \
      ::helix::test::skip(::helix::test::lacks_gpus(count)); \
      return;                                                \
    }                                                        \
  } while (false)

/// Returns from the test case unless the first GPU has compute capability 9.
#define HELIX_REQUIRE_HOPPER()                                    \
  do {                                                            \
    HELIX_REQUIRE_GPUS(1);                                        \
    if (!::helix::test::is_hopper()) {                            \
      ::helix::test::skip("needs a GPU of compute capability 9"); \
      return;                                                     \
    }                                                             \
  } while (false)
