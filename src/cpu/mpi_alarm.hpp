// SPDX-License-Identifier: Apache-2.0
// How the ranks of an MPI job end it together, with one line on stderr.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string_view>

#include "cpu/mpi_calls.hpp"

namespace helix::cpu::mpi {

/// Where ranks that abort learn of each other. Shared by a group and all groups split from it, or, if the
/// application has an MpiSession, by all groups.
struct Alarm {
  MPI_Comm comm = MPI_COMM_NULL;
  std::mutex speaking;                               // held while last_words runs or changes
  std::function<void(std::string_view)> last_words;  // before this process ends; or empty

  Alarm() = default;
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;
  ~Alarm();

  /// Ends the job. Of the ranks that abort at about the same time the lowest one speaks: each tells the
  /// higher ones, then listens a while. Returns only if this process is ending already.
  void raise(std::string_view reason) noexcept;

 private:
  void speak(std::string_view reason) noexcept;
};

/// The alarm of the application's MpiSession; null where it has none.
std::shared_ptr<Alarm>& session_alarm();

}  // namespace helix::cpu::mpi
