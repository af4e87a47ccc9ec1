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

/// A rank's handle to a group of threads of this process. Models comm::CollectiveComm on host memory, where
/// the operations are documented. In addition, sums are in f32 and in rank order. A rank that does not arrive
/// within the timeout gives Error(timeout), which names the rank and the operation, and aborts the group.
/// Calls that differ between ranks give Error(invalid_argument) with both calls on all of them.
class HELIX_API LocalComm {
 public:
  using Stream = cpu::Stream;

  /// Makes a group and returns one handle a rank, in rank order.
  /// @throws Error(invalid_argument) unless size is in [1, kMaxRanks] and the timeout is positive.
  static std::vector<LocalComm> create_group(int size,
                                             std::chrono::milliseconds timeout = std::chrono::seconds(60));
  // With copies declared there are no moves, which would leave a handle to nothing.
  LocalComm(const LocalComm&) = default;
  LocalComm& operator=(const LocalComm&) = default;

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
  void send(const void* buffer, std::int64_t bytes, int peer, Stream stream);
  void recv(void* buffer, std::int64_t bytes, int peer, Stream stream);
  void barrier(Stream stream);
  LocalComm split(int color, int key);
  void abort(std::string_view reason) noexcept;

 private:
  LocalComm(std::shared_ptr<comm::Group> group, int rank);

  std::shared_ptr<comm::Group> group_;
  int rank_ = 0;
};

}  // namespace helix::cpu
