// SPDX-License-Identifier: Apache-2.0
// The steps that a layer runs, and the oracle's results for them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "support/oracle.hpp"
#include "support/random_layer.hpp"

namespace helix::test {

/// The input of all ranks in one step.
struct Step {
  std::vector<std::int64_t> counts;    // new tokens of each sequence, possibly 0
  std::vector<std::int64_t> rejected;  // tokens of each sequence that are truncated after the step
  std::vector<float> hidden;           // [tokens, M]

  std::int64_t num_tokens() const {
    std::int64_t n = 0;
    for (std::int64_t count : counts) n += count;
    return n;
  }
};

struct Script {
  std::int64_t sequences = 0;
  std::vector<Step> steps;

  std::int64_t max_step_tokens() const {
    std::int64_t n = 0;
    for (const Step& step : steps) n = std::max(n, step.num_tokens());
    return n;
  }
  std::vector<std::int64_t> lengths() const {
    std::vector<std::int64_t> total(static_cast<std::size_t>(sequences), 0);
    for (const Step& step : steps)
      for (std::size_t b = 0; b < total.size(); ++b) total[b] += step.counts[b];
    return total;
  }
};

/// A ragged prefill; a decode step in which some sequences have no tokens; four draft tokens, some of which
/// are rejected; then one token per sequence and a prefill chunk of the last sequence.
inline Script ragged_script(std::int64_t sequences, std::int64_t hidden, std::uint32_t seed) {
  Script script;
  script.sequences = sequences;
  const auto add = [&](auto count_of, auto rejected_of) {
    Step step;
    for (std::int64_t b = 0; b < sequences; ++b) {
      step.counts.push_back(count_of(b));
      step.rejected.push_back(rejected_of(b));
    }
    step.hidden = RandomMatrices(seed + static_cast<std::uint32_t>(script.steps.size()))
                      .vector(step.num_tokens() * hidden, 1.0);
    script.steps.push_back(std::move(step));
  };
  const auto none = [](std::int64_t) { return 0; };
  add([](std::int64_t b) { return b % 5 == 1 ? 0 : 1 + b * 5 % 9 + (b == 0 ? 12 : 0); }, none);
  add([](std::int64_t b) { return b % 4 == 3 ? 0 : 1; }, none);
  add([](std::int64_t) { return 4; }, [](std::int64_t b) { return (b + 3) % 5; });
  add([&](std::int64_t b) { return b == sequences - 1 ? 6 : 1; }, none);
  return script;
}

/// The oracle's hidden states of every step, and its cache at the end.
struct Expected {
  std::vector<std::vector<double>> hidden;
  std::vector<oracle::History> histories;
  double routing_margin = 1e30;
};

inline Expected run_oracle(const oracle::Layer& layer, const Script& script) {
  Expected expected;
  expected.histories.resize(static_cast<std::size_t>(script.sequences));
  for (const Step& step : script.steps) {
    std::vector<double> all;
    std::size_t begin = 0;
    for (std::size_t b = 0; b < expected.histories.size(); ++b) {
      const auto count = static_cast<std::size_t>(step.counts[b] * layer.hidden);
      const std::vector<double> out =
          oracle::run_layer(layer, expected.histories[b], std::span(step.hidden).subspan(begin, count),
                            &expected.routing_margin);
      all.insert(all.end(), out.begin(), out.end());
      begin += count;
      auto& rows = expected.histories[b].rows;
      rows.resize(rows.size() - static_cast<std::size_t>(step.rejected[b]));
    }
    expected.hidden.push_back(std::move(all));
  }
  return expected;
}

}  // namespace helix::test
