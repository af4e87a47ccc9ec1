// SPDX-License-Identifier: Apache-2.0
// How often tests of random operations repeat themselves with other seeds.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

namespace helix::test {

/// The environment variable HELIX_TEST_ROUNDS; 1 if it is unset.
inline std::uint32_t num_rounds() {
  const char* const rounds = std::getenv("HELIX_TEST_ROUNDS");
  return rounds == nullptr ? 1 : static_cast<std::uint32_t>(std::stoul(rounds));
}

}  // namespace helix::test
