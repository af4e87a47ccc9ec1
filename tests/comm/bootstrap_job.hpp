// SPDX-License-Identifier: Apache-2.0
// Jobs whose ranks are threads with a Bootstrap each, and the outcome of each rank.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <helix/comm/bootstrap.hpp>
#include <helix/error.hpp>

#include "support/free_port.hpp"

namespace helix::test {

struct Outcome {
  std::optional<ErrorCode> code;
  std::string message;
};

/// Calls body(options) on one thread per rank, and returns what each call threw.
inline std::vector<Outcome> run_bootstrap_job(int size,
                                              const std::function<void(comm::BootstrapOptions)>& body,
                                              std::chrono::milliseconds timeout = std::chrono::seconds(20),
                                              int port = free_port()) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
      try {
        body({.rank = rank,
              .size = size,
              .port = port,
              .timeout = timeout,
              .heartbeat = std::chrono::milliseconds(50)});
      } catch (const Error& error) {
        outcome = {error.code(), error.what()};
      } catch (const std::exception& error) {
        outcome = {ErrorCode::internal, error.what()};
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

/// For rank bodies, because Catch's assertions are not thread-safe.
inline void expect(bool condition, const char* what) {
  if (!condition) throw Error(ErrorCode::internal, what);
}

}  // namespace helix::test
