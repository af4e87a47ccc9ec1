// SPDX-License-Identifier: Apache-2.0
// For test cases that leave out a part because the machine lacks something: ctest counts them as skipped
// unless they fail.
#pragma once

#include <iostream>
#include <string_view>

namespace helix::test {

/// Exit code of a test program whose cases did not fail but left something out: SKIP_RETURN_CODE in
/// tests/CMakeLists.txt and tests/cuda/CMakeLists.txt.
inline constexpr int kSkippedCode = 77;

inline bool has_skipped = false;

/// The test case must end after this call.
inline void skip(std::string_view why) {
  std::cout << "skipped: " << why << std::endl;
  has_skipped = true;
}

/// The exit code of main for `failures`, as Catch counts them.
inline int exit_code(int failures) {
  if (failures == 0) return has_skipped ? kSkippedCode : 0;
  return failures == kSkippedCode ? 1 : failures;
}

}  // namespace helix::test
