// SPDX-License-Identifier: Apache-2.0
// SplitMix64 (Steele, Lea and Flood 2014), used where bits must look random: synthetic KV, epochs of
// exchanges.
#pragma once

#include <cstdint>

#include <helix/host_device.hpp>

namespace helix::detail {

/// Increment of the state of SplitMix64 from number to number.
inline constexpr std::uint64_t kSplitmix64Step = 0x9e3779b97f4a7c15u;

/// The finaliser of SplitMix64, which mixes the bits of x.
HELIX_HOST_DEVICE constexpr std::uint64_t splitmix64_mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

}  // namespace helix::detail
