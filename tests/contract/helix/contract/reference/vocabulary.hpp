// SPDX-License-Identifier: Apache-2.0
// The two ends of the stack by their definitions in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
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

inline void advance(const AdvanceArgs& args) {
  for (std::int64_t i = 0; i < args.count; ++i)
    if (args.values[i] != -1) args.values[i] = args.values[i] + 1;
}

/// Probability of each id of one row, by softmax(logits / temperature); temperature 0: of the logits.
inline std::vector<double> probabilities(const SampleArgs<float>& args, std::int64_t row) {
  std::vector<double> values;
  for (std::int64_t s = 0; s < args.logits.extent(0); ++s)
    for (std::int64_t i = args.shard_begins[s]; i < args.shard_begins[s + 1]; ++i)
      values.push_back(args.logits(s, row, i - args.shard_begins[s]));
  const double highest = *std::max_element(values.begin(), values.end());
  const double temperature = args.temperature > 0.0f ? double{args.temperature} : 1.0;
  double total = 0.0;
  for (double& value : values) total += value = std::exp((value - highest) / temperature);
  for (double& value : values) value /= total;
  return values;
}

/// The ids that top_p keeps, likeliest first.
inline std::vector<std::int64_t> nucleus(const std::vector<double>& likely, double top_p) {
  std::vector<std::int64_t> order = largest(likely, static_cast<std::int64_t>(likely.size()));
  double reached = 0.0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    reached += likely[static_cast<std::size_t>(order[i])];
    if (reached >= top_p) {
      order.resize(i + 1);
      break;
    }
  }
  return order;
}

/// The concept fixes the distribution and not the generator; this draw is one of many legal ones.
inline void sample(const SampleArgs<float>& args) {
  for (std::int64_t row = 0; row < args.logits.extent(1); ++row) {
    const std::vector<double> likely = probabilities(args, row);
    const std::vector<std::int64_t> kept = nucleus(likely, args.temperature > 0.0f ? args.top_p : 0.0);
    std::int64_t drawn = kept.front();
    if (args.temperature > 0.0f) {
      std::uint64_t x = args.seed + 0x9e3779b97f4a7c15u * (args.counters[row] + 1);  // splitmix64
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

}  // namespace helix::contract::reference
