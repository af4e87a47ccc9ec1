// SPDX-License-Identifier: Apache-2.0
// Calibration by cases whose results follow by hand.
#include "calibration.hpp"

#include <vector>

#include <helix/plan/hardware.hpp>

#include "support/catch.hpp"

namespace {

using namespace helix::plan;
using helix::plan_cli::BenchCase;

/// A kernel that takes so long for 1 MB, which a plain read takes 2 us for.
BenchCase small_kernel(double us) {
  return {.name = "rms_norm/1",
          .family = "rms_norm",
          .parameters = {},
          .values = {{"us", us}, {"bytes", 1e6}, {"read_bytes/s", 1e6 / 2e-6}}};
}

TEST_CASE("overheads are the median excess of small kernels, and a combine that reads next to nothing") {
  const auto overheads = [](const std::vector<BenchCase>& cases) {
    return helix::plan_cli::calibrate(hardware_preset("gb200"), cases).overheads;
  };
  // 3, 4 and 9 us beyond the read: the middle one. Nothing is read faster than the smallest read, 2 us.
  const Overheads odd = overheads({small_kernel(5), small_kernel(11), small_kernel(6)});
  CHECK(in_microseconds(odd.per_operator) == Approx(4));
  CHECK(in_microseconds(odd.per_slice) == Approx(4 + 2));
  // 3, 4, 6 and 9 us: the mean of the two in the middle.
  const Overheads even = overheads({small_kernel(5), small_kernel(11), small_kernel(6), small_kernel(8)});
  CHECK(in_microseconds(even.per_operator) == Approx(5));
  CHECK(in_microseconds(even.per_slice) == Approx(5 + 2));
  // Kernels that are faster than a read of their bytes have no overhead.
  CHECK(overheads({small_kernel(1)}).per_operator == Time{});
}

}  // namespace
