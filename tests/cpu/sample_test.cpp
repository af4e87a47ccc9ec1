// SPDX-License-Identifier: Apache-2.0
// Sampling on the CPU: published Philox vectors, top_p sets compared with a sorted double reference, ties and
// invalid logits.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>
#include <helix/philox.hpp>

#include "support/catch.hpp"

namespace helix::test {
namespace {

using cpu::Operators;

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST_CASE("Philox4x32-10 gives the vectors that its authors publish") {
  using Words = std::array<std::uint32_t, 4>;
  constexpr std::uint32_t kOnes = 0xffffffffu;
  static_assert(philox4x32_10({0, 0, 0, 0}, {0, 0}) ==
                Words{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u});
  static_assert(philox4x32_10({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}) ==
                Words{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu});
  CHECK(philox4x32_10({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}) ==
        Words{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u});
}

/// One row of logits per token, cut into shards at `begins`. NaN follows the ids of each shard.
std::vector<std::int32_t> sample(const std::vector<std::vector<float>>& rows,
                                 const std::vector<std::int64_t>& begins, const SamplingConfig& config,
                                 const std::vector<std::uint64_t>& counters, int threads = 1) {
  const Operators ops(threads);
  const Operators::Stream stream = ops.create_stream();
  const std::size_t shards = begins.size() - 1;
  std::int64_t width = 1;
  for (std::size_t s = 0; s < shards; ++s) width = std::max(width, begins[s + 1] - begins[s] + 1);
  std::vector<float> logits(shards * rows.size() * static_cast<std::size_t>(width), std::nanf(""));
  for (std::size_t s = 0; s < shards; ++s)
    for (std::size_t r = 0; r < rows.size(); ++r)
      std::copy(rows[r].begin() + begins[s], rows[r].begin() + begins[s + 1],
                logits.begin() +
                    static_cast<std::ptrdiff_t>((s * rows.size() + r) * static_cast<std::size_t>(width)));
  const std::vector<SamplingConfig> configs(rows.size(), config);
  std::vector<std::int32_t> tokens(rows.size(), -1);
  ops.sample(
      {{logits.data(), {static_cast<std::int64_t>(shards), static_cast<std::int64_t>(rows.size()), width}},
       begins.data(),
       configs.data(),
       counters.empty() ? nullptr : counters.data(),
       tokens.data()},
      stream);
  stream.synchronize();
  return tokens;
}

std::int32_t sample_one(const std::vector<float>& row, const SamplingConfig& config, std::uint64_t counter) {
  return sample({row}, {0, static_cast<std::int64_t>(row.size())}, config, {counter}).front();
}

TEST_CASE("greedy takes the largest logit, the smaller id on ties, across uneven and empty shards") {
  const std::vector<std::vector<float>> rows{
      {1, 5, 2, 5, 5}, {-9, -8, -7, -6, -5}, {0, 0, 0, 0, 0}, {-kInf, -kInf, 3, -kInf, 3}};
  for (const std::vector<std::int64_t>& begins :
       std::vector<std::vector<std::int64_t>>{{0, 5}, {0, 1, 1, 4, 5}, {0, 0, 5}, {0, 3, 5}}) {
    CHECK(sample(rows, begins, {}, {}) == std::vector<std::int32_t>{1, 4, 0, 2});
  }
}

TEST_CASE("a row of logits that went wrong draws no token, greedy or not, and others do") {
  for (const float temperature : {0.0f, 1.0f}) {
    for (const std::vector<float>& bad :
         std::vector<std::vector<float>>{{1, std::nanf(""), 2}, {-kInf, -kInf, -kInf}, {1, kInf, 2}}) {
      CAPTURE(temperature, bad);
      const auto drawn =
          sample({{-kInf, 2, -kInf}, bad}, {0, 3}, {.temperature = temperature, .top_p = 0.9f}, {0, 1});
      CHECK(drawn == std::vector<std::int32_t>{1, -1});
    }
  }
}

/// The token that (seed, counter) draws by definition: sorts all tokens, applies top_k and min_p, and takes
/// the shortest prefix that reaches top_p. `slack` is how close the draw came to another answer.
std::int32_t naive_draw(const std::vector<float>& logits, const SamplingConfig& config, std::uint64_t counter,
                        double& slack) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  const auto k = static_cast<std::size_t>(config.top_k);
  if (k > 0 && k < order.size()) {
    std::size_t kept = k;
    while (kept < order.size() && logits[order[kept]] == logits[order[k - 1]]) ++kept;
    order.resize(kept);
  }
  std::vector<double> share;
  double total = 0.0;
  slack = 1.0;
  for (const std::size_t id : order) {
    const double likely = std::exp((double{logits[id]} - logits[order[0]]) / config.temperature);
    if (likely != 1.0 && config.min_p > 0.0f)
      slack = std::min(slack, std::abs(likely - config.min_p) / config.min_p);
    if (likely < config.min_p) break;
    share.push_back(likely);
  }
  for (const double value : share) total += value;
  const double top_p = config.top_p;
  std::size_t nucleus = 0;
  double mass = 0.0;
  while (nucleus < share.size() && (nucleus == 0 || mass < top_p * total)) mass += share[nucleus++];
  if (top_p < 1.0) {
    slack = std::min(slack, std::abs(mass - top_p * total) / total);
    slack = std::min(slack, std::abs(mass - share[nucleus - 1] - top_p * total) / total);
  }
  const double target = philox_uniform(config.seed, counter) * mass;
  double reached = 0.0;
  for (std::size_t i = 0; i < nucleus; ++i) {
    reached += share[i];
    slack = std::min(slack, std::abs(reached - target) / total);
    if (target < reached) return static_cast<std::int32_t>(order[i]);
  }
  return static_cast<std::int32_t>(order[nucleus - 1]);
}

TEST_CASE("draws equal the definition for flat and peaked logits, small and large nuclei") {
  std::mt19937 generator(12);
  std::normal_distribution<float> normal;
  int compared = 0;
  for (const std::size_t vocab : {1u, 2u, 63u, 64u, 65u, 513u, 3000u}) {
    for (const float spread : {0.0f, 0.5f, 6.0f}) {
      std::vector<float> logits(vocab);
      for (float& value : logits) value = std::round(spread * normal(generator) * 8.0f) / 8.0f;  // with ties
      if (vocab > 2) logits[1] = -kInf;
      for (const float temperature : {0.3f, 1.0f, 2.5f}) {
        for (const float top_p : {1e-6f, 0.3f, 0.9f, 0.999f, 1.0f}) {
          for (std::uint64_t counter = 0; counter < 16; ++counter) {
            // Every second draw also uses other cuts.
            const SamplingConfig config{
                .temperature = temperature,
                .top_p = top_p,
                .min_p = counter % 2 == 0 ? 0.0f : std::array{0.0f, 0.01f, 0.2f, 1.0f}[counter / 2 % 4],
                .top_k = counter % 2 == 0 ? 0 : std::array{1, 2, 40, 2999, 5000}[counter / 2 % 5],
                .seed = 1};
            double slack = 0.0;
            const std::int32_t expected = naive_draw(logits, config, counter, slack);
            if (slack < 1e-12) continue;
            ++compared;
            CAPTURE(vocab, spread, temperature, top_p, config.min_p, config.top_k, counter);
            REQUIRE(sample_one(logits, config, counter) == expected);
          }
        }
      }
    }
  }
  CHECK(compared > 4000);
}

TEST_CASE("a draw depends on the seed, the row's counter and its logits, not on shards, rows or threads") {
  std::mt19937 generator(13);
  std::normal_distribution<float> normal;
  std::vector<float> logits(1000);
  for (float& value : logits) value = normal(generator);
  const std::vector<std::uint64_t> counters{5, 5, 6, 1ull << 40, 5};
  const std::vector<std::vector<float>> rows(5, logits);
  const SamplingConfig config{.temperature = 1.0f, .top_p = 0.95f, .seed = 77};
  const auto tokens = sample(rows, {0, 1000}, config, counters);
  CHECK(tokens[0] == tokens[1]);
  CHECK(tokens[0] == tokens[4]);
  CHECK((tokens[0] != tokens[2] || tokens[0] != tokens[3]));
  CHECK(tokens == sample(rows, {0, 1, 1, 500, 999, 1000}, config, counters, 3));
  CHECK(tokens.front() == sample({logits}, {0, 1000}, config, {5}).front());
  CHECK(tokens != sample(rows, {0, 1000}, {.temperature = 1.0f, .top_p = 0.95f, .seed = 78}, counters));
}

TEST_CASE("each row draws by its own config, also beside rows that are greedy") {
  const std::vector<float> logits{0.0f, 0.5f, 0.25f, 0.0f};
  const SamplingConfig random{.temperature = 1.0f, .seed = 3};
  const Operators ops;
  const Operators::Stream stream = ops.create_stream();
  int others = 0;  // draws of another token than the likeliest
  for (std::uint64_t counter = 0; counter < 20; ++counter) {
    for (const std::size_t greedy_row : {0u, 1u}) {
      CAPTURE(counter, greedy_row);
      std::vector<float> rows(logits);
      rows.insert(rows.end(), logits.begin(), logits.end());
      const std::vector<std::int64_t> begins{0, 4};
      const std::vector<std::uint64_t> counters{counter, counter};
      std::vector<SamplingConfig> configs{random, random};
      configs[greedy_row] = {};
      std::vector<std::int32_t> tokens(2, -1);
      ops.sample({.logits = {rows.data(), {1, 2, 4}},
                  .shard_begins = begins.data(),
                  .configs = configs.data(),
                  .counters = counters.data(),
                  .tokens = tokens.data()},
                 stream);
      ops.synchronize(stream);
      const std::int32_t drawn = sample_one(logits, random, counter);
      CHECK(tokens[greedy_row] == 1);
      CHECK(tokens[1 - greedy_row] == drawn);
      others += drawn != 1 ? 1 : 0;
    }
  }
  CHECK(others > 0);
}

TEST_CASE("the nucleus ends where it reaches top_p, and equal logits enter it by id") {
  // Half of four equal tokens are two of them, exactly.
  for (std::uint64_t counter = 0; counter < 100; ++counter)
    CHECK(sample_one({1, 1, 1, 1}, {.temperature = 1.0f, .top_p = 0.5f, .seed = 1}, counter) < 2);
  // Shares 1/2, 1/4, 1/8, 1/8: exact in double.
  const std::vector<float> logits{std::log(1.0f), std::log(4.0f), std::log(1.0f), std::log(2.0f)};
  const auto drawn = [&](float top_p) {
    std::vector<int> seen(4);
    for (std::uint64_t counter = 0; counter < 400; ++counter)
      ++seen[static_cast<std::size_t>(
          sample_one(logits, {.temperature = 1.0f, .top_p = top_p, .seed = 1}, counter))];
    return seen;
  };
  std::vector<int> seen = drawn(0.49f);
  CHECK(seen == std::vector<int>{0, 400, 0, 0});
  seen = drawn(0.6f);
  // Shares of one third and two thirds.
  CHECK((seen[0] == 0 && seen[2] == 0 && seen[3] > 90 && seen[1] > 200));
  seen = drawn(0.8f);
  CHECK((seen[0] > 20 && seen[2] == 0));  // of two equal tokens only the one with the smaller id
  seen = drawn(1.0f);
  CHECK((seen[0] > 20 && seen[2] > 20));
}

TEST_CASE("the log-probability of a token outside the vocabulary is NaN") {
  const Operators ops;
  const Operators::Stream stream = ops.create_stream();
  std::vector<float> logits(5 * 3, 0.0f);  // one row per token
  const std::vector<std::int64_t> begins{0, 3};
  const std::vector<std::int32_t> tokens{-1, 3, std::numeric_limits<std::int32_t>::max(), 0, 2};
  std::vector<float> log_probs(5, 7.0f);
  ops.log_probs({.logits = {logits.data(), {1, 5, 3}},
                 .shard_begins = begins.data(),
                 .tokens = tokens.data(),
                 .log_probs = log_probs.data()},
                stream);
  ops.synchronize(stream);
  for (const std::size_t outside : {0, 1, 2}) CHECK(std::isnan(log_probs[outside]));
  for (const std::size_t inside : {3, 4}) CHECK(log_probs[inside] == Approx(-std::log(3.0)));
}

TEST_CASE("a penalty of a row that is not there is an Error and changes nothing") {
  const Operators ops;
  for (const std::int32_t row : {-1, 2, std::numeric_limits<std::int32_t>::max()}) {
    CAPTURE(row);
    const Operators::Stream stream = ops.create_stream();
    std::vector<float> logits{1, 2, 3, 4, 9, 9, 9};  // two rows of two, and what is not theirs
    const std::vector<float> before = logits;
    const std::vector<std::int64_t> begins{0, 2};
    const LogitPenalty penalty{.row = row, .id = 0, .subtract = 1.0f};
    ops.penalize({.logits = {logits.data(), {1, 2, 2}},
                  .shard_begins = begins.data(),
                  .penalties = &penalty,
                  .count = 1},
                 stream);
    CHECK_THROWS_WITH(ops.synchronize(stream),
                      Catch::Matchers::ContainsSubstring("penalties[0] is for row " + std::to_string(row) +
                                                         "; the logits have rows [0, 2)"));
    CHECK(logits == before);
  }
}

TEST_CASE("the likeliest tokens come with the smaller id first on ties, and -1 beyond the vocabulary") {
  const Operators ops;
  const Operators::Stream stream = ops.create_stream();
  std::vector<float> logits{0, 2, 1, 2};
  const std::vector<std::int64_t> begins{0, 4};
  const std::int32_t token = 0;
  float log_prob = 0;
  std::vector<std::int32_t> ids(6, 77);
  std::vector<float> values(6);
  const auto find_best = [&](int num_best) {
    ops.log_probs({.logits = {logits.data(), {1, 1, 4}},
                   .shard_begins = begins.data(),
                   .tokens = &token,
                   .num_best = num_best,
                   .log_probs = &log_prob,
                   .best_ids = ids.data(),
                   .best_log_probs = values.data()},
                  stream);
    ops.synchronize(stream);
  };
  find_best(6);
  CHECK(ids == std::vector<std::int32_t>{1, 3, 2, 0, -1, -1});
  find_best(1);  // of equals there is room for the first only
  CHECK(ids.front() == 1);
}

}  // namespace
}  // namespace helix::test
