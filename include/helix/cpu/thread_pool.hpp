// SPDX-License-Identifier: Apache-2.0
// ThreadPool: the threads that share one rank's operation.
#pragma once

#include <cstdint>
#include <memory>

#include <helix/export.hpp>

namespace helix::cpu {

/// A fixed set of worker threads for fork-join loops inside one operation. Several streams may call it at
/// once. A worker that finds itself on its caller's core moves to another one that the pool's creator could
/// use, and stays off that core: its own affinity changes, no other thread's.
class HELIX_API ThreadPool {
 public:
  /// A pool of `num_threads` threads in all, the caller of parallel_for() included: 1 creates none.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Threads that share a loop, the caller included.
  int num_threads() const;

  /// Calls `body(index, thread)` for every index in [0, count), dynamically scheduled; `thread` is below
  /// num_threads(). Returns when all are done; the caller works too. Allocates nothing. Rethrows the first
  /// exception. Results must not depend on which thread runs an index.
  template <class Body>
  void parallel_for(std::int64_t count, const Body& body) {
    run(count, &body, [](const void* erased, std::int64_t index, int thread) {
      (*static_cast<const Body*>(erased))(index, thread);
    });
  }

 private:
  using Call = void (*)(const void* body, std::int64_t index, int thread);
  void run(std::int64_t count, const void* body, Call call);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace helix::cpu
