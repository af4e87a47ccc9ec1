// SPDX-License-Identifier: Apache-2.0
// How the ranks of an MPI job wait for each other before MPI_Finalize: as long as the last one is busy, but
// not for a rank that has stopped.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>

#include "comm/start_thread.hpp"
#include "cpu/mpi_calls.hpp"

namespace helix::cpu::mpi {

/// While this rank is busy, its thread sends a sign of life every 200 ms to the ranks that have reached their
/// farewell. Otherwise the thread only checks for messages, five times a second.
class Farewell {
 public:
  /// Messages use `comm`, which has all ranks, with their own tag.
  explicit Farewell(MPI_Comm comm);
  Farewell(const Farewell&) = delete;
  Farewell& operator=(const Farewell&) = delete;
  ~Farewell();

  /// Tells all ranks that this one has come; returns when all have. Collective. @throws Error(timeout) naming
  /// the world ranks that have neither come nor given a sign of life for `timeout`.
  void exchange(milliseconds timeout);

 private:
  void answer();
  void stop();
  /// Receives the messages that have arrived; calls heard(rank) for each.
  template <class Heard>
  void receive(Heard&& heard);
  void send(const char& kind, int peer) const;

  MPI_Comm comm_;
  std::set<int> gone_;  // ranks that have said farewell; only the thread uses it until it ends
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_stopping_ = false;
  comm::Thread thread_;  // last, because it uses the members above
};

}  // namespace helix::cpu::mpi
