// SPDX-License-Identifier: Apache-2.0
// What a rank asks before it blames the one whose connection has closed.
#pragma once

#include <thread>

#include "comm/socket.hpp"
#include "comm/timeout.hpp"

namespace helix::comm {

/// A connection to another rank has closed: that one may only have reacted to the end of a third. Gives the
/// watching thread, which hears from rank 0 who was first, a moment to know more. @throws what check() does.
template <class Check>
void check_after_close(const Check& check) {
  const Clock::time_point end = deadline_after(2 * kPollSlice);
  for (;;) {
    check();
    if (Clock::now() >= end) return;
    std::this_thread::sleep_for(milliseconds(5));
  }
}

}  // namespace helix::comm
