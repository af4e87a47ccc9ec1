// SPDX-License-Identifier: Apache-2.0
// at(): an index of 64 bits as the standard containers take it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace helix::test {

inline std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

}  // namespace helix::test
