// SPDX-License-Identifier: Apache-2.0
// Calls of MPI with checks and deadlines.
#include "cpu/mpi_calls.hpp"

#include <array>
#include <cstddef>

#include <helix/error.hpp>

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

MPI_Comm duplicate(MPI_Comm comm, milliseconds timeout) {
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Comm_idup(comm, &copy, &request), "MPI_Comm_idup");
  const bool is_done = poll_until(Clock::now() + timeout, [&] {
    int flag = 0;
    check(MPI_Test(&request, &flag, MPI_STATUS_IGNORE), "MPI_Test");
    return flag != 0;
  });
  HELIX_EXPECTS(is_done, ErrorCode::timeout, "MpiComm: some rank of the communicator did not arrive within ",
                comm::seconds(timeout), " s; all of its ranks must construct one");
  check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

}  // namespace helix::cpu::mpi
