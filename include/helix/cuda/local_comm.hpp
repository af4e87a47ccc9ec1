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

/// A rank's handle to a group of threads that share a device. Models comm::CollectiveComm on device memory,
/// where the operations are documented. In addition:
///
/// - The ranks meet on the host at each collective, and the last to arrive queues it for all. That is one
///   kernel, or several if more than 11 ranks gather or exchange. It waits for every rank's stream, and every
///   stream waits for it. A call returns once this is queued and never waits for the device.
/// - Sums are in f32 and in rank order. Buffers of a reduction must be aligned to an element.
/// - A rank that does not arrive within the timeout gives Error(timeout), which names the rank and aborts the
///   group. Calls that differ between ranks give Error(invalid_argument) with both calls on all of them.
/// - What is queued on the device when a rank aborts runs to its end.
///
/// Two ranks that each send to the other and then receive wait for each other, as with NCCL outside of a
/// group: let one receive first.
///
/// Capturable if the streams of all ranks belong to one capture: only events and kernels are queued, no
/// memory is allocated. The group's first collective with more than one rank creates an event.
class HELIX_API LocalComm {
 public:
  using Stream = cuda::Stream;

  /// Makes a group and returns one handle a rank, in rank order. Needs no device yet: the group takes that of
  /// the streams, which must all be of one device.
  /// @throws Error(invalid_argument) unless size is 1..64 and the timeout is positive.
  static std::vector<LocalComm> create_group(int size,
                                             std::chrono::milliseconds timeout = std::chrono::seconds(60));
  // With copies declared there are no moves, which would leave a handle to nothing.
  LocalComm(const LocalComm&) = default;
  LocalComm& operator=(const LocalComm&) = default;

  int rank() const;
  int size() const;

  // The operations of comm::CollectiveComm.
  void all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  /// reduce_scatter() of comm::CollectiveComm; `out` may be this rank's own slice of `in`.
  void reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream);
  void all_gather(const void* in, void* out, std::int64_t bytes, Stream stream);
  void all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream);
  void all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                    std::span<const std::int64_t> recv_bytes, Stream stream);
  void broadcast(void* buffer, std::int64_t bytes, int root, Stream stream);
  void send(const void* buffer, std::int64_t bytes, int peer, Stream stream);
  void recv(void* buffer, std::int64_t bytes, int peer, Stream stream);
  void barrier(Stream stream);
  LocalComm split(int color, int key);
  void abort(std::string_view reason) noexcept;

 private:
  LocalComm(std::shared_ptr<comm::Group> group, int rank) : group_(std::move(group)), rank_(rank) {}

  std::shared_ptr<comm::Group> group_;
  int rank_ = 0;
};

}  // namespace helix::cuda
