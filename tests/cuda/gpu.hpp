// SPDX-License-Identifier: Apache-2.0
// Tests that need GPUs: skipped, and counted by ctest as skipped, where there are too few.
#pragma once

#include <iostream>

#include <helix/cuda/runtime.hpp>

/// Leaves the test case, with the words that ctest looks for, unless there are at least `count` GPUs.
#define HELIX_REQUIRE_GPUS(count)                                                                       \
  do {                                                                                                  \
    if (::helix::cuda::device_count() < (count)) {                                                      \
      std::cout << "skipped: needs " << (count) << " GPUs, there are " << ::helix::cuda::device_count() \
                << " " << ::helix::cuda::no_device_reason() << std::endl;                               \
      return;                                                                                           \
    }                                                                                                   \
  } while (false)
