// SPDX-License-Identifier: Apache-2.0
// at(): converts a 64-bit index to the index type of the standard containers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace helix::test {

inline std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

}  // namespace helix::test
