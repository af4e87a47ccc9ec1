// SPDX-License-Identifier: Apache-2.0
// Keeps memory alive for queued work that may use it: what a Buffer gives back is freed once every queue of
// the process has passed the point at which it was given back.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace helix::cpu {

/// The pages of a Buffer. Includes the list link, so that giving back allocates nothing.
struct Pages {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  Pages* next = nullptr;
};

/// A queue's progress, in tasks. Registered while it lives.
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
  std::uint64_t target_ = 0;  // tasks to complete before the current batch is freed
  QueueProgress* previous_ = nullptr;
  QueueProgress* next_ = nullptr;
};

/// Takes `pages` and frees them once all tasks enqueued so far, on any queue, are done; at once if there are
/// none. Waits for nothing and allocates nothing; may be called by any thread.
void retire(Pages* pages) noexcept;

/// Frees pages that no task can use any more. For queues, after each task; two loads if nothing is retired.
void free_retired() noexcept;

}  // namespace helix::cpu
