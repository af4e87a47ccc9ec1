// SPDX-License-Identifier: Apache-2.0
// How the ranks of an MPI job wait for each other before MPI_Finalize: for as long as the last one is busy,
// but not for one that has stopped.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>

#include "comm/start_thread.hpp"
#include "cpu/mpi_calls.hpp"

namespace helix::cpu::mpi {

/// Answers, while this rank is busy, those that have come to their farewell: a sign of life every 200 ms. One
/// thread, which otherwise looks for a message five times a second.
class Farewell {
 public:
  /// Messages go over `comm`, of all ranks, with a tag of their own.
  explicit Farewell(MPI_Comm comm);
  Farewell(const Farewell&) = delete;
  Farewell& operator=(const Farewell&) = delete;
  ~Farewell();

  /// Tells all that this rank has come, and returns when all have. Collective.
  /// @throws Error(timeout) naming the world ranks that have not come and gave no sign of life for `timeout`.
  void exchange(milliseconds timeout);

 private:
  void answer();
  void stop();
  /// Takes the messages that are there; calls heard(rank) for each.
  template <class Heard>
  void receive(Heard&& heard);
  void send(const char& kind, int peer) const;

  MPI_Comm comm_;
  std::set<int> gone_;  // who has said farewell; the thread's until it ends
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_stopping_ = false;
  comm::Thread thread_;  // last: it uses the others
};

}  // namespace helix::cpu::mpi
