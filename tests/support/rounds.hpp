// SPDX-License-Identifier: Apache-2.0
// How often tests of random operations repeat themselves, each time with other seeds.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

namespace helix::test {

/// HELIX_TEST_ROUNDS of the environment; 1 without it.
inline std::uint32_t num_rounds() {
  const char* const rounds = std::getenv("HELIX_TEST_ROUNDS");
  return rounds == nullptr ? 1 : static_cast<std::uint32_t>(std::stoul(rounds));
}

}  // namespace helix::test
