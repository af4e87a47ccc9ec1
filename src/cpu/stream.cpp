// SPDX-License-Identifier: Apache-2.0
// The worker thread and the ring of tasks of cpu::Stream; events are positions in that ring.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <vector>

#include <helix/cpu/stream.hpp>
#include <helix/error.hpp>

#include "comm/start_thread.hpp"
#include "cpu/retired_memory.hpp"

namespace helix::cpu {
namespace {

// A decode step enqueues about 30 tasks per layer. The host may run this many tasks ahead of the worker.
constexpr std::uint64_t kRingTasks = 256;
constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

struct Slot {
  alignas(64) std::byte storage[Stream::kTaskBytes];
  void (*run)(void*) = nullptr;
  void (*drop)(void*) = nullptr;
};

/// The queue. Tasks are numbered from 0 and live in slot (number % kRingTasks). Handles, the worker and
/// events share it, so an event outlives the stream on which it was recorded. Threads do not spin before they
/// sleep: 50 polls made the empty round trip 6.4 us instead of 1.7 us on two cores, because a spinning thread
/// delays the one it waits for; 500 polls gained 1 us there but would lose far more with 16 streams.
struct Ring : QueueProgress {
  std::unique_ptr<Slot[]> slots = std::make_unique<Slot[]>(kRingTasks);

  std::mutex producer;  // held from begin_enqueue to end_enqueue

  // A sleeper announces itself (worker_sleeps, wake_at), then reads the counter again; a waker advances the
  // counter, then reads the announcement. Sequential consistency lets at least one of them see the other.
  std::mutex sleep;
  std::condition_variable worker_wakes;
  std::condition_variable hosts_wake;
  std::atomic<bool> worker_sleeps = false;
  std::atomic<std::uint64_t> wake_at = kNever;  // smallest count of completed tasks that a thread waits for
  bool closing = false;                         // guarded by sleep

  std::mutex failure_mutex;
  std::exception_ptr failure;
  std::atomic<std::uint64_t> failed_task = kNever;  // number of the first task that threw
  std::vector<std::function<void(std::exception_ptr)>> handlers;

  void wait_completed(std::uint64_t target) {
    const auto reached = [&] { return completed.load(std::memory_order_seq_cst) >= target; };
    if (reached()) return;
    std::unique_lock lock(sleep);
    for (;;) {
      if (target < wake_at.load(std::memory_order_relaxed)) wake_at.store(target, std::memory_order_seq_cst);
      if (reached()) return;
      hosts_wake.wait(lock);
    }
  }

  void complete(std::uint64_t count) {
    completed.store(count, std::memory_order_seq_cst);
    free_retired();
    if (count < wake_at.load(std::memory_order_seq_cst)) return;
    {
      const std::lock_guard lock(sleep);
      wake_at.store(kNever, std::memory_order_relaxed);  // later waiters announce themselves again
    }
    hosts_wake.notify_all();
  }

  /// Waits for `task`; false if the ring is closed and drained.
  bool wait_published(std::uint64_t task) {
    const auto ready = [&] { return published.load(std::memory_order_seq_cst) > task; };
    if (ready()) return true;
    std::unique_lock lock(sleep);
    worker_sleeps.store(true, std::memory_order_seq_cst);
    worker_wakes.wait(lock, [&] { return ready() || closing; });
    worker_sleeps.store(false, std::memory_order_relaxed);
    return ready();
  }

  void publish() {
    published.store(published.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
    if (!worker_sleeps.load(std::memory_order_seq_cst)) return;
    { const std::lock_guard lock(sleep); }
    worker_wakes.notify_one();
  }

  void close() {
    {
      const std::lock_guard lock(sleep);
      closing = true;
    }
    worker_wakes.notify_one();
  }

  std::exception_ptr current_failure() {
    const std::lock_guard lock(failure_mutex);
    return failure;
  }

  void fail(std::uint64_t task, std::exception_ptr error) {
    std::vector<std::function<void(std::exception_ptr)>> called;
    {
      const std::lock_guard lock(failure_mutex);
      failure = error;
      failed_task.store(task, std::memory_order_release);
      called.swap(handlers);
    }
    for (const auto& handler : called) {
      try {
        handler(error);
      } catch (...) {
        // The first failure is the one to report; ignore a handler that fails too.
      }
    }
  }
};

thread_local const Ring* current_ring = nullptr;  // the ring whose worker this thread is

void work(std::shared_ptr<Ring> ring) {
  current_ring = ring.get();
  bool failed = false;
  for (std::uint64_t task = 0; ring->wait_published(task); ++task) {
    Slot& slot = ring->slots[task % kRingTasks];
    if (failed) {
      slot.drop(slot.storage);
    } else {
      try {
        slot.run(slot.storage);
      } catch (...) {
        failed = true;
        ring->fail(task, std::current_exception());
      }
    }
    ring->complete(task + 1);
  }
}

}  // namespace

struct Stream::Queue {
  std::shared_ptr<Ring> ring = std::make_shared<Ring>();
  comm::Thread worker = comm::start_thread("the worker of a stream", [ring = ring] { work(ring); });

  ~Queue() {
    ring->close();
    // If a task owned the last handle, this is the worker, which drains the rest detached.
    if (current_ring == ring.get()) {
      worker.detach();
    } else {
      worker.join();
    }
  }
};

Stream::Stream() : queue_(std::make_shared<Queue>()) {}

void* Stream::begin_enqueue() {
  Ring& ring = *queue_->ring;
  for (;;) {
    ring.producer.lock();
    const std::uint64_t task = ring.published.load(std::memory_order_relaxed);
    if (task - ring.completed.load(std::memory_order_acquire) < kRingTasks) {
      return ring.slots[task % kRingTasks].storage;
    }
    ring.producer.unlock();
    HELIX_EXPECTS(current_ring != &ring, ErrorCode::invalid_argument,
                  "a task enqueued on its own stream while all ", kRingTasks,
                  " places were taken; it would wait for itself");
    // Wait for half a ring, because waking for each free slot would switch threads on every task.
    ring.wait_completed(task - kRingTasks / 2);
  }
}

void Stream::cancel_enqueue() {
  queue_->ring->producer.unlock();
}

void Stream::end_enqueue(void (*run)(void*), void (*drop)(void*)) {
  Ring& ring = *queue_->ring;
  Slot& slot = ring.slots[ring.published.load(std::memory_order_relaxed) % kRingTasks];
  slot.run = run;
  slot.drop = drop;
  ring.publish();
  ring.producer.unlock();
}

void Stream::synchronize() const {
  Ring& ring = *queue_->ring;
  HELIX_EXPECTS(current_ring != &ring, ErrorCode::invalid_argument,
                "synchronize() was called by a task of the same stream; it would wait for itself");
  ring.wait_completed(ring.published.load(std::memory_order_acquire));
  if (std::exception_ptr failure = ring.current_failure()) std::rethrow_exception(failure);
}

std::exception_ptr Stream::failure() const {
  return queue_->ring->current_failure();
}

void Stream::add_failure_handler(std::shared_ptr<void> erased,
                                 void (*call)(void*, const std::exception_ptr&)) {
  std::function<void(std::exception_ptr)> handler =
      [erased = std::move(erased), call](const std::exception_ptr& failure) { call(erased.get(), failure); };
  Ring& ring = *queue_->ring;
  {
    const std::lock_guard lock(ring.failure_mutex);
    if (!ring.failure) {
      ring.handlers.push_back(std::move(handler));
      return;
    }
  }
  // The stream has failed, so its worker only drops tasks. Queue a task whose drop function calls the
  // handler.
  struct Late {
    std::function<void(std::exception_ptr)> handler;
    std::exception_ptr failure;
  };
  void* slot = begin_enqueue();
  ::new (slot) Late{std::move(handler), failure()};
  end_enqueue([](void*) {},
              [](void* stored) {
                auto* late = static_cast<Late*>(stored);
                try {
                  late->handler(late->failure);
                } catch (...) {
                  // as in Ring::fail
                }
                late->~Late();
              });
}

/// A record is a position in a ring, reached once that many tasks have completed. It enqueues nothing. A wait
/// reads the position when it is called, so recording again does not disturb earlier waits.
struct Event::State {
  std::mutex mutex;
  std::shared_ptr<Ring> ring;  // null: never recorded
  std::uint64_t position = 0;
};

Event::Event() : state_(std::make_shared<State>()) {}

void Event::record(const Stream& stream) {
  const std::shared_ptr<Ring>& ring = stream.queue_->ring;
  const std::lock_guard lock(state_->mutex);
  state_->ring = ring;
  state_->position = ring->published.load(std::memory_order_acquire);
}

void Event::wait(const Stream& stream) const {
  std::shared_ptr<Ring> ring;
  std::uint64_t position = 0;
  {
    const std::lock_guard lock(state_->mutex);
    ring = state_->ring;
    position = state_->position;
  }
  if (!ring || ring == stream.queue_->ring) return;  // a stream runs its own tasks in order
  Stream(stream).enqueue([ring = std::move(ring), position] {
    ring->wait_completed(position);
    if (ring->failed_task.load(std::memory_order_acquire) < position) {
      std::rethrow_exception(ring->current_failure());
    }
  });
}

}  // namespace helix::cpu
