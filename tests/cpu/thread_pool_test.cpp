// SPDX-License-Identifier: Apache-2.0
// Properties of cpu::ThreadPool.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include <helix/cpu/thread_pool.hpp>
#include <helix/error.hpp>

#if defined(__linux__)
#include <sched.h>
#endif

#include "support/catch.hpp"
#include "support/skipped.hpp"

using helix::cpu::ThreadPool;

TEST_CASE("every index runs exactly once, on a thread of the pool") {
  for (const int num_threads : {1, 2, 3, 8}) {
    ThreadPool pool(num_threads);
    CHECK(pool.num_threads() == num_threads);
    for (const std::int64_t count : {0, 1, 2, num_threads - 1, num_threads, num_threads + 1, 1000}) {
      CAPTURE(num_threads, count);
      std::vector<std::atomic<int>> hits(static_cast<std::size_t>(count));
      std::atomic<int> wild_threads = 0;
      pool.parallel_for(count, [&](std::int64_t index, int thread) {
        ++hits[static_cast<std::size_t>(index)];
        if (thread < 0 || thread >= num_threads) ++wild_threads;
      });
      CHECK(wild_threads == 0);
      CHECK(std::all_of(hits.begin(), hits.end(), [](const std::atomic<int>& hit) { return hit == 1; }));
    }
  }
}

TEST_CASE("thread numbers are never shared inside one loop") {
  ThreadPool pool(4);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::atomic<int>> users(4);
    std::atomic<int> clashes = 0;
    pool.parallel_for(64, [&](std::int64_t, int thread) {
      if (users[static_cast<std::size_t>(thread)].fetch_add(1) != 0) ++clashes;
      std::this_thread::yield();
      users[static_cast<std::size_t>(thread)].fetch_sub(1);
    });
    REQUIRE(clashes == 0);
  }
}

TEST_CASE("writes of the loop are visible to the caller, for many short loops") {
  ThreadPool pool(3);
  std::vector<std::int64_t> values(16);
  for (std::int64_t round = 0; round < 3000; ++round) {
    pool.parallel_for(
        16, [&](std::int64_t index, int) { values[static_cast<std::size_t>(index)] = round + index; });
    for (std::int64_t i = 0; i < 16; ++i) REQUIRE(values[static_cast<std::size_t>(i)] == round + i);
  }
}

TEST_CASE("several callers share the pool at once, and a body may call it again") {
  ThreadPool pool(3);
  std::atomic<std::int64_t> sum = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        pool.parallel_for(5, [&](std::int64_t i, int) {
          pool.parallel_for(3, [&](std::int64_t j, int) { sum += i * 3 + j; });
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  REQUIRE(sum == 4 * 200 * (15 * 14 / 2));
}

TEST_CASE("an exception of the body reaches the caller, and the pool stays usable") {
  for (const int num_threads : {1, 4}) {
    ThreadPool pool(num_threads);
    for (const std::int64_t bad : {0, 17, 99}) {
      CHECK_THROWS_WITH(pool.parallel_for(100,
                                          [&](std::int64_t index, int) {
                                            if (index == bad) throw std::runtime_error("bad index");
                                          }),
                        "bad index");
    }
    std::atomic<int> ran = 0;
    pool.parallel_for(10, [&](std::int64_t, int) { ++ran; });
    CHECK(ran == 10);
  }
}

TEST_CASE("a pool without threads is refused") {
  CHECK_THROWS_AS(ThreadPool(0), helix::Error);
  CHECK_THROWS_AS(ThreadPool(-2), helix::Error);
}

#if defined(__linux__)

namespace {

/// The cores that the calling thread may use; none if the system does not tell.
cpu_set_t allowed_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) CPU_ZERO(&cores);
  return cores;
}

/// Lets the calling thread run on `core` alone. Returns whether it does.
bool stay_on(int core) {
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(static_cast<unsigned>(core), &only);
  return sched_setaffinity(0, sizeof(only), &only) == 0 && sched_getcpu() == core;
}

/// Where the worker of a pool of two is after it was on its caller's core, and the cores that it may use.
struct Meeting {
  bool took_place = false;
  int callers_core = -1;
  int workers_core = -1;
  cpu_set_t workers_cores;
};

/// Brings the worker to its caller's core, where after_arrival() is called on it, and calls the pool again.
template <class Call>
Meeting meet_on_a_core(const Call& after_arrival) {
  ThreadPool pool(2);
  Meeting result;
  std::thread caller([&] {  // a thread of its own, so that the test's stays where it may
    // Calls use() on the worker and returns when it has.
    const auto on_worker = [&](const auto& use) {
      std::atomic<int> arrived = 0;
      pool.parallel_for(2, [&](std::int64_t, int thread) {
        ++arrived;
        while (arrived < 2) std::this_thread::yield();
        if (thread == 1) use();
      });
    };
    result.callers_core = sched_getcpu();
    result.took_place = stay_on(result.callers_core);
    on_worker([&] {
      result.took_place &= stay_on(result.callers_core);
      after_arrival();
      result.took_place &= sched_getcpu() == result.callers_core;
    });
    on_worker([&] {
      result.workers_core = sched_getcpu();
      result.workers_cores = allowed_cores();
    });
  });
  caller.join();
  return result;
}

}  // namespace

TEST_CASE("a worker on its caller's core moves to another one") {
  const cpu_set_t cores = allowed_cores();
  if (CPU_COUNT(&cores) < 2) return helix::test::skip("this process may not use two cores");
  // The system may move the worker by itself before the pool looks. Then there was nothing to do: meet again.
  Meeting meeting;
  bool system_moved_it = true;
  for (int tries = 0; tries < 100 && system_moved_it; ++tries) {
    meeting = meet_on_a_core([&] { (void)sched_setaffinity(0, sizeof(cores), &cores); });
    if (!meeting.took_place) return helix::test::skip("the system lets no thread choose its core");
    system_moved_it =
        meeting.workers_core != meeting.callers_core && CPU_EQUAL(&meeting.workers_cores, &cores);
  }
  CHECK(meeting.workers_core != meeting.callers_core);
  CHECK_FALSE(CPU_ISSET(static_cast<unsigned>(meeting.callers_core), &meeting.workers_cores));
  CHECK(CPU_ISSET(static_cast<unsigned>(meeting.workers_core), &meeting.workers_cores));
}

TEST_CASE("a worker whose cores somebody else has chosen since stays on them") {
  const cpu_set_t cores = allowed_cores();
  if (CPU_COUNT(&cores) < 2) return helix::test::skip("this process may not use two cores");
  const Meeting meeting = meet_on_a_core([] {});  // bound to one core
  if (!meeting.took_place) return helix::test::skip("the system lets no thread choose its core");
  CHECK(meeting.workers_core == meeting.callers_core);
  CHECK(CPU_COUNT(&meeting.workers_cores) == 1);
}

#endif
