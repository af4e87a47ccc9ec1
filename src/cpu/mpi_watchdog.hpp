// SPDX-License-Identifier: Apache-2.0
// Bounds MPI calls that wait for other ranks without limit.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <utility>

#include "comm/start_thread.hpp"
#include "comm/timeout.hpp"

namespace helix::cpu::mpi {

/// Ends the process, with one line on stderr and a non-zero exit code, unless it is destroyed within the
/// limit; the launcher then ends the other processes. Nothing gentler helps against a call that does not
/// return.
class Watchdog {
 public:
  Watchdog(comm::milliseconds limit, std::string line)
      : thread_(comm::start_thread("the thread that bounds a call of MPI",
                                   [this, limit, line = std::move(line)] { wait(limit, line); })) {}
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      is_done_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

 private:
  void wait(comm::milliseconds limit, const std::string& line) {
    std::unique_lock lock(mutex_);
    comm::Patience patience(comm::deadline_after(limit));
    do {
      if (changed_.wait_until(lock, patience.next_look(), [this] { return is_done_; })) return;
    } while (!patience.is_over());
    std::fprintf(stderr, "helix: %s\n", line.c_str());
    std::fflush(stderr);
    std::_Exit(EXIT_FAILURE);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_done_ = false;
  comm::Thread thread_;  // last, because it uses the members above
};

}  // namespace helix::cpu::mpi
