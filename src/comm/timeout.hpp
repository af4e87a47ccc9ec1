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

/// The end of a wait. It is put off where this process slept meanwhile, stopped by a signal or with its
/// machine, as its peers may have slept with it: by as long as it slept, or once, where that was long, to
/// begin anew. Only a look that comes late shows that the process slept, so a waiter must wake at next_look()
/// at the latest.
class Patience {
 public:
  explicit Patience(Clock::time_point deadline)
      : deadline_(deadline), whole_(deadline - Clock::now()), next_look_(Clock::now() + kBetweenLooks) {}

  Clock::time_point deadline() const { return deadline_; }
  /// When is_over() is to be asked again, at the latest.
  Clock::time_point next_look() const { return deadline_ < next_look_ ? deadline_ : next_look_; }

  bool is_over() {
    const Clock::time_point now = Clock::now();
    const Clock::duration slept = now - next_look_;
    next_look_ = now + kBetweenLooks;
    if (slept > kOverslept) {
      deadline_ += slept;
      const Clock::time_point anew = now + whole_;  // peers may wake later
      if (!has_slept_ && slept > whole_ / 4 && deadline_ < anew) deadline_ = anew;
      has_slept_ = true;
    }
    return now >= deadline_;
  }

 private:
  static constexpr milliseconds kBetweenLooks{50};
  static constexpr milliseconds kOverslept{250};  ///< Load alone makes a look late by less.

  Clock::time_point deadline_;
  Clock::duration whole_;
  Clock::time_point next_look_;
  bool has_slept_ = false;
};

inline void expect_timeout(milliseconds timeout) {
  HELIX_EXPECTS(timeout.count() > 0, ErrorCode::invalid_argument, "timeout is ", timeout.count(),
                " ms; it must be positive");
}

}  // namespace helix::comm
