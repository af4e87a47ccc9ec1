// SPDX-License-Identifier: Apache-2.0
// One rank of an MPI job in which rank 2 stops at the place given by the first argument, or all stop for a
// while. The second argument is the timeout in ms.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>

#include <sys/types.h>
#include <unistd.h>

#include <helix/cpu/mpi_comm.hpp>
#include <helix/error.hpp>

using namespace std::chrono_literals;
using helix::cpu::MpiComm;
using helix::cpu::MpiSession;

namespace {

std::string way;
bool is_culprit = false;

void stop_in(const char* place) {
  if (is_culprit && way == place) (void)std::raise(SIGSTOP);
}

/// Starts a process that stops this one for 3/2 of the timeout once close() is called on the result.
int start_suspender(std::chrono::milliseconds timeout) {
  int ends[2];
  if (pipe(ends) != 0) return -1;
  const pid_t rank = getpid();
  if (fork() == 0) {
    close(ends[1]);
    char byte = 0;
    (void)!read(ends[0], &byte, 1);
    std::this_thread::sleep_for(timeout / 4);
    (void)kill(rank, SIGSTOP);
    std::this_thread::sleep_for(timeout * 3 / 2);
    (void)kill(rank, SIGCONT);
    std::_Exit(0);
  }
  close(ends[0]);
  return ends[1];
}

}  // namespace

// Called instead of the library's function, as MPI's profiling interface allows.
extern "C" int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  stop_in("init");
  return PMPI_Init_thread(argc, argv, required, provided);
}
extern "C" int MPI_Comm_idup(MPI_Comm comm, MPI_Comm* copy, MPI_Request* request) {
  stop_in("duplicate");
  return PMPI_Comm_idup(comm, copy, request);
}
extern "C" int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm* part) {
  stop_in("split");
  return PMPI_Comm_split(comm, color, key, part);
}
extern "C" int MPI_Finalize() {
  stop_in("finalize");
  return PMPI_Finalize();
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  way = argv[1];
  const std::chrono::milliseconds timeout(std::atoi(argv[2]));
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  is_culprit = rank != nullptr && std::string(rank) == "2";
  const int suspender = way == "suspended" ? start_suspender(timeout) : -1;  // before MPI has threads
  std::optional<MpiSession> session;
  try {
    session.emplace(nullptr, nullptr, timeout);
  } catch (const helix::Error& error) {
    std::fprintf(stderr, "rank %s: %s\n", rank, error.what());
    return EXIT_FAILURE;
  }
  try {
    if (way == "absent" && is_culprit) std::this_thread::sleep_for(20s);
    MpiComm world(MPI_COMM_WORLD, timeout);
    MpiComm half = world.split(world.rank() % 2, world.rank());
    MpiComm::Stream stream;
    half.barrier(stream);
    stream.synchronize();
  } catch (const helix::Error& error) {
    session->abort(error.what());
  }
  stop_in("busy");
  if (suspender >= 0) close(suspender);
  if (way == "suspended" && is_culprit) std::this_thread::sleep_for(timeout * 2);
  if (way == "late" && is_culprit) std::this_thread::sleep_for(3 * timeout);  // busy, but alive
  return EXIT_SUCCESS;
}
