// SPDX-License-Identifier: Apache-2.0
// The state of a MpiComm: collectives as nonblocking messages between pairs, polled up to a deadline.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <helix/cpu/mpi_comm.hpp>
#include <helix/dtype.hpp>
#include <helix/error.hpp>

#include "comm/operation.hpp"
#include "cpu/mpi_alarm.hpp"

namespace helix::cpu {

using comm::Clock;
using comm::milliseconds;

namespace mpi {

/// The messages that one thread has posted and not yet waited for. Kept per thread, so that operations do not
/// allocate each time.
struct Posted {
  struct Message {
    int peer;
    bool is_recv;
    std::int64_t begin;  // where in its transfer the message begins
    std::int64_t bytes;
    std::int64_t transfer_bytes;
  };
  std::vector<MPI_Request> requests;
  std::vector<Message> messages;  // what each request belongs to
  std::vector<MPI_Status> statuses;

  void clear() {
    requests.clear();
    messages.clear();
  }
};

/// The messages of the calling thread.
extern thread_local Posted posted;

}  // namespace mpi

struct MpiComm::Group {
  using Operation = comm::Operation;

  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  std::vector<int> world_ranks;  // by rank, for error messages
  milliseconds timeout{0};
  std::shared_ptr<mpi::Alarm> alarm;

  std::mutex in_use;               // held by the running collective
  std::vector<std::byte> scratch;  // other ranks' terms of a sum; grows to the largest

  std::mutex failure_mutex;
  std::atomic<bool> has_failed = false;
  ErrorCode failure_code = ErrorCode::internal;
  std::string failure;

  /// Takes ownership of `own`.
  Group(MPI_Comm own, milliseconds limit, std::shared_ptr<mpi::Alarm> shared_alarm);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group();

  int name(int peer) const { return world_ranks[static_cast<std::size_t>(peer)]; }

  void check_alive();

  /// Runs `body`. The first failure is rethrown by all later calls.
  template <class Body>
  void run(Body&& body) {
    check_alive();
    mpi::posted.clear();
    try {
      body();
    } catch (const Error& error) {
      const std::lock_guard lock(failure_mutex);
      if (!has_failed) {
        failure_code = error.code();
        failure = error.what();
        has_failed.store(true, std::memory_order_release);
      }
      throw;
    }
  }

  /// As run(), for collectives, of which only one may run at a time.
  template <class Body>
  void run_collective(Operation operation, Body&& body) {
    run([&] {
      const std::unique_lock lock(in_use, std::try_to_lock);
      HELIX_EXPECTS(lock.owns_lock(), ErrorCode::invalid_argument, to_string(operation), ": world rank ",
                    name(rank),
                    " called it while another collective of the group was running; use one stream for each "
                    "communicator, or order the streams by events");
      body();
    });
  }

  void post_send(const void* buffer, std::int64_t bytes, int peer, Operation operation);
  void post_recv(void* buffer, std::int64_t bytes, int peer, Operation operation);
  /// Waits for all that this thread posted.
  void wait(Operation operation);
  /// @throws the error that MPI reports for a completed message.
  void check_message(Operation operation, const mpi::Posted::Message& message, const MPI_Status& status,
                     int code) const;

  /// The world ranks whose messages for this thread have not arrived; ascending, without duplicates.
  std::vector<int> late_peers() const;
  /// Tests whether all messages of this thread are complete; sets `result` to MPI's.
  static bool test_all(int& result);
  /// Checks the pieces of unfinished transfers that have arrived. One that is too short ended its transfer,
  /// so the pieces expected after it never come. @throws Error(invalid_argument) for it.
  void check_pieces(Operation operation) const;
  /// Cancels and frees this thread's messages that are not complete.
  static void drop_requests();
  /// Drops the thread's messages and throws an error that names the late ranks.
  [[noreturn]] void give_up(Operation operation, const std::vector<int>& late) const;

  std::byte* scratch_of(std::int64_t bytes);

  /// Sends send_bytes(r) from send(r) to each rank r, and receives recv_bytes(r) from it to recv(r). The two
  /// are equal for this rank itself.
  template <class Send, class SendBytes, class Recv, class RecvBytes>
  void exchange(Operation operation, Send&& send, SendBytes&& send_bytes, Recv&& recv,
                RecvBytes&& recv_bytes) {
    for (int step = 1; step < size; ++step) {
      const int from = (rank + size - step) % size;
      post_recv(recv(from), recv_bytes(from), from, operation);
    }
    for (int step = 1; step < size; ++step) {
      const int to = (rank + step) % size;
      post_send(send(to), send_bytes(to), to, operation);
    }
    // A rank's own slice may already be in place.
    if (send_bytes(rank) > 0 && send(rank) != recv(rank)) {
      std::memcpy(recv(rank), send(rank), static_cast<std::size_t>(send_bytes(rank)));
    }
    wait(operation);
  }

  void all_gather(Operation operation, const void* in, void* out, std::int64_t bytes);

  /// out[i] = sum over r of terms[r][i], in rank order; terms [size, count].
  void sum(const std::byte* terms, void* out, std::int64_t count, DType dtype) const;

  /// Sends elements [begin(r), begin(r + 1)) of each rank's `in` to rank r, which sums them into `out`.
  template <class Begin>
  void reduce_slices(Operation operation, const void* in, void* out, DType dtype, Begin&& begin) {
    const auto width = static_cast<std::int64_t>(size_bytes(dtype));
    const std::int64_t own_count = begin(rank + 1) - begin(rank);
    const std::int64_t own_bytes = own_count * width;
    std::byte* terms = scratch_of(size * own_bytes);
    exchange(
        operation, [&](int r) { return static_cast<const std::byte*>(in) + begin(r) * width; },
        [&](int r) { return (begin(r + 1) - begin(r)) * width; },
        [&](int r) { return terms + r * own_bytes; }, [&](int) { return own_bytes; });
    sum(terms, out, own_count, dtype);
  }

  /// Sums slices, then gathers them. Exchanging whole vectors in one round was tried for short sums: within
  /// the noise at 2 and 4 ranks, up to twice as slow at 8.
  void all_reduce(const void* in, void* out, std::int64_t count, DType dtype);
};

}  // namespace helix::cpu
