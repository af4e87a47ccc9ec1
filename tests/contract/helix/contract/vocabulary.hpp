// SPDX-License-Identifier: Apache-2.0
// Embedding, logits and sampling, compared with their definitions in double.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include <helix/contract/workbench.hpp>

namespace helix::contract {

template <TestableBackend B>
void embed_and_gather() {
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t width : {1, 16, 33}) {
      CAPTURE(to_string(dtype), width);
      Workbench<B> bench;
      const auto table = bench.weight(5, width, dtype);
      const auto ids = bench.array(std::vector<std::int32_t>{10, 14, 9, 15, 12, 0, -1, 2147483647});
      const auto out = bench.poison(8 * width);
      HELIX_CHECK_OPERATION(
          bench, embed, ([&](const auto& side) {
            return EmbedArgs<float>{side(ids), table.on(side), 10, side.view(out, 8, width)};
          }));
      const auto in = bench.random(6 * width);
      const auto rows = bench.array(std::vector<std::int32_t>{5, 0, 3, 3});
      const auto gathered = bench.poison(4 * width);
      for (const std::int64_t count : {0, 4}) {
        HELIX_CHECK_OPERATION(bench, gather_rows, ([&](const auto& side) {
                                return GatherRowsArgs<float>{side.view(in, 6, width), side(rows),
                                                             side.view(gathered, count, width)};
                              }));
      }
    }
  }
}

template <TestableBackend B>
void logit_norms() {
  // Shards of unequal width, one of them empty; padding follows their ends.
  constexpr std::int64_t kShards = 3;
  for (const std::int64_t width : {1, 40, 1500}) {
    for (const std::int64_t rows : {0, 1, 3}) {
      CAPTURE(width, rows);
      Workbench<B> bench;
      const std::vector<std::int64_t> begins{0, width, width, width + (width + 1) / 2};
      std::vector<float> values = bench.random_values(kShards * rows * width, 3.0);
      for (std::int64_t s = 0; s < kShards; ++s)
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t i = begins[static_cast<std::size_t>(s + 1)] - begins[static_cast<std::size_t>(s)];
               i < width; ++i)
            values[static_cast<std::size_t>((s * rows + r) * width + i)] = std::nanf("");
      const auto logits = bench.array(values);
      const auto shard_begins = bench.array(begins);
      const auto norms = bench.poison(rows + 1);
      HELIX_CHECK_OPERATION(bench, logit_norms, ([&](const auto& side) {
                              return LogitNormsArgs<float>{side.view(logits, kShards, rows, width),
                                                           side(shard_begins), side(norms)};
                            }));
    }
  }
}

template <TestableBackend B>
void advance() {
  for (const std::int64_t count : {0, 1, 3, 700}) {
    CAPTURE(count);
    Workbench<B> bench;
    std::vector<std::int64_t> values{-1, 0, std::int64_t{1} << 40};
    for (std::int64_t i = std::ssize(values); i <= count; ++i) values.push_back(i % 7 - 1);
    const auto positions = bench.array(values);
    HELIX_CHECK_OPERATION(bench, advance, ([&](const auto& side) {
                            return AdvanceArgs{side(positions), count};
                          }));
  }
}

/// Draws for `rows` rows of equal logits, cut into shards of at most `width` ids; padding is NaN. Without a
/// config it makes no draws.
template <TestableBackend B>
std::vector<std::int32_t> draw(const std::vector<float>& row_logits, std::int64_t rows, std::int64_t width,
                               const std::optional<SamplingConfig>& config) {
  Workbench<B> bench;
  const auto vocab = static_cast<std::int64_t>(row_logits.size());
  const std::int64_t shards = (vocab + width - 1) / width;
  std::vector<float> values(static_cast<std::size_t>(shards * rows * width), std::nanf(""));
  std::vector<std::int64_t> begins;
  for (std::int64_t s = 0; s <= shards; ++s) begins.push_back(std::min(vocab, s * width));
  for (std::int64_t id = 0; id < vocab; ++id)
    for (std::int64_t r = 0; r < rows; ++r)
      values[static_cast<std::size_t>(((id / width) * rows + r) * width + id % width)] =
          row_logits[static_cast<std::size_t>(id)];
  std::vector<std::uint64_t> counter_values;
  for (std::int64_t r = 0; r < rows; ++r) counter_values.push_back(static_cast<std::uint64_t>(r));
  const auto logits = bench.array(values);
  const auto shard_begins = bench.array(begins);
  const auto counters = bench.array(counter_values);
  const auto configs = bench.array(
      std::vector<SamplingConfig>(static_cast<std::size_t>(rows), config.value_or(SamplingConfig{})));
  const auto tokens = bench.array(std::vector<std::int32_t>(static_cast<std::size_t>(rows), -5));
  bench.upload();
  const auto side = bench.device_side();
  bench.backend().sample(SampleArgs<float>{side.view(logits, shards, rows, width), side(shard_begins),
                                           config ? side(configs) : nullptr, side(counters), side(tokens)},
                         bench.stream());
  return bench.values(bench.download(), tokens);
}

template <TestableBackend B>
void sample() {
  for (const std::int64_t vocab : {1, 7, 100}) {
    for (const std::int64_t width : {1, 8, 100}) {
      CAPTURE(vocab, width);
      Workbench<B> source;
      std::vector<float> logits = source.random_values(vocab, 4.0);
      const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
      const std::vector<std::int32_t> greedy(2, static_cast<std::int32_t>(best));
      CHECK(draw<B>(logits, 2, width, SamplingConfig{}) == greedy);
      CHECK(draw<B>(logits, 2, width, std::nullopt) == greedy);
      logits.back() = logits[static_cast<std::size_t>(best)];  // a tie goes to the smaller id
      CHECK(draw<B>(logits, 1, width, SamplingConfig{.top_k = 3}).front() == best);
      // Cuts that leave only one token are greedy too.
      logits.back() -= 0.5f;
      for (const SamplingConfig& config : {SamplingConfig{.temperature = 0.7f, .top_p = 1e-6f, .seed = 1},
                                           SamplingConfig{.temperature = 0.7f, .min_p = 1.0f, .seed = 1},
                                           SamplingConfig{.temperature = 0.7f, .top_k = 1, .seed = 1}}) {
        CHECK(draw<B>(logits, 3, width, config) ==
              std::vector<std::int32_t>(3, static_cast<std::int32_t>(best)));
      }
    }
  }
  // Invalid logits draw no token.
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad : {std::nanf(""), kInfinity}) {
    for (const float temperature : {0.0f, 0.7f})
      CHECK(draw<B>({1.0f, bad, 0.5f}, 1, 2, SamplingConfig{.temperature = temperature}).front() == -1);
  }
  CHECK(draw<B>({-kInfinity, -kInfinity}, 1, 2, SamplingConfig{}).front() == -1);
  // Frequencies follow softmax(logits / temperature) over the remaining tokens, whatever the shards.
  const std::vector<float> logits{0.0f, 1.0f, -1.0f, 0.5f, -20.0f, 0.9f};
  constexpr std::int64_t kRows = 4000;
  constexpr float kTemperature = 0.8f;
  for (const SamplingConfig& config :
       {SamplingConfig{.temperature = kTemperature, .seed = 17},
        SamplingConfig{.temperature = kTemperature, .top_p = 0.7f, .seed = 17},
        SamplingConfig{.temperature = kTemperature, .top_k = 3, .seed = 17},
        SamplingConfig{.temperature = kTemperature, .top_k = 100, .seed = 17},
        SamplingConfig{.temperature = kTemperature, .min_p = 0.5f, .seed = 17},
        SamplingConfig{.temperature = kTemperature, .top_p = 0.8f, .min_p = 0.01f, .top_k = 4, .seed = 17}}) {
    CAPTURE(config.top_p, config.top_k, config.min_p);
    const auto tokens = draw<B>(logits, kRows, 6, config);
    CHECK(tokens == draw<B>(logits, kRows, 6, config));
    CHECK(tokens == draw<B>(logits, kRows, 4, config));
    CHECK(tokens == draw<B>(logits, kRows, 1, config));
    SamplingConfig other = config;
    other.seed = 18;
    CHECK(tokens != draw<B>(logits, kRows, 6, other));

    std::vector<double> likely;
    for (const float logit : logits) likely.push_back(std::exp(double{logit} / kTemperature));
    double total = 0.0;
    for (const double weight : likely) total += weight;
    for (double& weight : likely) weight /= total;
    const std::vector<std::int64_t> kept = reference::kept_ids(likely, config);
    double kept_total = 0.0;
    for (const std::int64_t id : kept) kept_total += likely[static_cast<std::size_t>(id)];
    for (std::size_t id = 0; id < logits.size(); ++id) {
      const bool is_kept = std::find(kept.begin(), kept.end(), static_cast<std::int64_t>(id)) != kept.end();
      const double expected = is_kept ? likely[id] / kept_total : 0.0;
      const auto seen =
          static_cast<double>(std::count(tokens.begin(), tokens.end(), static_cast<std::int32_t>(id)));
      CAPTURE(id, expected, seen);
      CHECK(std::abs(seen / kRows - expected) <=
            5.0 * std::sqrt(expected * (1.0 - expected) / kRows) + 1e-12);
    }
  }
}

/// Logits [3 shards, rows, width]. The shards are uneven and padded, and one is empty.
template <TestableBackend B>
std::vector<float> padded_logits(Workbench<B>& bench, const std::vector<std::int64_t>& begins,
                                 std::int64_t rows, std::int64_t width) {
  std::vector<float> values = bench.random_values(3 * rows * width, 3.0);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t shard = i / static_cast<std::size_t>(rows * width);
    if (static_cast<std::int64_t>(i) % width >= begins[shard + 1] - begins[shard]) values[i] = std::nanf("");
  }
  return values;
}

template <TestableBackend B>
void penalties_and_log_probs() {
  for (const std::int64_t width : {1, 40, 1500}) {
    for (const std::int64_t rows : {1, 3}) {
      CAPTURE(width, rows);
      Workbench<B> bench;
      const std::vector<std::int64_t> begins{0, width, width, width + (width + 1) / 2};
      const auto last_row = static_cast<std::int32_t>(rows - 1);
      const auto last_id = static_cast<std::int32_t>(begins.back() - 1);
      const auto logits = bench.array(padded_logits(bench, begins, rows, width));
      const auto shard_begins = bench.array(begins);
      // Includes a factor below 1, which makes a token more likely, the same id in two rows, and ids beyond
      // the vocabulary.
      std::vector<LogitPenalty> values{{0, 0, 1.3f, 0.0f},
                                       {last_row, last_id, 0.7f, -0.25f},
                                       {0, last_id + 1, 2.0f, 1.0f},
                                       {0, -1, 2.0f, 1.0f},
                                       {last_row, std::numeric_limits<std::int32_t>::max(), 2.0f, 1.0f}};
      if (rows > 1) values.push_back({0, last_id, 1.0f, 1.5f});
      const auto penalties = bench.array(values);
      for (const std::int64_t count : {std::int64_t{0}, std::ssize(values)}) {
        HELIX_CHECK_OPERATION(bench, penalize, ([&](const auto& side) {
                                return PenalizeArgs<float>{side.view(logits, 3, rows, width),
                                                           side(shard_begins), side(penalties), count};
                              }));
      }
      const auto tokens = bench.array(std::vector<std::int32_t>{last_id, 0, last_id / 2});
      const auto log_probs = bench.poison(rows + 1);
      for (const std::int64_t num_best : {0, 1, 5}) {
        const auto ids = bench.array(std::vector<std::int32_t>(static_cast<std::size_t>(rows * 5 + 1), -7));
        const auto best = bench.poison(rows * 5 + 1);
        HELIX_CHECK_OPERATION(bench, log_probs, ([&](const auto& side) {
                                return LogProbsArgs<float>{side.view(logits, 3, rows, width),
                                                           side(shard_begins),
                                                           side(tokens),
                                                           num_best,
                                                           side(log_probs),
                                                           side(ids),
                                                           side(best)};
                              }));
      }
    }
  }
}

}  // namespace helix::contract
