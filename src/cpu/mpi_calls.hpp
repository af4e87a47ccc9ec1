// SPDX-License-Identifier: Apache-2.0
// Converts MPI's results to errors, and bounds waits for it.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <helix/cpu/mpi_comm.hpp>

#include "comm/timeout.hpp"

namespace helix::cpu::mpi {

using comm::Clock;
using comm::milliseconds;

/// MPI's text for an error.
std::string message_of(int code);

/// @throws Error(io) unless `code` is MPI_SUCCESS.
void check(int code, std::string_view call);

/// Whether MPI has been initialised and not finalised.
bool is_running();

int world_rank();

/// Polls `done` until it is true, or the deadline has passed and the patience is over; then once more,
/// because the result may have arrived. Returns whether it was true.
template <class Done>
bool poll_until(Clock::time_point deadline, Done&& done) {
  comm::Patience patience(deadline);
  // Ranks may outnumber cores, so yields from the first poll on, and sleeps once the peer is clearly busy.
  for (int poll = 0;; ++poll) {
    const bool is_last = poll >= 200 && patience.is_over();
    if (done()) return true;
    if (is_last) return false;
    if (poll < 200) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(poll < 2000 ? 20 : 200));
    }
  }
}

/// Duplicates `comm`. Collective, bounded. Unless `herald` is MPI_COMM_NULL, announces this rank over it, so
/// that an error can name the missing ranks. `herald` is a communicator of the library's with all ranks of
/// `comm`, or `comm` itself if nobody else can use it yet. @throws Error(timeout) naming the world ranks that
/// did not come; without a herald, the ranks among which one did not come.
MPI_Comm duplicate(MPI_Comm comm, MPI_Comm herald, milliseconds timeout);

/// The ranks of `comm` as numbered in `other`.
std::vector<int> ranks_in(MPI_Comm comm, MPI_Comm other);

}  // namespace helix::cpu::mpi
