// SPDX-License-Identifier: Apache-2.0
// worse(): the larger of two errors, without ignoring NaN.
#pragma once

#include <algorithm>
#include <cmath>

namespace helix::test {

/// The larger of two errors; infinity if `error` is NaN, which std::max would ignore.
inline double worse(double worst, double error) {
  return std::isnan(error) ? HUGE_VAL : std::max(worst, error);
}

}  // namespace helix::test
