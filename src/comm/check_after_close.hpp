// SPDX-License-Identifier: Apache-2.0
// What a rank checks before it blames a peer whose connection has closed.
#pragma once

#include <thread>

#include "comm/socket.hpp"
#include "comm/timeout.hpp"

namespace helix::comm {

/// A connection to another rank has closed. That rank may only have reacted to the failure of a third, so
/// gives the watching thread, which hears from rank 0 who failed first, a moment.
/// @throws what check() throws.
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
