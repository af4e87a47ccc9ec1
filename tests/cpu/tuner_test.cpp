// SPDX-License-Identifier: Apache-2.0
// The choice of cpu::Tuner among variants, and how it is fixed by name.
#include "cpu/tuner.hpp"

#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include <helix/cpu/tuning.hpp>
#include <helix/error.hpp>

#include "support/catch.hpp"

namespace {

using helix::cpu::KernelTuning;
using helix::cpu::Tuner;
using Source = helix::cpu::KernelTuning::Source;

KernelTuning found(const std::string& kernel) {
  for (const KernelTuning& tuning : helix::cpu::tuning()) {
    if (tuning.kernel == kernel) return tuning;
  }
  FAIL("no kernel " << kernel);
  return {};
}

/// A call whose variant 2 is the fastest.
int call(Tuner& tuner, std::int64_t bytes) {
  const Tuner::Call call(tuner, bytes);
  std::this_thread::sleep_for(std::chrono::microseconds(call.variant() == 2 ? 100 : 2000));
  return call.variant();
}

}  // namespace

TEST_CASE("a tuner takes turns and keeps the fastest variant") {
  Tuner tuner("test.turns", {"a", "b", "c"}, 1000);
  for (int i = 0; i < 50; ++i) CHECK(call(tuner, 999) == 0);  // too small to be timed
  CHECK(found("test.turns").source == Source::preset);
  std::vector<int> calls(3);
  for (int i = 0; i < 18; ++i) ++calls[static_cast<std::size_t>(call(tuner, 1000))];
  CHECK(calls == std::vector<int>{6, 6, 6});
  CHECK(found("test.turns").source == Source::measured);
  CHECK(found("test.turns").variant == "c");
  CHECK(call(tuner, 1000) == 2);
  CHECK(call(tuner, 1) == 2);
}

TEST_CASE("a call that throws does not make its variant the fastest") {
  Tuner tuner("test.throwing", {"a", "b", "c"}, 1);
  const auto fail = [&] {
    const Tuner::Call call(tuner, 1000);
    if (call.variant() == 0) throw helix::Error(helix::ErrorCode::invalid_argument, "refused");
    std::this_thread::sleep_for(std::chrono::microseconds(call.variant() == 2 ? 100 : 2000));
  };
  for (int i = 0; i < 18; ++i) {
    if (i % 3 == 0) {
      CHECK_THROWS(fail());
    } else {
      fail();
    }
  }
  CHECK(found("test.throwing").source == Source::measured);
  CHECK(found("test.throwing").variant == "c");
}

TEST_CASE("threads that share a tuner end its turns once") {
  Tuner tuner("test.threads", {"a", "b", "c"}, 1);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 40; ++j) call(tuner, 10);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(found("test.threads").source == Source::measured);
  CHECK(found("test.threads").variant == "c");
}

TEST_CASE("what fix_tuning says stays") {
  Tuner first("test.fixed.one", {"a", "b", "c"}, 1);
  Tuner second("test.fixed.two", {"b", "d"}, 1);
  helix::cpu::fix_tuning("test.fixed.one=b,test.fixed.two=d");
  for (int i = 0; i < 30; ++i) CHECK(call(first, 10) == 1);
  CHECK(found("test.fixed.one").source == Source::fixed);
  CHECK(found("test.fixed.two").variant == "d");
  helix::cpu::fix_tuning("test.fixed.*=b");
  CHECK(found("test.fixed.one").variant == "b");
  CHECK(found("test.fixed.two").variant == "b");

  using Catch::Matchers::ContainsSubstring;
  CHECK_THROWS_WITH(
      helix::cpu::fix_tuning("test.fixed.two=d,test.fixed.one=z"),
      ContainsSubstring("kernel test.fixed.one has no variant \"z\"; it has a, b, c, and auto measures"));
  CHECK(found("test.fixed.two").variant == "b");
  CHECK_THROWS_WITH(helix::cpu::fix_tuning("test.other=b"),
                    ContainsSubstring("there is no kernel \"test.other\"; there are ") &&
                        ContainsSubstring("test.fixed.one"));
  CHECK_THROWS_WITH(helix::cpu::fix_tuning("nonsense"), ContainsSubstring("kernel=variant"));
}

TEST_CASE("a tuner that is no longer fixed measures") {
  Tuner tuner("test.freed", {"a", "b", "c"}, 1);
  helix::cpu::fix_tuning("test.freed=b");
  helix::cpu::fix_tuning("test.freed=auto");
  CHECK(found("test.freed").source == Source::preset);
  for (int i = 0; i < 40; ++i) call(tuner, 10);
  CHECK(found("test.freed").source == Source::measured);
  CHECK(found("test.freed").variant == "c");
  helix::cpu::fix_tuning("test.freed=auto");
  CHECK(found("test.freed").variant == "c");
}

TEST_CASE("a tuner that is gone is not reported") {
  { Tuner tuner("test.gone", {"a", "b"}, 1); }
  for (const KernelTuning& tuning : helix::cpu::tuning()) CHECK(tuning.kernel != "test.gone");
}
