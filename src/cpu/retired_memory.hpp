// SPDX-License-Identifier: Apache-2.0
// Memory outlives the queued work that may touch it: what a Buffer gives back is freed once every queue of
// the process is past the point where it was given back.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace helix::cpu {

/// Pages of a Buffer. Knows its successor so that giving back allocates nothing.
struct Pages {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  Pages* next = nullptr;
};

/// How far a queue is, in tasks. Registered as long as it lives.
class QueueProgress {
 public:
  QueueProgress();
  ~QueueProgress();
  QueueProgress(const QueueProgress&) = delete;
  QueueProgress& operator=(const QueueProgress&) = delete;

  std::atomic<std::uint64_t> published = 0;  ///< Tasks enqueued.
  std::atomic<std::uint64_t> completed = 0;  ///< Tasks run or dropped.

 private:
  friend class RetiredMemory;
  // Guarded by the mutex of RetiredMemory.
  std::uint64_t target_ = 0;  // tasks to be completed before the current batch is freed
  QueueProgress* previous_ = nullptr;
  QueueProgress* next_ = nullptr;
};

/// Takes `pages` to free them when no task enqueued so far, on any queue, is left. Frees at once if there is
/// none. Waits for nothing and allocates nothing; any thread.
void retire(Pages* pages) noexcept;

/// Frees what no task is left for. For queues, after each task; two loads if nothing is retired.
void free_retired() noexcept;

}  // namespace helix::cpu
