// SPDX-License-Identifier: Apache-2.0
// Catch2 v2 (Debian 12) or v3, whichever is installed.
#pragma once
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <string>

#include <catch2/catch.hpp>

namespace Catch::Matchers {

/// Matches strings that contain `text`. This is v3's name of it; v3's Contains matches ranges.
inline StdString::ContainsMatcher ContainsSubstring(
    const std::string& text, CaseSensitive::Choice case_sensitivity = CaseSensitive::Yes) {
  return Contains(text, case_sensitivity);
}

}  // namespace Catch::Matchers
#endif
