// SPDX-License-Identifier: Apache-2.0
// How the ranks of an MPI job end it together, with one line on stderr.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string_view>

#include "cpu/mpi_calls.hpp"

namespace helix::cpu::mpi {

/// How aborting ranks learn of each other. A group and all groups split from it share one; if the application
/// has an MpiSession, all groups share one.
struct Alarm {
  MPI_Comm comm = MPI_COMM_NULL;
  std::mutex speaking;                               // held while last_words runs or changes
  std::function<void(std::string_view)> last_words;  // called before this process ends; may be empty

  Alarm() = default;
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;
  ~Alarm();

  /// Ends the job. If several ranks abort at about the same time, only the lowest reports: each tells the
  /// higher ranks, then listens briefly. Returns only if this process is ending already.
  void raise(std::string_view reason) noexcept;

 private:
  void speak(std::string_view reason) noexcept;
};

/// The alarm of the application's MpiSession; null if it has none.
std::shared_ptr<Alarm>& session_alarm();

}  // namespace helix::cpu::mpi
