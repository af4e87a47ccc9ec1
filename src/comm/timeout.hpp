// SPDX-License-Identifier: Apache-2.0
// The clock, the deadlines and the patience of bounded waits for other ranks.
#pragma once

#include <chrono>

#include <helix/error.hpp>

namespace helix::comm {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// The time in seconds, for messages.
inline double seconds(milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

/// The timeout, limited to ten years: a much longer one would overflow the clock.
inline constexpr milliseconds bounded(milliseconds timeout) {
  constexpr milliseconds kLongest = std::chrono::hours(10 * 365 * 24);
  return timeout < kLongest ? timeout : kLongest;
}

/// The end of a wait that begins now.
inline Clock::time_point deadline_after(milliseconds timeout) {
  return Clock::now() + bounded(timeout);
}

/// The deadline of a wait, extended if this process slept meanwhile (stopped by a signal, or with its
/// machine), because its peers may have slept too. It is extended by the time slept; if the first sleep was
/// longer than a quarter of the wait, the whole wait begins anew instead. A sleep shows only as a late call
/// of is_over(), so a waiter must wake at next_look() at the latest.
class Patience {
 public:
  explicit Patience(Clock::time_point deadline)
      : deadline_(deadline), whole_(deadline - Clock::now()), next_look_(Clock::now() + kBetweenLooks) {}

  Clock::time_point deadline() const { return deadline_; }
  /// The latest time at which to call is_over() again.
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
  static constexpr milliseconds kOverslept{250};  ///< System load alone delays a look by less.

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
