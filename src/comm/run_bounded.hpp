// SPDX-License-Identifier: Apache-2.0
// Bounds the wait for calls of other libraries that may never return.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "comm/start_thread.hpp"
#include "comm/timeout.hpp"

namespace helix::comm {

/// Runs `body`, which may wait for other ranks without bound, on its own thread. Past the deadline, or when
/// `give_up()` throws, abandons that thread; `body` must therefore own everything that it uses. Returns
/// whether `body` finished in time.
template <class Body, class GiveUp>
bool run_bounded(milliseconds timeout, Body body, GiveUp&& give_up) {
  struct Outcome {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_done = false;
    std::exception_ptr failure;
  };
  const auto outcome = std::make_shared<Outcome>();
  start_thread("the thread of a call that may wait without end", [outcome, body = std::move(body)]() mutable {
    std::exception_ptr failure;
    try {
      Body own = std::move(body);  // destroyed, with all it owns, before is_done is set
      own();
    } catch (...) {
      failure = std::current_exception();
    }
    const std::lock_guard lock(outcome->mutex);
    outcome->is_done = true;
    outcome->failure = failure;
    outcome->changed.notify_all();
  }).detach();
  const Clock::time_point deadline = deadline_after(timeout);
  std::unique_lock lock(outcome->mutex);
  while (!outcome->changed.wait_for(lock, milliseconds(20), [&] { return outcome->is_done; })) {
    give_up();
    if (Clock::now() >= deadline) return false;
  }
  if (outcome->failure) std::rethrow_exception(outcome->failure);
  return true;
}

}  // namespace helix::comm
