// SPDX-License-Identifier: Apache-2.0
// Runs a test body on N rank threads, collects the exceptions of all ranks, and gives up after a time limit
// instead of hanging.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <helix/cpu/local_comm.hpp>
#include <helix/error.hpp>

namespace helix::test {

/// The outcome of each rank. Catch's assertions are not thread-safe, so rank bodies throw and the test's
/// thread asserts.
struct RankOutcomes {
  std::vector<std::exception_ptr> failures;  ///< null if the rank finished

  /// The message of `rank`; empty if it finished.
  std::string message(int rank) const {
    const std::exception_ptr& failure = failures.at(static_cast<std::size_t>(rank));
    if (!failure) return "";
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      return error.what();
    } catch (...) {
      return "an exception that is no std::exception";
    }
  }

  /// The code of the helix::Error that `rank` threw; nullopt if it finished or threw something else.
  std::optional<ErrorCode> code(int rank) const {
    const std::exception_ptr& failure = failures.at(static_cast<std::size_t>(rank));
    if (!failure) return std::nullopt;
    try {
      std::rethrow_exception(failure);
    } catch (const Error& error) {
      return error.code();
    } catch (...) {
      return std::nullopt;
    }
  }

  /// One line per failed rank; empty if all finished.
  std::string all_messages() const {
    std::string text;
    for (std::size_t rank = 0; rank < failures.size(); ++rank) {
      if (!failures[rank]) continue;
      text.append("rank ").append(std::to_string(rank)).append(": ");
      text.append(message(static_cast<int>(rank))).append("\n");
    }
    return text;
  }
};

/// Calls body(comm) on one thread for each handle. A rank that throws aborts its group, as a real rank would,
/// which wakes the others. After `bound` the remaining ranks are aborted. If that does not end them either,
/// the process prints their numbers and dies, because their stacks refer to the test's data.
template <class Comm, class Body>
RankOutcomes run_ranks(std::vector<Comm> comms, Body body,
                       std::chrono::milliseconds bound = std::chrono::seconds(60)) {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t finished = 0;
    std::vector<bool> is_done;
  } state;
  const std::size_t size = comms.size();
  state.is_done.resize(size);
  RankOutcomes outcomes;
  outcomes.failures.resize(size);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Comm comm = comms[rank];
        body(comm);
      } catch (...) {
        outcomes.failures[rank] = std::current_exception();
        comms[rank].abort(outcomes.message(static_cast<int>(rank)));
      }
      const std::lock_guard lock(state.mutex);
      state.is_done[rank] = true;
      ++state.finished;
      state.changed.notify_all();
    });
  }
  std::string stuck;
  {
    std::unique_lock lock(state.mutex);
    const auto all_done = [&] { return state.finished == size; };
    if (!state.changed.wait_for(lock, bound, all_done)) {
      for (std::size_t rank = 0; rank < size; ++rank) {
        if (!state.is_done[rank]) stuck.append(" ").append(std::to_string(rank));
      }
      comms.front().abort("the test gave up");
      if (!state.changed.wait_for(lock, std::chrono::seconds(20), all_done)) {
        std::fprintf(stderr, "ranks%s hang and cannot be woken; the test process ends here\n", stuck.c_str());
        std::abort();
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (!stuck.empty()) {
    throw Error(ErrorCode::timeout, "ranks", stuck, " did not finish within ", bound.count(), " ms\n",
                outcomes.all_messages());
  }
  return outcomes;
}

template <class Body>
RankOutcomes run_ranks(int size, Body body, std::chrono::milliseconds bound = std::chrono::seconds(60)) {
  return run_ranks(cpu::LocalComm::create_group(size), std::move(body), bound);
}

/// Like run_ranks(), for bodies that must not fail: throws with every rank's message.
template <class Comm, class Body>
void run_ranks_or_throw(std::vector<Comm> comms, Body body,
                        std::chrono::milliseconds bound = std::chrono::seconds(60)) {
  const std::size_t size = comms.size();
  const RankOutcomes outcomes = run_ranks(std::move(comms), std::move(body), bound);
  const std::string text = outcomes.all_messages();
  if (!text.empty()) throw Error(ErrorCode::internal, size, " ranks failed:\n", text);
}

template <class Body>
void run_ranks_or_throw(int size, Body body, std::chrono::milliseconds bound = std::chrono::seconds(60)) {
  run_ranks_or_throw(cpu::LocalComm::create_group(size), std::move(body), bound);
}

}  // namespace helix::test
