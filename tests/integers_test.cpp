// SPDX-License-Identifier: Apache-2.0
// The arithmetic of sizes: rounding, saturation at the edge of int64, least common multiples and even splits.
#include <cstdint>
#include <limits>

#include <helix/integers.hpp>
#include <helix/range.hpp>

#include "support/catch.hpp"

namespace helix::test {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

TEST_CASE("sizes round up to whole pieces and multiples") {
  for (std::int64_t size = 1; size <= 5; ++size) {
    for (std::int64_t n = 0; n <= 12; ++n) {
      CAPTURE(n, size);
      std::int64_t pieces = 0;
      while (pieces * size < n) ++pieces;
      CHECK(ceil_div(n, size) == pieces);
      CHECK(round_up(n, size) == pieces * size);
    }
  }
}

TEST_CASE("products and sums are exact up to the largest number, and saturate above it") {
  CHECK(saturating_product(3, 4) == 12);
  CHECK(saturating_product(3, 4, 5) == 60);
  CHECK(saturating_product(kMost, 1) == kMost);
  CHECK(saturating_product((kMost - 1) / 2, 2) == kMost - 1);
  CHECK(saturating_product((kMost - 1) / 2 + 1, 2) == kSaturated);
  CHECK(saturating_product(kMost, kMost) == kSaturated);
  CHECK(saturating_product(kMost, 0) == 0);
  CHECK(saturating_product(0, kMost) == 0);
  CHECK(saturating_product(std::int64_t{1} << 32, std::int64_t{1} << 32, 0) == 0);
  CHECK(saturating_sum(3, 4) == 7);
  CHECK(saturating_sum(kMost - 4, 4) == kMost);
  CHECK(saturating_sum(kMost - 5, 4) == kMost - 1);
  CHECK(saturating_sum(kMost - 3, 4) == kSaturated);
  CHECK(saturating_sum(kMost, kMost) == kSaturated);
}

TEST_CASE("the least common multiple is the first multiple of one that the other divides") {
  for (std::int64_t a = 1; a <= 12; ++a) {
    for (std::int64_t b = 1; b <= 12; ++b) {
      CAPTURE(a, b);
      std::int64_t multiple = a;
      while (multiple % b != 0) multiple += a;
      CHECK(least_common_multiple(a, b) == multiple);
    }
  }
  // The product would not fit.
  CHECK(least_common_multiple(std::int64_t{1} << 40, std::int64_t{1} << 39) == std::int64_t{1} << 40);
}

TEST_CASE("parts of an even split follow each other, and the first ones take what is left over") {
  for (std::int64_t total = 0; total <= 12; ++total) {
    for (std::int64_t parts = 1; parts <= 5; ++parts) {
      std::int64_t end = 0;
      for (std::int64_t i = 0; i < parts; ++i) {
        CAPTURE(total, parts, i);
        const Range part = split_evenly(total, parts, i);
        CHECK(part.begin == end);
        CHECK(part.size() == total / parts + (i < total % parts ? 1 : 0));
        end = part.end;
      }
      CHECK(end == total);
    }
  }
}

}  // namespace
}  // namespace helix::test
