// SPDX-License-Identifier: Apache-2.0
// Test cases that leave something out for want of what a machine may lack: ctest counts them as skipped
// unless they fail.
#pragma once

#include <iostream>
#include <string_view>

namespace helix::test {

/// What a test program returns whose cases have not failed, but left something out: SKIP_RETURN_CODE of
/// tests/CMakeLists.txt and tests/cuda/CMakeLists.txt.
inline constexpr int kSkippedCode = 77;

inline bool has_skipped = false;

/// To be followed by the end of the case.
inline void skip(std::string_view why) {
  std::cout << "skipped: " << why << std::endl;
  has_skipped = true;
}

/// What main returns after `failures`, as Catch counts them.
inline int exit_code(int failures) {
  if (failures == 0) return has_skipped ? kSkippedCode : 0;
  return failures == kSkippedCode ? 1 : failures;
}

}  // namespace helix::test
