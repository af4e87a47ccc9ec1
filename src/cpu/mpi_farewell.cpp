// SPDX-License-Identifier: Apache-2.0
// Sends and receives farewells and signs of life.
#include "cpu/mpi_farewell.hpp"

#include <thread>
#include <vector>

#include <helix/error.hpp>

#include "comm/rank_names.hpp"

namespace helix::cpu::mpi {
namespace {

constexpr int kFarewellTag = 2;
constexpr milliseconds kPeriod{200};
// Static, because a message may be sent after the function that posted it has returned.
constexpr char kFarewell = 'f';
constexpr char kSignOfLife = 'l';

}  // namespace

Farewell::Farewell(MPI_Comm comm)
    : comm_(comm),
      thread_(comm::start_thread("the thread that answers ranks which wait for this one to end MPI",
                                 [this] { answer(); })) {}

Farewell::~Farewell() {
  stop();
}

void Farewell::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

template <class Heard>
void Farewell::receive(Heard&& heard) {
  for (;;) {
    int is_there = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, kFarewellTag, comm_, &is_there, &status) != MPI_SUCCESS || is_there == 0)
      return;
    char kind = 0;
    if (MPI_Recv(&kind, 1, MPI_CHAR, status.MPI_SOURCE, kFarewellTag, comm_, MPI_STATUS_IGNORE) !=
        MPI_SUCCESS)
      return;
    if (kind == kFarewell) gone_.insert(status.MPI_SOURCE);
    heard(status.MPI_SOURCE);
  }
}

void Farewell::send(const char& kind, int peer) const {
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Isend(&kind, 1, MPI_CHAR, peer, kFarewellTag, comm_, &request) == MPI_SUCCESS)
    MPI_Request_free(&request);
}

void Farewell::answer() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kPeriod, [this] { return is_stopping_; })) {
    if (!is_running()) return;
    receive([](int) {});
    for (const int peer : gone_) send(kSignOfLife, peer);
  }
}

void Farewell::exchange(milliseconds timeout) {
  stop();
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(comm_, &rank);
  MPI_Comm_size(comm_, &size);
  gone_.insert(rank);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) send(kFarewell, peer);
  }
  const auto fresh = [&] { return comm::Patience(comm::deadline_after(timeout)); };
  std::vector<comm::Patience> patience(static_cast<std::size_t>(size), fresh());  // with each rank
  while (static_cast<int>(gone_.size()) < size) {
    receive([&](int peer) { patience[static_cast<std::size_t>(peer)] = fresh(); });
    std::vector<int> silent;
    for (int peer = 0; peer < size; ++peer) {
      if (!gone_.contains(peer) && patience[static_cast<std::size_t>(peer)].is_over()) silent.push_back(peer);
    }
    HELIX_EXPECTS(silent.empty(), ErrorCode::timeout, "world ", comm::rank_names(silent),
                  " gave no sign of life for ", comm::seconds(timeout), " s while world rank ", world_rank(),
                  " waited to end MPI");
    std::this_thread::sleep_for(milliseconds(2));
  }
}

}  // namespace helix::cpu::mpi
