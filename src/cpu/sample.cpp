// SPDX-License-Identifier: Apache-2.0
// cpu::Operators::sample: greedy or nucleus sampling, a function of logits, seed and counter alone.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>

#include "cpu/philox.hpp"

namespace helix::cpu {
namespace {

struct Candidate {
  float logit;
  std::int32_t id;
};

/// Likeliest first; the smaller id on ties.
bool comes_before(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

/// Calls visit(logit, id) for each id of one row, in increasing id.
template <class Visit>
void for_each_logit(const SampleArgs<float>& args, std::int64_t row, const Visit& visit) {
  for (std::int64_t shard = 0; shard < args.logits.extent(0); ++shard) {
    const std::int64_t begin = args.shard_begins[shard];
    const std::int64_t end = args.shard_begins[shard + 1];
    for (std::int64_t id = begin; id < end; ++id)
      visit(args.logits(shard, row, id - begin), static_cast<std::int32_t>(id));
  }
}

std::int32_t greedy(const SampleArgs<float>& args, std::int64_t row) {
  Candidate best{-std::numeric_limits<float>::infinity(), -1};
  for_each_logit(args, row, [&](float logit, std::int32_t id) {
    HELIX_EXPECTS(!std::isnan(logit), ErrorCode::invalid_argument, "sample: the logit of token ", id,
                  " in row ", row, " is NaN");
    if (logit > best.logit) best = {logit, id};
  });
  HELIX_EXPECTS(best.id >= 0, ErrorCode::invalid_argument, "sample: row ", row, " has no logit above -inf");
  return best.id;
}

std::int32_t draw(const SampleArgs<float>& args, std::int64_t row) {
  std::vector<Candidate> candidates;
  candidates.reserve(static_cast<std::size_t>(args.shard_begins[args.logits.extent(0)]));
  for_each_logit(args, row, [&](float logit, std::int32_t id) {
    HELIX_EXPECTS(!std::isnan(logit), ErrorCode::invalid_argument, "sample: the logit of token ", id,
                  " in row ", row, " is NaN");
    candidates.push_back({logit, id});
  });
  std::sort(candidates.begin(), candidates.end(), comes_before);
  HELIX_EXPECTS(!candidates.empty() && std::isfinite(candidates.front().logit), ErrorCode::invalid_argument,
                "sample: row ", row, " has no finite largest logit");
  const double max = candidates.front().logit;
  const auto weight = [&](const Candidate& c) { return std::exp((c.logit - max) / args.temperature); };
  double total = 0.0;
  for (const Candidate& candidate : candidates) total += weight(candidate);

  // The nucleus: the shortest prefix that reaches top_p of the mass; at least one token.
  double mass = 0.0;
  std::size_t nucleus = 0;
  while (nucleus < candidates.size() && (nucleus == 0 || mass < args.top_p * total))
    mass += weight(candidates[nucleus++]);

  double rest = philox_uniform(args.seed, args.counters[row]) * mass;
  for (std::size_t i = 0; i + 1 < nucleus; ++i) {
    rest -= weight(candidates[i]);
    if (rest < 0.0) return candidates[i].id;
  }
  return candidates[nucleus - 1].id;
}

}  // namespace

void Operators::sample(const SampleArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const auto body = [&](std::int64_t row, int) {
      args.tokens[row] = args.temperature == 0.0f ? greedy(args, row) : draw(args, row);
    };
    pool->parallel_for(args.logits.extent(1), std::ref(body));
  });
}

}  // namespace helix::cpu
