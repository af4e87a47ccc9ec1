// SPDX-License-Identifier: Apache-2.0
// Packing, checking and combining on the CPU, for properties that the backend contract does not test: layout,
// messages, threads.
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
  ops.check_exchange({.messages = messages.data(), .message_bytes = 16, .peers = 2, .sent = messages.data()},
                     stream);
  stream.enqueue([&] { is_used = true; });
  std::string text;
  try {
    stream.synchronize();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::out_of_step);
    text = error.what();
  }
  CAPTURE(text);
  CHECK(text.find("message from group rank 1") != std::string::npos);
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
  CheckExchangeArgs check{
      .messages = messages.data(), .message_bytes = 32, .peers = 3, .sent = messages.data() + 32};
  ops.check_exchange(check, stream);
  CHECK_NOTHROW(stream.synchronize());
  std::vector<std::byte> other(16);  // of another number of tokens
  std::uint64_t epoch = 9;
  ops.stamp({other.data(), 5, 1, &epoch}, stream);
  check.sent = other.data();
  ops.check_exchange(check, stream);
  CHECK_THROWS_AS(stream.synchronize(), Error);
}

/// Combines [ranks, 1, 1, 2] partials whose outputs are (rank + 1, -rank - 1), or NaN if the shard is empty.
struct Combined {
  float out[2];
  float lse;
};

Combined combine(const std::vector<float>& lse, const float* sink = nullptr,
                 LseConvention convention = LseConvention::natural) {
  const Operators ops;
  const Operators::Stream stream = ops.create_stream();
  const auto ranks = static_cast<std::int64_t>(lse.size());
  std::vector<float> partial;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const bool is_empty = to_natural(lse[static_cast<std::size_t>(rank)], convention) == -kInf;
    // Must not be read: its weight is 0.
    const float value = is_empty ? std::nanf("") : static_cast<float>(rank + 1);
    partial.push_back(value);
    partial.push_back(-value);
  }
  Combined result{{7, 7}, 7};
  ops.lse_combine({.partial_out = {partial.data(), {ranks, 1, 1, 2}},
                   .partial_lse = {lse.data(), {ranks, 1, 1}},
                   .sinks = sink,
                   .out = {result.out, {1, 1, 2}},
                   .lse = {&result.lse, {1, 1}},
                   .convention = convention},
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

TEST_CASE("a sink alone gives zero and its own log-sum-exp, and a sink of -inf changes nothing") {
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

struct Convention {
  LseConvention name;
  float empty;      ///< Value reported by an empty shard.
  double per_unit;  ///< Reported value for a natural lse of 1.
};

constexpr Convention kConventions[] = {
    {LseConvention::natural, -kInf, 1.0},
    {LseConvention::base2, -kInf, 1.4426950408889634},
    {LseConvention::natural_positive_inf_if_empty, kInf, 1.0},
};

/// Natural log-sum-exps converted to the convention's values.
std::vector<float> reported(const std::vector<float>& natural, const Convention& convention) {
  std::vector<float> lse;
  for (const float x : natural)
    lse.push_back(x == -kInf ? convention.empty : static_cast<float>(x * convention.per_unit));
  return lse;
}

TEST_CASE("combine reads every convention: the result, its lse and the sink are natural") {
  const float sinks[] = {-3.0f, 0.5f, 40.0f, -kInf};
  for (const Convention& convention : kConventions) {
    for (const std::vector<float>& natural : std::vector<std::vector<float>>{
             {1.0f}, {1.0f, 2.0f}, {-kInf, 2.0f}, {0.0f, -kInf, -20.0f, 3.5f}, {-90.0f, -91.0f}}) {
      CAPTURE(static_cast<int>(convention.name), natural);
      const Combined expected = combine(natural);
      const Combined got = combine(reported(natural, convention), nullptr, convention.name);
      CHECK(got.out[0] == Approx(expected.out[0]).epsilon(1e-5));
      CHECK(got.out[1] == Approx(expected.out[1]).epsilon(1e-5));
      CHECK(got.lse == Approx(expected.lse).epsilon(1e-6).margin(1e-6));
      for (const float& sink : sinks) {
        CAPTURE(sink);
        const Combined with = combine(natural, &sink);
        const Combined got_with = combine(reported(natural, convention), &sink, convention.name);
        CHECK(got_with.out[0] == Approx(with.out[0]).epsilon(1e-5));
        CHECK(got_with.lse == Approx(with.lse).epsilon(1e-6).margin(1e-6));
      }
    }
  }
}

TEST_CASE("combine of empty shards alone gives 0 and -inf, or the sink, in every convention") {
  const float sink = 2.5f;
  for (const Convention& convention : kConventions) {
    for (const std::size_t ranks : {1u, 3u}) {
      CAPTURE(static_cast<int>(convention.name), ranks);
      const std::vector<float> lse(ranks, convention.empty);
      const Combined empty = combine(lse, nullptr, convention.name);
      CHECK(empty.out[0] == 0.0f);
      CHECK(empty.lse == -kInf);
      const Combined alone = combine(lse, &sink, convention.name);
      CHECK(alone.out[0] == 0.0f);
      CHECK(alone.out[1] == 0.0f);
      CHECK(alone.lse == 2.5f);
    }
  }
}

TEST_CASE("a NaN log-sum-exp stays one in every convention, and +inf passes for empty in its own alone") {
  for (const Convention& convention : kConventions) {
    CAPTURE(static_cast<int>(convention.name));
    CHECK(std::isnan(combine({std::nanf(""), 1.0f}, nullptr, convention.name).lse));
    const bool is_empty = convention.name == LseConvention::natural_positive_inf_if_empty;
    CHECK(std::isnan(combine({kInf, 1.0f}, nullptr, convention.name).out[0]) != is_empty);
  }
}

TEST_CASE("exponentials 2 and 8 weigh 1 and 2 to 1.8 in their own base, and not in the other") {
  CHECK(combine({1, 3}, nullptr, LseConvention::base2).out[0] == Approx(1.8));
  CHECK(combine({std::log(2.0f), std::log(8.0f)}).out[0] == Approx(1.8));
  CHECK(combine({std::log(2.0f), std::log(8.0f)}, nullptr, LseConvention::base2).out[0] == Approx(1.7233032));
}

TEST_CASE("packing converts the log-sum-exps, copies outputs bit for bit and stamps every message") {
  constexpr std::int64_t kTokens = 3, kHeads = 4, kDim = 5, kRanks = 2;
  std::vector<float> out(kTokens * kHeads * kDim);
  std::vector<float> natural(kTokens * kHeads);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = 0.25f * static_cast<float>(i) - 3.0f;
  for (std::size_t i = 0; i < natural.size(); ++i)
    natural[i] = i % 3 == 0 ? -kInf : 0.5f * static_cast<float>(i) - 2.0f;
  for (const Convention& convention : kConventions) {
    CAPTURE(static_cast<int>(convention.name));
    const std::vector<float> lse = reported(natural, convention);
    // A head's block: 4 words of header, tokens of lse, one word of padding, tokens * dim of out.
    constexpr std::int64_t kBlock = 4 + kTokens + 1 + kTokens * kDim;
    constexpr std::int64_t kMessageBytes = kHeads / kRanks * kBlock * 4;
    std::vector<float> messages(kHeads * kBlock, std::nanf(""));
    std::uint64_t exchanges = 4;
    const Operators ops(2);
    const Operators::Stream stream = ops.create_stream();
    ops.pack_partial(
        {.out = {out.data(), {kTokens, kHeads, kDim}},
         .lse = {lse.data(), {kTokens, kHeads}},
         .target = {.out = {messages.data() + 4 + kTokens + 1, {kTokens, kHeads, kDim}, {kDim, kBlock, 1}},
                    .lse = {messages.data() + 4, {kTokens, kHeads}, {1, kBlock}},
                    .headers = {.message = reinterpret_cast<std::byte*>(messages.data()),
                                .tokens = kTokens,
                                .sender = 1,
                                .exchanges = &exchanges,
                                .count = kRanks,
                                .message_bytes = kMessageBytes}},
         .convention = convention.name},
        stream);
    stream.synchronize();
    CHECK(exchanges == 5);
    for (std::int64_t rank = 0; rank < kRanks; ++rank) {
      ExchangeHeader header;
      std::memcpy(&header, reinterpret_cast<const std::byte*>(messages.data()) + rank * kMessageBytes,
                  sizeof(header));
      CHECK(header.epoch == 5);
      CHECK(header.tokens == kTokens);
      CHECK(header.sender == 1);
    }
    for (std::int64_t token = 0; token < kTokens; ++token) {
      for (std::int64_t head = 0; head < kHeads; ++head) {
        CAPTURE(token, head);
        const float* block = messages.data() + head * kBlock;
        const float expected = natural[static_cast<std::size_t>(token * kHeads + head)];
        if (expected == -kInf) {
          CHECK(block[4 + token] == -kInf);
        } else {
          CHECK(block[4 + token] == Approx(expected).epsilon(1e-6).margin(1e-6));
        }
        CHECK(std::memcmp(block + 4 + kTokens + 1 + token * kDim,
                          &out[static_cast<std::size_t>((token * kHeads + head) * kDim)],
                          kDim * sizeof(float)) == 0);
        CHECK(std::isnan(block[4 + kTokens]));  // padding
      }
    }
  }
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
