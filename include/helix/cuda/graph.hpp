// SPDX-License-Identifier: Apache-2.0
// cuda::Graph: a step captured once and replayed with one launch.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include <helix/cuda/runtime.hpp>

struct CUgraphExec_st;

namespace helix::cuda {

/// Work captured from a stream (and from streams that joined it through events), ready to be launched.
/// Addresses and shapes are those of the capture; everything else is read from device memory at each replay
/// (invariant 10). Destroy a graph before the last handle to the communicators that it uses: NCCL frees an
/// aborted one only then.
class HELIX_API Graph {
 public:
  /// An empty graph, only to assign to.
  Graph() = default;

  /// Captures what `queue()` queues on `stream`. @throws what queue() throws, after ending the capture.
  template <class Queue>
  [[nodiscard]] static Graph capture(Stream stream, Queue&& queue) {
    begin(stream);
    try {
      std::forward<Queue>(queue)();
    } catch (...) {
      abandon(stream);
      throw;
    }
    return end(stream);
  }

  bool empty() const { return exec_ == nullptr; }
  std::size_t num_nodes() const { return num_nodes_; }

  /// Queues the whole step on `stream` with one launch. @throws Error(invalid_argument) if the graph is
  /// empty.
  void replay(Stream stream) const;

 private:
  struct Destroy {
    void operator()(CUgraphExec_st* exec) const noexcept;
  };
  static void begin(Stream stream);
  static Graph end(Stream stream);
  static void abandon(Stream stream) noexcept;

  std::unique_ptr<CUgraphExec_st, Destroy> exec_;
  std::size_t num_nodes_ = 0;
  int device_ = 0;  // of the captured stream
};

}  // namespace helix::cuda
