// SPDX-License-Identifier: Apache-2.0
// Packing, checking and combining on the CPU where the backend contract does not look: layout, messages,
// threads.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>

#include "support/catch.hpp"

namespace helix::test {
namespace {

using cpu::Operators;

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST_CASE("a message out of step is refused with both steps, and nothing after it runs") {
  const Operators ops;
  Operators::Stream stream = ops.create_stream();
  std::vector<std::byte> messages(2 * 16);
  std::uint64_t first = 6;
  std::uint64_t late = 5;
  ops.stamp({messages.data(), 3, 0, &first}, stream);
  ops.stamp({messages.data() + 16, 3, 1, &late}, stream);
  stream.synchronize();
  CHECK(first == 7);
  bool is_used = false;
  ops.check_exchange({messages.data(), 16, 2, 3, messages.data()}, stream);
  stream.enqueue([&] { is_used = true; });
  std::string text;
  try {
    stream.synchronize();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::out_of_step);
    text = error.what();
  }
  CAPTURE(text);
  CHECK(text.find("message from rank 1") != std::string::npos);
  CHECK(text.find("step 6") != std::string::npos);
  CHECK(text.find("expected step 7") != std::string::npos);
  CHECK_FALSE(is_used);
}

TEST_CASE("an exchange of as many tokens in as many steps passes the check") {
  const Operators ops;
  const Operators::Stream stream = ops.create_stream();
  std::vector<std::byte> messages(3 * 32);
  std::uint64_t epochs[3] = {9, 9, 9};
  for (int rank = 0; rank < 3; ++rank)
    ops.stamp({messages.data() + 32 * rank, 4, rank, &epochs[rank]}, stream);
  ops.check_exchange({messages.data(), 32, 3, 4, messages.data() + 32}, stream);
  CHECK_NOTHROW(stream.synchronize());
  ops.check_exchange({messages.data(), 32, 3, 5, messages.data() + 32}, stream);  // another count of tokens
  CHECK_THROWS_AS(stream.synchronize(), Error);
}

/// Combines [ranks, 1, 1, 2] partials whose outputs are (rank + 1, -rank - 1).
struct Combined {
  float out[2];
  float lse;
};

Combined combine(const std::vector<float>& lse, const float* sink = nullptr) {
  const Operators ops;
  const Operators::Stream stream = ops.create_stream();
  const auto ranks = static_cast<std::int64_t>(lse.size());
  std::vector<float> partial;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    partial.push_back(static_cast<float>(rank + 1));
    partial.push_back(static_cast<float>(-rank - 1));
  }
  Combined result{{7, 7}, 7};
  ops.lse_combine({{partial.data(), {ranks, 1, 1, 2}},
                   {lse.data(), {ranks, 1, 1}},
                   sink,
                   {result.out, {1, 1, 2}},
                   {&result.lse, {1, 1}}},
                  stream);
  stream.synchronize();
  return result;
}

TEST_CASE("a NaN or +inf log-sum-exp shows in the output instead of passing for an empty shard") {
  const float nan = std::nanf("");
  for (const std::vector<float>& lse : std::vector<std::vector<float>>{
           {nan}, {nan, -kInf}, {-kInf, nan}, {nan, 1}, {1, nan}, {kInf, 1}, {1, kInf}}) {
    CAPTURE(lse);
    const Combined combined = combine(lse);
    CHECK(std::isnan(combined.out[0]));
    CHECK(std::isnan(combined.out[1]));
    CHECK(std::isnan(combined.lse));
  }
}

TEST_CASE("one partial combines to itself, bit for bit, whatever its log-sum-exp") {
  for (const float lse : {-1e30f, -100.0f, 0.0f, 0.1f, 88.0f, 1e30f}) {
    for (const std::vector<float>& all : std::vector<std::vector<float>>{{lse}, {lse, -kInf, -kInf}}) {
      const Combined combined = combine(all);
      CHECK(combined.out[0] == 1.0f);
      CHECK(combined.out[1] == -1.0f);
      CHECK(combined.lse == lse);
    }
  }
}

TEST_CASE("a sink alone gives zero and its own log-sum-exp; a sink of -inf changes nothing") {
  const float sink = 2.5f;
  const Combined alone = combine({-kInf, -kInf}, &sink);
  CHECK(alone.out[0] == 0.0f);
  CHECK(alone.lse == 2.5f);
  const float none = -kInf;
  const Combined without = combine({1, 2}, &none);
  const Combined expected = combine({1, 2});
  CHECK(without.out[0] == expected.out[0]);
  CHECK(without.lse == expected.lse);
  const Combined empty = combine({-kInf, -kInf}, &none);
  CHECK(empty.out[0] == 0.0f);
  CHECK(empty.lse == -kInf);
}

TEST_CASE("combining gives the same bits for any number of threads and on every replay") {
  constexpr std::int64_t kRanks = 7, kTokens = 9, kHeads = 5, kDim = 515;
  std::mt19937 generator(4);
  std::uniform_real_distribution<float> uniform(-3.0f, 3.0f);
  std::vector<float> partial(kRanks * kTokens * kHeads * kDim);
  std::vector<float> lse(kRanks * kTokens * kHeads);
  for (float& value : partial) value = uniform(generator);
  for (float& value : lse) value = uniform(generator);
  const auto result = [&](int threads) {
    const Operators ops(threads);
    const Operators::Stream stream = ops.create_stream();
    std::vector<float> out(kTokens * kHeads * kDim);
    ops.lse_combine({{partial.data(), {kRanks, kTokens, kHeads, kDim}},
                     {lse.data(), {kRanks, kTokens, kHeads}},
                     nullptr,
                     {out.data(), {kTokens, kHeads, kDim}},
                     {}},
                    stream);
    stream.synchronize();
    return out;
  };
  const std::vector<float> alone = result(1);
  for (const int threads : {1, 2, 5}) CHECK(alone == result(threads));
}

}  // namespace
}  // namespace helix::test
