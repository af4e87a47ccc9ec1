// SPDX-License-Identifier: Apache-2.0
// Properties of cpu::ThreadPool.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include <helix/cpu/thread_pool.hpp>
#include <helix/error.hpp>

#include "support/catch.hpp"

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
