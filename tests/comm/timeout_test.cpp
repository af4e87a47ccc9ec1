// SPDX-License-Identifier: Apache-2.0
// Patience: a wait ends at its deadline, extended by the time in which its process slept.
#include "comm/timeout.hpp"

#include <chrono>
#include <thread>

#include "support/catch.hpp"

using namespace std::chrono_literals;
using helix::comm::Clock;
using helix::comm::deadline_after;
using helix::comm::Patience;

namespace {

/// Polls as often as required until the time is over.
void wait_out(Patience& patience) {
  while (!patience.is_over()) std::this_thread::sleep_until(patience.next_look());
}

}  // namespace

TEST_CASE("a wait that looks in time ends at its deadline") {
  const Clock::time_point begin = Clock::now();
  Patience patience(deadline_after(200ms));
  CHECK(patience.next_look() <= begin + 200ms);
  wait_out(patience);
  CHECK(Clock::now() - begin >= 200ms);
}

TEST_CASE("a wait is put off by what its process slept, wherever the sleep ends, and however often") {
  const auto awake = GENERATE(10ms, 200ms);  // then it sleeps until after the deadline
  const auto asleep = GENERATE(395ms, 600ms);
  const Clock::time_point begin = Clock::now();
  Patience patience(deadline_after(400ms));
  while (Clock::now() - begin < awake) {
    CHECK(!patience.is_over());
    std::this_thread::sleep_for(5ms);
  }
  std::this_thread::sleep_for(asleep);
  CHECK(!patience.is_over());
  const auto waited = Clock::now() - begin;
  std::this_thread::sleep_for(asleep);
  wait_out(patience);
  CHECK(Clock::now() - begin >= waited + 400ms + asleep - 60ms);  // minus the time of one poll
  CHECK(patience.is_over());
}
