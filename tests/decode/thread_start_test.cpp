// SPDX-License-Identifier: Apache-2.0
// If any thread cannot be started, the ranks of the process end at once with one error.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <limits>
#include <string>

#include <pthread.h>
#include <unistd.h>

#include <helix/comm/bootstrap.hpp>
#include <helix/cpu/stream.hpp>
#include <helix/cpu/thread_pool.hpp>

#include "cli/launch.hpp"
#include "cli/rank_threads.hpp"
#include "comm/bootstrap_job.hpp"
#include "decode/golden.hpp"
#include "serve/frontend.hpp"
#include "support/catch.hpp"
#include "support/failing_threads.hpp"

namespace helix::test {
namespace {

using Catch::Matchers::ContainsSubstring;

/// Refuses new threads while it lives.
struct Refusal {
  Refusal(int first, int count) { refuse_threads(first, count); }
  ~Refusal() { refuse_threads(0, 0); }
};

template <class Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST_CASE("a rank thread that cannot be started is the one error, and no rank begins") {
  for (int refused = 0; refused < 3; ++refused) {
    std::atomic<int> num_begun = 0;
    const Refusal refusal(refused, 1);
    const std::string error = error_of([&] { decode::run_on_threads(4, [&](std::size_t) { ++num_begun; }); });
    CHECK_THAT(error, ContainsSubstring("the thread of rank " + std::to_string(refused + 1) +
                                        " of 4 cannot be started"));
    CHECK(num_begun == 0);
  }
}

TEST_CASE("a frontend whose reader or writer cannot be started says so, and does not wait for the other") {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  for (int refused = 0; refused < 2; ++refused) {
    const Refusal refusal(refused, 1);
    const std::string error = error_of([&] { const decode::Frontend frontend(ends[0], ends[1]); });
    CHECK_THAT(error, ContainsSubstring("a thread for input and output cannot be started"));
  }
  close(ends[0]);
  close(ends[1]);
}

TEST_CASE("a generation of which any thread cannot be started ends at once with one error") {
  const ReferenceModel model("llama-tiny");
  const Topology topo(TopologySpec{.kvp = 4}, model.config.shape);
  decode::GenerationRequest request;
  request.prompts = {{1, 2, 3}};
  request.max_new_tokens = 3;
  const auto generate = [&] {
    return decode::run_local(model.checkpoint, model.config, topo, request, {.num_threads = 2});
  };
  refuse_threads(0, 0);
  const decode::TokenIds tokens = generate().sequences.at(0).tokens;
  const int num_threads = num_threads_asked();
  CHECK(num_threads >= 4 * 2);
  for (const int count : {1, std::numeric_limits<int>::max()}) {
    for (int first = 0; first < num_threads; ++first) {
      const auto start = std::chrono::steady_clock::now();
      const Refusal refusal(first, count);
      const std::string error = error_of(generate);
      INFO("thread " << first << " of " << num_threads << ", " << count << " refused: " << error);
      CHECK_THAT(error, ContainsSubstring("cannot be started: Resource temporarily unavailable"));
      CHECK(seconds_since(start) < 10.0);
    }
  }
  CHECK(generate().sequences.at(0).tokens == tokens);
}

TEST_CASE("a thread pool says which of its threads cannot be started") {
  const Refusal refusal(2, 1);
  CHECK_THAT(error_of([] { cpu::ThreadPool pool(8); }),
             ContainsSubstring("thread 3 of a ThreadPool of 8 cannot be started"));
}

TEST_CASE(
    "threads have stacks that the kernels fit on, and guards that no frame steps over, whatever ulimit -s "
    "says") {
  pthread_attr_t usual;
  REQUIRE(pthread_getattr_default_np(&usual) == 0);
  pthread_attr_t small = usual;
  REQUIRE(pthread_attr_setstacksize(&small, 128 << 10) == 0);
  REQUIRE(pthread_setattr_default_np(&small) == 0);  // as ulimit -s does when a program starts
  std::size_t stack = 0;
  std::size_t guard = 0;
  {
    cpu::Stream stream;
    stream.enqueue([&] {
      pthread_attr_t mine;
      if (pthread_getattr_np(pthread_self(), &mine) != 0) return;
      pthread_attr_getstacksize(&mine, &stack);
      pthread_attr_getguardsize(&mine, &guard);
      pthread_attr_destroy(&mine);
    });
    stream.synchronize();
  }
  CHECK(pthread_setattr_default_np(&usual) == 0);
  pthread_attr_destroy(&usual);
  CHECK(guard >= std::size_t{1} << 20);
  CHECK(stack >= guard + (std::size_t{2} << 20));
}

TEST_CASE("a process whose watch cannot be started is an error there, and named on the others") {
  // The test starts two threads of its own first; the watch thread of one process is then refused.
  const Refusal refusal(2, 1);
  const auto start = std::chrono::steady_clock::now();
  std::string all;
  for (const Outcome& outcome : run_bootstrap_job(2, [](const comm::BootstrapOptions& options) {
         comm::Bootstrap bootstrap(options);
         bootstrap.barrier();
       })) {
    all += outcome.message + "\n";
  }
  CHECK_THAT(all,
             ContainsSubstring("the thread that watches the other ranks cannot be started") &&
                 (ContainsSubstring("its connection closed") || ContainsSubstring("closed its connection")));
  CHECK(seconds_since(start) < 5.0);
}

}  // namespace helix::test
