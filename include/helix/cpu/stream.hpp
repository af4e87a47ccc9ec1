// SPDX-License-Identifier: Apache-2.0
// Streams and events on the CPU: in-order queues with a worker thread each, so that work on them runs
// concurrently.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include <helix/export.hpp>

namespace helix::cpu {

class Event;

/// A handle to an in-order queue of work, run by one worker thread. Copies name the same queue, and several
/// threads may enqueue. The queue lives until the last copy is gone, and drains first. The first exception of
/// a task is sticky: later tasks are skipped (events still fire) and every synchronize() rethrows it.
/// Enqueuing allocates nothing; a full queue makes the caller wait.
class HELIX_API Stream {
 public:
  static constexpr std::size_t kTaskBytes = 768;  ///< Inline room for one task's captures.

  /// A new queue with a worker thread of its own.
  Stream();
  // With copies declared there are no moves, which would leave a handle to nothing.
  Stream(const Stream&) = default;
  Stream& operator=(const Stream&) = default;

  /// Runs `task()` on the worker after everything enqueued before.
  template <class Task>
  void enqueue(Task&& task) {
    using Stored = std::decay_t<Task>;
    static_assert(sizeof(Stored) <= kTaskBytes, "task captures exceed Stream::kTaskBytes");
    static_assert(alignof(Stored) <= alignof(std::max_align_t));
    void* slot = begin_enqueue();
    if constexpr (std::is_nothrow_constructible_v<Stored, Task>) {
      ::new (slot) Stored(std::forward<Task>(task));
    } else {
      try {
        ::new (slot) Stored(std::forward<Task>(task));
      } catch (...) {
        cancel_enqueue();
        throw;
      }
    }
    end_enqueue(
        [](void* stored) {
          // Run and destroy, also when it throws.
          struct Destroy {
            Stored* task;
            ~Destroy() { task->~Stored(); }
          } destroy{static_cast<Stored*>(stored)};
          (*destroy.task)();
        },
        [](void* stored) { static_cast<Stored*>(stored)->~Stored(); });
  }

  /// Waits on the host until the queue is empty. @throws the sticky failure, if any.
  void synchronize() const;

  /// The sticky failure, or null.
  std::exception_ptr failure() const;

  /// Adds a handler that is called once, on the worker, with the first failure of a task. Handlers run in the
  /// order in which they were added. Backend::create_stream() adds one that aborts its communicators.
  template <class Handler>
  void on_failure(Handler handler) {
    add_failure_handler(
        std::make_shared<Handler>(std::move(handler)),
        [](void* erased, const std::exception_ptr& failure) { (*static_cast<Handler*>(erased))(failure); });
  }

  /// Whether both handles name one queue.
  friend bool operator==(const Stream& a, const Stream& b) { return a.queue_ == b.queue_; }

 private:
  friend class Event;
  struct Queue;

  void add_failure_handler(std::shared_ptr<void> handler, void (*call)(void*, const std::exception_ptr&));
  void* begin_enqueue();
  void cancel_enqueue();
  void end_enqueue(void (*run)(void*), void (*drop)(void*));

  std::shared_ptr<Queue> queue_;
};

/// A point in a stream. record() captures the work enqueued so far; wait() makes another stream wait for it.
/// Re-recording is allowed: a wait refers to the record that precedes it in program order. Waiting for a
/// failed stream spreads its failure to the waiting stream.
class HELIX_API Event {
 public:
  /// An event that was never recorded: waiting for it waits for nothing.
  Event();
  // With copies declared there are no moves, which would leave a handle to nothing.
  Event(const Event&) = default;
  Event& operator=(const Event&) = default;
  /// Captures the work enqueued on `stream` so far.
  void record(const Stream& stream);
  /// Makes `stream`, not the host, wait for what was recorded last.
  void wait(const Stream& stream) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace helix::cpu
