// SPDX-License-Identifier: Apache-2.0
// MpiComm: a Communicator over MPI, one process a rank. Optional: link helix::mpi.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1  // the C interface is enough
#endif
#include <mpi.h>

#include <helix/cpu/stream.hpp>
#include <helix/dtype.hpp>

namespace helix::cpu {

/// Starts MPI for an application that does not do so itself, and ends it. The library never starts MPI on its
/// own. Create the session first in main(), outside of the try block: it must outlive every MpiComm.
class HELIX_API MpiSession {
 public:
  /// Calls MPI_Init_thread for MPI_THREAD_MULTIPLE and waits for all ranks. The call cannot be left: if a
  /// rank does not come within `timeout`, this process prints a line on stderr that names the waiting rank,
  /// and ends; the launcher then ends the others. Starts a thread for the life of the session.
  /// @throws Error(unsupported) if the MPI library provides less, Error(timeout) naming a rank that stops
  /// right after.
  MpiSession(int* argc, char*** argv, std::chrono::milliseconds timeout = std::chrono::seconds(60));
  /// Calls MPI_Finalize, which waits for all ranks for as long as they are busy. If a rank gives no sign of
  /// life for the timeout, the job is aborted, and the message names the rank. If the session
  /// is destroyed because an exception leaves its scope, the job is aborted instead: the other ranks may
  /// never come.
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  int world_rank() const;
  int world_size() const;

  /// Ends the whole job as MpiComm::abort does, and does not return.
  [[noreturn]] void abort(std::string_view reason) noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A rank's handle to a group of processes. Models comm::CollectiveComm on host memory, where the operations
/// are documented. In addition:
///
/// - Sums are in f32 and in rank order. MPI_Allreduce, which chooses its own order, is not used.
/// - A message of another size than expected gives Error(invalid_argument).
/// - Error messages name ranks by their numbers in MPI_COMM_WORLD.
/// - After an error the group is over: later calls fail with the same error, and buffers of the failed
///   operation may still be written to. End the job with abort().
/// - Handles must be gone before MPI_Finalize.
class HELIX_API MpiComm {
 public:
  using Stream = cpu::Stream;

  /// Duplicates `comm`, so that messages never mix; `comm` stays the caller's. Collective over `comm`.
  /// @throws Error(unsupported) unless MPI runs with MPI_THREAD_MULTIPLE: streams communicate from threads of
  /// their own.
  explicit MpiComm(MPI_Comm comm, std::chrono::milliseconds timeout = std::chrono::seconds(60));
  // With copies declared there are no moves, which would leave a handle to nothing.
  MpiComm(const MpiComm&) = default;
  MpiComm& operator=(const MpiComm&) = default;

  int rank() const;
  int size() const;

  // The operations of comm::CollectiveComm.
  void all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  void reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  void all_gather(const void* in, void* out, std::int64_t bytes, Stream stream);
  void all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream);
  void all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                    std::span<const std::int64_t> recv_bytes, Stream stream);
  void broadcast(void* buffer, std::int64_t bytes, int root, Stream stream);
  /// Sends one message; a small one may leave before the peer receives it.
  void send(const void* buffer, std::int64_t bytes, int peer, Stream stream);
  void recv(void* buffer, std::int64_t bytes, int peer, Stream stream);
  void barrier(Stream stream);
  MpiComm split(int color, int key);

  /// Ends the whole job: prints one line with this world rank and `reason` on stderr, and calls MPI_Abort,
  /// which ends every rank with a non-zero exit. If several ranks abort at once, the lowest prints. Never
  /// throws.
  void abort(std::string_view reason) noexcept;
  /// Makes abort() call `last_words(reason)` once before this process ends, for what a program must tell
  /// others than its ranks. It runs on the thread that aborts, which may be a stream's, and must return
  /// within a second. There is one for this communicator and all that are split from it; with an MpiSession,
  /// one for the whole process. It replaces the previous one, which no longer runs once this returns. Empty:
  /// none.
  void before_abort(std::function<void(std::string_view)> last_words);

 private:
  struct Group;
  explicit MpiComm(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  std::shared_ptr<Group> group_;
};

}  // namespace helix::cpu
