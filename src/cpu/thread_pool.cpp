// SPDX-License-Identifier: Apache-2.0
// Fork-join: a list of running loops that idle workers join.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <vector>

#include <helix/cpu/thread_pool.hpp>
#include <helix/error.hpp>

#include "comm/start_thread.hpp"
#include "cpu/cores.hpp"
#include "cpu/spin_wait.hpp"

namespace helix::cpu {
namespace {

constexpr int kSpinPolls = 200;
constexpr std::size_t kExpectedLoops = 16;  // concurrent streams, and nested loops; more allocate

/// One parallel_for, on its caller's stack.
struct Loop {
  const void* body = nullptr;
  void (*call)(const void* body, std::int64_t index, int thread) = nullptr;
  std::int64_t count = 0;
  std::atomic<std::int64_t> next = 0;
  int core = -1;                 // of the caller
  std::atomic<int> helpers = 0;  // workers inside; joins and the last leave happen under the pool's mutex
  std::exception_ptr failure;    // guarded by the pool's mutex

  bool is_open() const { return next.load(std::memory_order_relaxed) < count; }
};

}  // namespace

struct ThreadPool::State {
  int num_threads = 1;
  std::mutex mutex;
  std::condition_variable work_arrives;
  std::condition_variable helper_leaves;
  std::vector<Loop*> loops;         // guarded by mutex
  std::atomic<int> open_loops = 0;  // loops.size(), for spinning workers
  int idle = 0;                     // workers asleep, guarded by mutex
  bool is_closing = false;
  std::vector<comm::Thread> workers;

  void run(Loop& loop, int thread) {
    try {
      for (;;) {
        const std::int64_t index = loop.next.fetch_add(1, std::memory_order_relaxed);
        if (index >= loop.count) return;
        loop.call(loop.body, index, thread);
      }
    } catch (...) {
      loop.next.store(loop.count, std::memory_order_relaxed);
      const std::lock_guard lock(mutex);
      if (!loop.failure) loop.failure = std::current_exception();
    }
  }

  Loop* open_loop() {
    const auto found =
        std::find_if(loops.begin(), loops.end(), [](const Loop* loop) { return loop->is_open(); });
    return found == loops.end() ? nullptr : *found;
  }

  void work(int thread) {
    AllowedCores cores;  // those of the thread that made the pool
    std::unique_lock lock(mutex);
    for (;;) {
      Loop* loop = open_loop();
      if (loop == nullptr) {
        if (is_closing) return;
        lock.unlock();
        spin_until<kSpinPolls>([&] { return open_loops.load(std::memory_order_relaxed) > 0; });
        lock.lock();
        if (open_loop() != nullptr || is_closing) continue;
        ++idle;
        work_arrives.wait(lock);
        --idle;
        continue;
      }
      loop->helpers.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      // The system may wake a worker on its caller's core and leave it there for 20 ms, although others are
      // idle.
      if (loop->core == current_core()) cores.leave(loop->core, num_threads);
      run(*loop, thread);
      lock.lock();
      // Release: a caller that sees 0 while spinning returns without the mutex, and its loop is then
      // destroyed.
      if (loop->helpers.fetch_sub(1, std::memory_order_release) == 1) helper_leaves.notify_all();
    }
  }

  void close() {
    {
      const std::lock_guard lock(mutex);
      is_closing = true;
    }
    work_arrives.notify_all();
    for (comm::Thread& worker : workers) worker.join();
  }
};

ThreadPool::ThreadPool(int num_threads) : state_(std::make_unique<State>()) {
  HELIX_EXPECTS(num_threads >= 1, ErrorCode::invalid_argument, "num_threads is ", num_threads,
                "; at least 1 is needed");
  state_->num_threads = num_threads;
  state_->loops.reserve(kExpectedLoops);
  state_->workers.reserve(static_cast<std::size_t>(num_threads - 1));
  try {
    for (int thread = 1; thread < num_threads; ++thread) {
      state_->workers.push_back(
          comm::start_thread(message({"thread ", thread, " of a ThreadPool of ", num_threads}),
                             [state = state_.get(), thread] { state->work(thread); }));
    }
  } catch (...) {
    state_->close();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  state_->close();
}

int ThreadPool::num_threads() const {
  return state_->num_threads;
}

void ThreadPool::run(std::int64_t count, const void* body, Call call) {
  if (state_->num_threads == 1 || count <= 1) {
    for (std::int64_t index = 0; index < count; ++index) call(body, index, 0);
    return;
  }
  Loop loop;
  loop.body = body;
  loop.call = call;
  loop.count = count;
  loop.core = current_core();
  int sleepers = 0;
  {
    const std::lock_guard lock(state_->mutex);
    state_->loops.push_back(&loop);
    state_->open_loops.fetch_add(1, std::memory_order_relaxed);
    sleepers = state_->idle;
  }
  if (count > sleepers) {
    if (sleepers > 0) state_->work_arrives.notify_all();
  } else {
    for (std::int64_t i = 1; i < count; ++i) state_->work_arrives.notify_one();
  }
  state_->run(loop, 0);
  {
    std::unique_lock lock(state_->mutex);
    std::erase(state_->loops, &loop);  // no worker joins from here on
    state_->open_loops.fetch_sub(1, std::memory_order_relaxed);
    const auto left = [&] { return loop.helpers.load(std::memory_order_acquire) == 0; };
    if (!left()) {
      lock.unlock();
      if (!spin_until<kSpinPolls>(left)) {
        lock.lock();
        state_->helper_leaves.wait(lock, left);
      }
    }
  }
  if (loop.failure) std::rethrow_exception(loop.failure);
}

}  // namespace helix::cpu
