// SPDX-License-Identifier: Apache-2.0
// MPI calls with checks and deadlines.
#include "cpu/mpi_calls.hpp"

#include <array>
#include <cstddef>
#include <numeric>

#include <helix/error.hpp>

#include "comm/rank_names.hpp"

namespace helix::cpu::mpi {

std::string message_of(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) return "MPI error " + std::to_string(code);
  return std::string(text.data(), static_cast<std::size_t>(length));
}

void check(int code, std::string_view call) {
  if (code != MPI_SUCCESS) throw Error(ErrorCode::io, call, " failed: ", message_of(code));
}

bool is_running() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

std::vector<int> ranks_in(MPI_Comm comm, MPI_Comm other) {
  int size = 0;
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::vector<int> translated(ranks.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  MPI_Group from = MPI_GROUP_NULL;
  MPI_Group to = MPI_GROUP_NULL;
  check(MPI_Comm_group(comm, &from), "MPI_Comm_group");
  check(MPI_Comm_group(other, &to), "MPI_Comm_group");
  check(MPI_Group_translate_ranks(from, size, ranks.data(), to, translated.data()),
        "MPI_Group_translate_ranks");
  MPI_Group_free(&from);
  MPI_Group_free(&to);
  return translated;
}

namespace {

constexpr int kArrivalTag = 3;

[[noreturn]] void refuse_to_wait(const std::string& who, milliseconds timeout) {
  throw Error(ErrorCode::timeout, "MpiComm: ", who, " did not arrive within ", comm::seconds(timeout),
              " s; world rank ", world_rank(), " waited: all ranks of a communicator must construct one");
}

/// Tells the ranks of `comm`, over `herald`, that this rank has come; waits until all have.
void expect_all(MPI_Comm comm, MPI_Comm herald, milliseconds timeout) {
  const std::vector<int> peers = ranks_in(comm, herald);
  const std::vector<int> names = ranks_in(comm, MPI_COMM_WORLD);
  std::vector<MPI_Request> arrivals(peers.size(), MPI_REQUEST_NULL);
  for (std::size_t i = 0; i < peers.size(); ++i)
    check(MPI_Irecv(nullptr, 0, MPI_BYTE, peers[i], kArrivalTag, herald, &arrivals[i]), "MPI_Irecv");
  for (const int peer : peers) {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Isend(nullptr, 0, MPI_BYTE, peer, kArrivalTag, herald, &request), "MPI_Isend");
    check(MPI_Request_free(&request), "MPI_Request_free");
  }
  const auto all_are_here = [&] {
    int flag = 0;
    check(MPI_Testall(static_cast<int>(arrivals.size()), arrivals.data(), &flag, MPI_STATUSES_IGNORE),
          "MPI_Testall");
    return flag != 0;
  };
  if (poll_until(comm::deadline_after(timeout), all_are_here)) return;
  std::vector<int> missing;
  for (std::size_t i = 0; i < peers.size(); ++i) {
    int is_here = 0;
    check(MPI_Request_get_status(arrivals[i], &is_here, MPI_STATUS_IGNORE), "MPI_Request_get_status");
    if (is_here != 0) continue;
    missing.push_back(names[i]);
    MPI_Cancel(&arrivals[i]);
    MPI_Request_free(&arrivals[i]);
  }
  if (!missing.empty()) refuse_to_wait("world " + comm::rank_names(missing), timeout);
}

}  // namespace

MPI_Comm duplicate(MPI_Comm comm, MPI_Comm herald, milliseconds timeout) {
  if (herald != MPI_COMM_NULL) expect_all(comm, herald, timeout);
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Comm_idup(comm, &copy, &request), "MPI_Comm_idup");
  const bool is_done = poll_until(comm::deadline_after(timeout), [&] {
    int flag = 0;
    check(MPI_Test(&request, &flag, MPI_STATUS_IGNORE), "MPI_Test");
    return flag != 0;
  });
  if (!is_done) refuse_to_wait("one of world " + comm::rank_names(ranks_in(comm, MPI_COMM_WORLD)), timeout);
  check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

}  // namespace helix::cpu::mpi
