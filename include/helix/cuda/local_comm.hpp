// SPDX-License-Identifier: Apache-2.0
// cuda::LocalComm: collectives of several ranks on one GPU, each rank a thread of one process.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <helix/backend.hpp>
#include <helix/cuda/runtime.hpp>

namespace helix::cuda {

/// One rank's end of a group of threads that share a device. The ranks meet on the host at each collective,
/// which one of them then queues for all: a kernel that waits for every rank's stream and that every stream
/// waits for. Bounded waits, as cpu::LocalComm; a rank that never arrives is an Error(timeout) naming it, and
/// aborts the group.
///
/// Capturable: when every rank's stream is being captured into one graph, see graph.hpp.
class LocalComm {
 public:
  using Stream = cuda::Stream;

  /// All ranks of a new group, by rank.
  static std::vector<LocalComm> create_group(int size,
                                             std::chrono::milliseconds timeout = std::chrono::seconds(60));

  int rank() const;
  int size() const;

  void all_reduce(const void* in, void* out, std::int64_t n, DType dtype, Stream stream);
  void reduce_scatter(const void* in, void* out, std::int64_t n, DType dtype, Stream stream);
  void all_gather(const void* in, void* out, std::int64_t n, Stream stream);
  void all_to_all(const void* in, void* out, std::int64_t n, Stream stream);
  void all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                    std::span<const std::int64_t> recv_bytes, Stream stream);
  void broadcast(void* out, std::int64_t n, int root, Stream stream);
  void send(const void* in, std::int64_t n, int peer, Stream stream);
  void recv(void* out, std::int64_t n, int peer, Stream stream);
  void barrier(Stream stream);
  LocalComm split(int color, int key);
  void abort(std::string_view reason);

 private:
  struct State;
  explicit LocalComm(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace helix::cuda
