// SPDX-License-Identifier: Apache-2.0
// MPI's results as errors, and waits for it that end.
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

/// MPI's words for an error.
std::string message_of(int code);

/// @throws Error(io) unless MPI_SUCCESS.
void check(int code, std::string_view call);

/// Between MPI_Init and MPI_Finalize.
bool is_running();

int world_rank();

/// Polls `done` until it holds or the deadline is past and patience over; returns whether it held. Polls once
/// more then: what was to come may have come.
template <class Done>
bool poll_until(Clock::time_point deadline, Done&& done) {
  comm::Patience patience(deadline);
  // Ranks may outnumber cores: yield from the first poll on, and sleep when the peer is clearly busy with its
  // own work.
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

/// Duplicates `comm`, collective, bounded. Says over `herald`, if it is not MPI_COMM_NULL, that this rank has
/// come, so that the error can name who has not: a communicator of the library's with all of `comm`'s ranks,
/// or `comm` itself where nobody else can use it yet.
/// @throws Error(timeout) naming the world ranks that did not come, without a herald those of whom one did
/// not.
MPI_Comm duplicate(MPI_Comm comm, MPI_Comm herald, milliseconds timeout);

/// The ranks of `comm` as `other` numbers them.
std::vector<int> ranks_in(MPI_Comm comm, MPI_Comm other);

}  // namespace helix::cpu::mpi
