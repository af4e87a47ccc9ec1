// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 (Salmon et al., SC 2011): random numbers that are a function of key and counter.
#pragma once

#include <array>
#include <cstdint>

namespace helix {

/// Returns four random words that depend on counter and key alone, after ten rounds.
constexpr std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> counter,
                                                     std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xd2511f53u} * counter[0];
    const std::uint64_t b = std::uint64_t{0xcd9e8d57u} * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9e3779b9u;
    key[1] += 0xbb67ae85u;
  }
  return counter;
}

/// Random number, uniform in [0, 1) with 53 bits; a function of seed and counter.
constexpr double philox_uniform(std::uint64_t seed, std::uint64_t counter) {
  const auto bits =
      philox4x32_10({static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), 0, 0},
                    {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  const std::uint64_t wide = std::uint64_t{bits[0]} << 32 | bits[1];
  return static_cast<double>(wide >> 11) * 0x1p-53;
}

}  // namespace helix
