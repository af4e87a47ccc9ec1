// SPDX-License-Identifier: Apache-2.0
// Compiles with every header of the core, links no library, and catches exceptions of the core.
#include <cstdio>

#include <helix/helix.hpp>
#include <helix/version.hpp>

int main() {
  static_assert(HELIX_VERSION >= 100);
  try {
    HELIX_EXPECTS(false, helix::ErrorCode::capacity, "C++ ", __cplusplus);
  } catch (const helix::Error& error) {
    std::printf("%s\n", error.what());
    return error.code() == helix::ErrorCode::capacity ? 0 : 1;
  }
  return 1;
}
