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

/// The end of a wait, which is put off once, by as much as the wait was to last, where this process finds
/// itself long past it: not the peer, but this process may have been the one that slept, stopped by a signal
/// or with its machine, and its peers with it.
class Patience {
 public:
  explicit Patience(Clock::time_point deadline) : deadline_(deadline), whole_(deadline - Clock::now()) {}

  Clock::time_point deadline() const { return deadline_; }
  /// For waits that wake at the deadline at the latest.
  bool is_over() {
    constexpr milliseconds kOverslept{100};  // load alone makes a wait late by less
    const Clock::time_point now = Clock::now();
    if (now < deadline_) return false;
    if (has_slept_ || now - deadline_ <= kOverslept) return true;
    has_slept_ = true;
    deadline_ = now + whole_;
    return false;
  }

 private:
  Clock::time_point deadline_;
  Clock::duration whole_;
  bool has_slept_ = false;
};

inline void expect_timeout(milliseconds timeout) {
  HELIX_EXPECTS(timeout.count() > 0, ErrorCode::invalid_argument, "timeout is ", timeout.count(),
                " ms; it must be positive");
}

}  // namespace helix::comm
