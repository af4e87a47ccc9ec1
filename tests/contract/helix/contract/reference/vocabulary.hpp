// SPDX-License-Identifier: Apache-2.0
// Embedding, logits and sampling, by their definitions in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <helix/backend/vocabulary.hpp>
#include <helix/contract/reference/dense.hpp>
#include <helix/contract/reference/elements.hpp>

namespace helix::contract::reference {

inline void embed(const EmbedArgs<float>& args) {
  for (std::int64_t t = 0; t < args.out.extent(0); ++t) {
    const std::int64_t row = args.ids[t] - args.first_id;
    const bool is_here = row >= 0 && row < args.table.rows;
    for (std::int64_t i = 0; i < args.out.extent(1); ++i)
      args.out(t, i) = is_here ? static_cast<float>(load(args.table, row, i)) : 0.0f;
  }
}

inline void gather_rows(const GatherRowsArgs<float>& args) {
  for (std::int64_t r = 0; r < args.out.extent(0); ++r)
    for (std::int64_t i = 0; i < args.out.extent(1); ++i) args.out(r, i) = args.in(args.rows[r], i);
}

inline void logit_norms(const LogitNormsArgs<float>& args) {
  for (std::int64_t row = 0; row < args.logits.extent(1); ++row) {
    double norm = 0.0;
    for (std::int64_t s = 0; s < args.logits.extent(0); ++s)
      for (std::int64_t i = 0; i < args.shard_begins[s + 1] - args.shard_begins[s]; ++i)
        norm = std::hypot(norm, double{args.logits(s, row, i)});
    args.norms[row] = static_cast<float>(norm);
  }
}

/// Address of the logit of `id` in one row, or nullptr.
template <class Args>
auto* logit_at(const Args& args, std::int64_t row, std::int64_t id) {
  auto* found = static_cast<decltype(&args.logits(0, 0, 0))>(nullptr);
  for (std::int64_t s = 0; s < args.logits.extent(0); ++s)
    if (id >= args.shard_begins[s] && id < args.shard_begins[s + 1])
      found = &args.logits(s, row, id - args.shard_begins[s]);
  return found;
}

inline void penalize(const PenalizeArgs<float>& args) {
  for (std::int64_t i = 0; i < args.count; ++i) {
    const LogitPenalty& penalty = args.penalties[i];
    float* const logit = logit_at(args, penalty.row, penalty.id);
    if (logit == nullptr) continue;
    const float scaled = *logit > 0.0f ? *logit / penalty.repetition : *logit * penalty.repetition;
    *logit = scaled - penalty.subtract;
  }
}

inline void advance(const AdvanceArgs& args) {
  for (std::int64_t i = 0; i < args.count; ++i)
    if (args.values[i] != -1) args.values[i] = args.values[i] + 1;
}

/// Whether a row has a token to draw: no logit is NaN or +inf, and at least one is above -inf.
inline bool has_likeliest(const SampleArgs<float>& args, std::int64_t row) {
  bool has_one = false;
  for (std::int64_t id = 0; id < args.shard_begins[args.logits.extent(0)]; ++id) {
    const float logit = *logit_at(args, row, id);
    if (std::isnan(logit) || logit == std::numeric_limits<float>::infinity()) return false;
    has_one = has_one || logit > -std::numeric_limits<float>::infinity();
  }
  return has_one;
}

/// Probability of each id of one row: softmax(logits / temperature), or softmax(logits) for temperature 0.
template <class Args>
std::vector<double> probabilities(const Args& args, std::int64_t row, float temperature_or_0) {
  std::vector<double> values;
  for (std::int64_t s = 0; s < args.logits.extent(0); ++s)
    for (std::int64_t i = args.shard_begins[s]; i < args.shard_begins[s + 1]; ++i)
      values.push_back(args.logits(s, row, i - args.shard_begins[s]));
  const double highest = *std::max_element(values.begin(), values.end());
  const double temperature = temperature_or_0 > 0.0f ? double{temperature_or_0} : 1.0;
  double total = 0.0;
  for (double& value : values) total += value = std::exp((value - highest) / temperature);
  for (double& value : values) value /= total;
  return values;
}

/// The ids that remain after the cuts, likeliest first.
inline std::vector<std::int64_t> kept_ids(const std::vector<double>& likely, const SamplingConfig& config) {
  const double top_p = config.temperature > 0.0f ? config.top_p : 0.0;
  std::vector<std::int64_t> order = largest(likely, static_cast<std::int64_t>(likely.size()));
  const auto likelihood = [&](std::size_t place) { return likely[static_cast<std::size_t>(order[place])]; };
  std::size_t size = order.size();
  if (config.top_k > 0 && static_cast<std::size_t>(config.top_k) < size) {
    const double smallest = likelihood(static_cast<std::size_t>(config.top_k) - 1);
    while (likelihood(size - 1) < smallest) --size;
  }
  while (size > 1 && likelihood(size - 1) < double{config.min_p} * likelihood(0)) --size;
  order.resize(size);
  double total = 0.0;
  for (std::size_t i = 0; i < size; ++i) total += likelihood(i);
  double reached = 0.0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    reached += likelihood(i);
    if (reached >= top_p * total) {
      order.resize(i + 1);
      break;
    }
  }
  return order;
}

/// The concept defines the distribution but not the generator: this draw is one of many legal ones.
inline void sample(const SampleArgs<float>& args) {
  for (std::int64_t row = 0; row < args.logits.extent(1); ++row) {
    const SamplingConfig config = args.configs == nullptr ? SamplingConfig{} : args.configs[row];
    if (!has_likeliest(args, row)) {
      args.tokens[row] = -1;
      continue;
    }
    const std::vector<double> likely = probabilities(args, row, config.temperature);
    const std::vector<std::int64_t> kept = kept_ids(likely, config);
    std::int64_t drawn = kept.front();
    if (config.temperature > 0.0f) {
      std::uint64_t x = config.seed + 0x9e3779b97f4a7c15u * (args.counters[row] + 1);  // splitmix64
      x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
      x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
      x ^= x >> 31;
      double total = 0.0;
      for (std::int64_t id : kept) total += likely[static_cast<std::size_t>(id)];
      double left = static_cast<double>(x >> 11) * 0x1p-53 * total;
      for (std::int64_t id : kept) {
        drawn = id;
        left -= likely[static_cast<std::size_t>(id)];
        if (left < 0.0) break;
      }
    }
    args.tokens[row] = static_cast<std::int32_t>(drawn);
  }
}

inline void log_probs(const LogProbsArgs<float>& args) {
  for (std::int64_t row = 0; row < args.logits.extent(1); ++row) {
    const std::vector<double> likely = probabilities(args, row, 0.0f);
    const auto vocab = static_cast<std::int64_t>(likely.size());
    const auto log_prob = [&](std::int64_t id) {
      return static_cast<float>(std::log(likely[static_cast<std::size_t>(id)]));
    };
    args.log_probs[row] = log_prob(args.tokens[row]);
    const std::vector<std::int64_t> best = largest(likely, std::min(args.num_best, vocab));
    for (std::int64_t i = 0; i < args.num_best; ++i) {
      const std::int64_t at = row * args.num_best + i;
      args.best_ids[at] = i < vocab ? static_cast<std::int32_t>(best[static_cast<std::size_t>(i)]) : -1;
      args.best_log_probs[at] =
          i < vocab ? log_prob(args.best_ids[at]) : -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace helix::contract::reference
