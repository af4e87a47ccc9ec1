// SPDX-License-Identifier: Apache-2.0
// Range: a half-open range of indices, and the even split of one.
#pragma once

#include <cstdint>

namespace helix {

/// Half-open range of heads, rows, experts or layers.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  constexpr std::int64_t size() const { return end - begin; }
  friend constexpr bool operator==(const Range&, const Range&) = default;
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
