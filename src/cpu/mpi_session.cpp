// SPDX-License-Identifier: Apache-2.0
// MpiSession, and the alarm by which ranks end a job.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

#include <helix/cpu/mpi_comm.hpp>
#include <helix/error.hpp>

#include "cpu/mpi_alarm.hpp"

namespace helix::cpu {
namespace mpi {
namespace {

constexpr int kAlarmTag = 1;

}  // namespace

Alarm::~Alarm() {
  if (comm != MPI_COMM_NULL && is_running()) MPI_Comm_free(&comm);
}

void Alarm::raise(std::string_view reason) noexcept {
  static std::atomic<bool> is_raised = false;  // several groups and threads of this process
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
  std::_Exit(EXIT_FAILURE);  // MPI_Abort only promises to do its best
}

std::shared_ptr<Alarm>& session_alarm() {
  static std::shared_ptr<Alarm> alarm;
  return alarm;
}

}  // namespace mpi

MpiSession::MpiSession(int* argc, char*** argv) : exceptions_(std::uncaught_exceptions()) {
  int provided = MPI_THREAD_SINGLE;
  mpi::check(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  if (provided < MPI_THREAD_MULTIPLE) {
    MPI_Finalize();
    throw Error(ErrorCode::unsupported, "the MPI library provides thread level ", provided,
                "; MPI_THREAD_MULTIPLE (", MPI_THREAD_MULTIPLE,
                ") is needed: use a build of MPI with thread support");
  }
  auto alarm = std::make_shared<mpi::Alarm>();
  alarm->comm = mpi::duplicate(MPI_COMM_WORLD, std::chrono::seconds(60));
  mpi::session_alarm() = std::move(alarm);
}

MpiSession::~MpiSession() {
  if (!mpi::is_running()) return;
  if (std::uncaught_exceptions() > exceptions_) abort("an exception left main()");
  mpi::session_alarm().reset();
  MPI_Finalize();
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
  mpi::session_alarm()->raise(reason);
  // A stream of this process was faster and is about to end it.
  std::this_thread::sleep_for(std::chrono::seconds(5));
  std::_Exit(EXIT_FAILURE);
}

}  // namespace helix::cpu
