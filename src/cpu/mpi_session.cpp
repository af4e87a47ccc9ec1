// SPDX-License-Identifier: Apache-2.0
// MpiSession, and the alarm with which ranks end a job.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <helix/cpu/mpi_comm.hpp>
#include <helix/error.hpp>

#include "cpu/mpi_alarm.hpp"
#include "cpu/mpi_farewell.hpp"
#include "cpu/mpi_watchdog.hpp"

namespace helix::cpu {
namespace mpi {
namespace {

constexpr int kAlarmTag = 1;

}  // namespace

Alarm::~Alarm() {
  if (comm != MPI_COMM_NULL && is_running()) MPI_Comm_free(&comm);
}

void Alarm::raise(std::string_view reason) noexcept {
  static std::atomic<bool> is_raised = false;  // shared by all groups and threads of this process
  if (is_raised.exchange(true) || !is_running()) return;
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  for (int peer = rank + 1; peer < size; ++peer) {
    MPI_Request request = MPI_REQUEST_NULL;
    if (MPI_Isend(nullptr, 0, MPI_BYTE, peer, kAlarmTag, comm, &request) == MPI_SUCCESS)
      MPI_Request_free(&request);
  }
  speak(reason);
  int is_silent = 0;
  const Clock::time_point deadline = Clock::now() + milliseconds(100);
  while (rank > 0 && is_silent == 0 && Clock::now() < deadline) {
    MPI_Iprobe(MPI_ANY_SOURCE, kAlarmTag, comm, &is_silent, MPI_STATUS_IGNORE);
    std::this_thread::sleep_for(milliseconds(1));
  }
  if (is_silent == 0) {
    std::fprintf(stderr, "helix: world rank %d failed: %.*s\n", world_rank(), static_cast<int>(reason.size()),
                 reason.data());
    std::fflush(stderr);
  } else {
    std::this_thread::sleep_for(std::chrono::seconds(2));  // the lower rank ends this process too
  }
  MPI_Abort(comm, EXIT_FAILURE);
  std::_Exit(EXIT_FAILURE);  // MPI_Abort is only best effort
}

void Alarm::speak(std::string_view reason) noexcept {
  try {
    const std::lock_guard lock(speaking);
    if (last_words) last_words(reason);
  } catch (...) {
    // The job ends for `reason`; ignore a failure to report it.
  }
}

std::shared_ptr<Alarm>& session_alarm() {
  static std::shared_ptr<Alarm> alarm;
  return alarm;
}

}  // namespace mpi

namespace {

const char* first_of(std::initializer_list<const char*> variables, const char* otherwise) {
  for (const char* variable : variables) {
    if (const char* value = std::getenv(variable)) return value;
  }
  return otherwise;
}

/// This rank according to the launcher. Before MPI_Init returns there is no other source.
std::string own_rank() {
  return first_of({"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"}, "unknown");
}

/// Extra time by rank. Ranks in the same call would time out together: the lowest reports, and its end ends
/// the others.
mpi::milliseconds turn_of(int rank) {
  return mpi::milliseconds(250) * std::clamp(rank, 0, 20);
}

std::string waited_in(const char* call, const std::string& rank, mpi::milliseconds timeout,
                      const char* known) {
  return message(
      {"world rank ", rank, " has waited in ", call, " for ", comm::seconds(timeout), " s", known});
}

}  // namespace

struct MpiSession::State {
  mpi::milliseconds timeout;
  int exceptions = 0;  // number in flight when the session began
  std::optional<mpi::Farewell> farewell;
};

MpiSession::MpiSession(int* argc, char*** argv, std::chrono::milliseconds timeout)
    : state_(std::make_unique<State>()) {
  comm::expect_timeout(timeout);
  state_->timeout = timeout;
  state_->exceptions = std::uncaught_exceptions();
  int provided = MPI_THREAD_SINGLE;
  {
    const std::string rank = own_rank();
    const mpi::Watchdog bound(
        comm::bounded(timeout) + turn_of(std::atoi(rank.c_str())),
        waited_in(
            "MPI_Init", rank, timeout,
            message({" for a rank of ",
                     first_of({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}, "an unknown number"),
                     " that has not called it or has stopped"})
                .c_str()));
    mpi::check(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  }
  if (provided < MPI_THREAD_MULTIPLE) {
    MPI_Finalize();
    throw Error(ErrorCode::unsupported, "the MPI library provides thread level ", provided,
                "; MPI_THREAD_MULTIPLE (", MPI_THREAD_MULTIPLE,
                ") is needed: use a build of MPI with thread support");
  }
  auto alarm = std::make_shared<mpi::Alarm>();
  alarm->comm = mpi::duplicate(MPI_COMM_WORLD, MPI_COMM_WORLD, timeout);  // nobody else uses the world yet
  state_->farewell.emplace(alarm->comm);
  mpi::session_alarm() = std::move(alarm);
}

MpiSession::~MpiSession() {
  if (!mpi::is_running()) return;
  if (std::uncaught_exceptions() > state_->exceptions) abort("an exception left main()");
  try {
    state_->farewell->exchange(state_->timeout);
    state_->farewell.reset();
    mpi::session_alarm().reset();
    const int rank = mpi::world_rank();
    const mpi::Watchdog bound(comm::bounded(state_->timeout) + turn_of(rank),
                              waited_in("MPI_Finalize", std::to_string(rank), state_->timeout,
                                        ": all ranks were about to call it, and one has stopped since"));
    MPI_Finalize();
  } catch (const std::exception& error) {
    abort(error.what());
  }
}

int MpiSession::world_rank() const {
  return mpi::world_rank();
}

int MpiSession::world_size() const {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

void MpiSession::abort(std::string_view reason) noexcept {
  if (!mpi::session_alarm()) {  // given up already, on the way to MPI_Finalize
    std::fprintf(stderr, "helix: a world rank failed: %.*s\n", static_cast<int>(reason.size()),
                 reason.data());
    std::_Exit(EXIT_FAILURE);
  }
  mpi::session_alarm()->raise(reason);
  // Another thread raised the alarm first and is about to end the process.
  std::this_thread::sleep_for(std::chrono::seconds(5));
  std::_Exit(EXIT_FAILURE);
}

}  // namespace helix::cpu
