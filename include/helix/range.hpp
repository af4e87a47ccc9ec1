// SPDX-License-Identifier: Apache-2.0
// Range: a half-open range of indices, and the even split of one.
#pragma once

#include <cstdint>

#include <helix/host_device.hpp>

namespace helix {

/// Half-open range [begin, end) of tokens, heads, rows, experts or layers.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  HELIX_HOST_DEVICE constexpr std::int64_t size() const { return end - begin; }
  HELIX_HOST_DEVICE friend constexpr bool operator==(const Range& a, const Range& b) {
    return a.begin == b.begin && a.end == b.end;
  }
};

/// Part `index` of `parts` nearly equal contiguous parts of [0, total): the first total % parts are one
/// longer. `parts` is at least 1.
constexpr Range split_evenly(std::int64_t total, std::int64_t parts, std::int64_t index) {
  const std::int64_t base = total / parts;
  const std::int64_t extra = total % parts;
  const std::int64_t begin = index * base + (index < extra ? index : extra);
  return {begin, begin + base + (index < extra ? 1 : 0)};
}

}  // namespace helix
