// SPDX-License-Identifier: Apache-2.0
// The clock, the limit and the words of a bounded wait for other ranks.
#pragma once

#include <chrono>

#include <helix/error.hpp>

namespace helix::comm {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// The time as messages tell it.
inline double seconds(milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

/// The timeout, at most ten years: a clock cannot count much further, and would wrap around.
inline constexpr milliseconds bounded(milliseconds timeout) {
  constexpr milliseconds kLongest = std::chrono::hours(10 * 365 * 24);
  return timeout < kLongest ? timeout : kLongest;
}

/// When a wait that begins now ends.
inline Clock::time_point deadline_after(milliseconds timeout) {
  return Clock::now() + bounded(timeout);
}

inline void expect_timeout(milliseconds timeout) {
  HELIX_EXPECTS(timeout.count() > 0, ErrorCode::invalid_argument, "timeout is ", timeout.count(),
                " ms; it must be positive");
}

}  // namespace helix::comm
