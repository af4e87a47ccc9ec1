// SPDX-License-Identifier: Apache-2.0
// MpiComm: a Communicator over MPI, one process a rank. Optional: link helix::mpi.
#pragma once

#include <chrono>
#include <cstdint>
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
/// own. Create it first in main(), outside of the try block: it must outlive every MpiComm.
class HELIX_API MpiSession {
 public:
  /// Calls MPI_Init_thread for MPI_THREAD_MULTIPLE. @throws Error(unsupported) if the MPI library provides
  /// less.
  MpiSession(int* argc, char*** argv);
  /// Calls MPI_Finalize, which waits for all ranks. Left by an exception, it aborts the job instead: the
  /// other ranks may never come.
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  int world_rank() const;
  int world_size() const;

  /// As MpiComm::abort, but does not return.
  [[noreturn]] void abort(std::string_view reason) noexcept;

 private:
  int exceptions_ = 0;  // in flight when the session began
};

/// A rank's handle to a group of processes. Models helix::Communicator on host memory. Every wait is bounded:
/// a rank that does not answer within the timeout gives Error(timeout) that names it and the operation. A
/// message of another size than expected gives Error(invalid_argument). After an error the group is over,
/// later calls fail with the same error, and buffers of the failed operation may still be written to: end the
/// job with abort(). Handles must be gone before MPI_Finalize. One stream at a time uses a group; split()
/// gives other streams groups of their own.
class HELIX_API MpiComm {
 public:
  using Stream = cpu::Stream;

  /// Collective over `comm`, which stays the caller's and is duplicated, so that messages never mix.
  /// @throws Error(unsupported) unless MPI runs with MPI_THREAD_MULTIPLE: streams communicate from threads of
  /// their own.
  explicit MpiComm(MPI_Comm comm, std::chrono::milliseconds timeout = std::chrono::seconds(60));

  int rank() const;
  int size() const;

  /// Sum of `count` elements of f32 (f16 and bf16 accumulate in f32), in rank order, the same bits on all
  /// ranks. `in` may equal `out`. Not MPI_Allreduce, whose order of summation is its own affair.
  void all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  /// in [size, count] elements -> out [count], this rank's slice of the sum.
  void reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  /// in [bytes] -> out [size, bytes]. `in` may be this rank's slice of `out`.
  void all_gather(const void* in, void* out, std::int64_t bytes, Stream stream);
  /// in [size, bytes] -> out [size, bytes].
  void all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream);
  /// Packed unequal counts in bytes, one a peer. The counts are read before the call returns.
  void all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                    std::span<const std::int64_t> recv_bytes, Stream stream);
  void broadcast(void* buffer, std::int64_t bytes, int root, Stream stream);
  /// Small messages may leave before the peer receives them.
  void send(const void* buffer, std::int64_t bytes, int peer, Stream stream);
  void recv(void* buffer, std::int64_t bytes, int peer, Stream stream);
  void barrier(Stream stream);

  /// Collective, blocks the host: ranks of equal `color` form a new group, ordered by (key, old rank).
  MpiComm split(int color, int key);

  /// Ends the whole job: prints one line with this world rank and `reason` on stderr, and calls MPI_Abort,
  /// which ends every rank with a non-zero exit. If several ranks abort at once, the lowest prints. Never
  /// throws.
  void abort(std::string_view reason) noexcept;

 private:
  struct Group;
  explicit MpiComm(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  std::shared_ptr<Group> group_;
};

}  // namespace helix::cpu
