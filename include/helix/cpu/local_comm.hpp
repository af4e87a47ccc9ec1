// SPDX-License-Identifier: Apache-2.0
// LocalComm: a Communicator over threads of one process.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <helix/cpu/stream.hpp>
#include <helix/dtype.hpp>

namespace helix::comm {
struct Group;
}

namespace helix::cpu {

/// A rank's handle to a group of threads of this process. Models helix::Communicator. Every wait is bounded:
/// a rank that does not arrive within the timeout gives Error(timeout) that names the missing ranks and the
/// operation, and aborts the group. Sizes that differ between ranks give Error(invalid_argument) on all of
/// them.
class HELIX_API LocalComm {
 public:
  using Stream = cpu::Stream;

  /// One handle a rank, in rank order. @throws Error(invalid_argument) unless size >= 1.
  static std::vector<LocalComm> create_group(int size,
                                             std::chrono::milliseconds timeout = std::chrono::seconds(60));

  int rank() const;
  int size() const;

  /// Sum of `count` elements of f32 (f16 and bf16 accumulate in f32), in rank order, the same bits on all
  /// ranks. `in` may equal `out`.
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
  void send(const void* buffer, std::int64_t bytes, int peer, Stream stream);
  void recv(void* buffer, std::int64_t bytes, int peer, Stream stream);
  void barrier(Stream stream);

  /// Collective, blocks the host: ranks of equal `color` form a new group, ordered by (key, old rank). The
  /// new group shares the failure state of this one: an abort of either wakes both.
  LocalComm split(int color, int key);

  /// Wakes every waiting rank of the group, of its parent and of all groups split from the same root, with
  /// Error(peer_failed) naming this rank (of the root group) and `reason`. Idempotent: the first abort wins.
  /// Never throws.
  void abort(std::string_view reason) noexcept;

 private:
  explicit LocalComm(std::shared_ptr<comm::Group> group, int rank);

  std::shared_ptr<comm::Group> group_;
  int rank_ = 0;
};

}  // namespace helix::cpu
