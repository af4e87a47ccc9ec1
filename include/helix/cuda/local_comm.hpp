// SPDX-License-Identifier: Apache-2.0
// cuda::LocalComm: collectives of several ranks on one GPU, each rank a thread of one process.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <helix/cuda/runtime.hpp>
#include <helix/dtype.hpp>

namespace helix::comm {
struct Group;
}

namespace helix::cuda {

/// One rank's end of a group of threads that share a device. Models helix::Communicator on device memory. The
/// ranks meet on the host at each collective, which the last to arrive then queues for all: one kernel that
/// waits for every rank's stream and that every stream waits for. A call returns when that is queued and
/// never waits for the device. Waits for other ranks are bounded, as those of cpu::LocalComm: a rank that
/// does not arrive within the timeout gives Error(timeout) that names it and aborts the group, and calls that
/// differ between ranks give Error(invalid_argument) on all of them.
///
/// Two ranks that each send to the other and then receive wait for each other, as with NCCL outside of a
/// group: let one receive first.
///
/// Capturable where the streams of all ranks belong to one capture: only events and kernels are queued, no
/// memory is allocated. The group's first collective with more than one rank creates an event.
class HELIX_API LocalComm {
 public:
  using Stream = cuda::Stream;

  /// All ranks of a new group, by rank. Needs no device yet: the streams' is taken, which must be one.
  /// @throws Error(invalid_argument) unless size is 1..64 and the timeout positive.
  static std::vector<LocalComm> create_group(int size,
                                             std::chrono::milliseconds timeout = std::chrono::seconds(60));

  int rank() const;
  int size() const;

  /// Sum of `count` elements of f32, f16 or bf16, accumulated in f32 in rank order, the same bits on all
  /// ranks. `in` may equal `out`. Aligned to an element.
  void all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  /// in [size, count] elements -> out [count], this rank's slice of the sum; may be its own slice of `in`.
  void reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  /// in [bytes] -> out [size, bytes]. `in` may be this rank's slice of `out`.
  void all_gather(const void* in, void* out, std::int64_t bytes, Stream stream);
  /// in [size, bytes] -> out [size, bytes].
  void all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream);
  /// Packed unequal counts in bytes, one a peer, in host memory; read before the call returns.
  void all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                    std::span<const std::int64_t> recv_bytes, Stream stream);
  void broadcast(void* buffer, std::int64_t bytes, int root, Stream stream);
  void send(const void* buffer, std::int64_t bytes, int peer, Stream stream);
  void recv(void* buffer, std::int64_t bytes, int peer, Stream stream);
  void barrier(Stream stream);

  /// Collective, blocks the host: ranks of equal `color` form a new group, ordered by (key, old rank), which
  /// shares this one's failure state.
  LocalComm split(int color, int key);

  /// Wakes every waiting rank of all groups split from the same root with Error(peer_failed) naming this rank
  /// (of the root group) and `reason`; later calls throw it too. The first abort wins. What is queued on the
  /// device runs to its end.
  void abort(std::string_view reason) noexcept;

 private:
  LocalComm(std::shared_ptr<comm::Group> group, int rank) : group_(std::move(group)), rank_(rank) {}

  std::shared_ptr<comm::Group> group_;
  int rank_ = 0;
};

}  // namespace helix::cuda
