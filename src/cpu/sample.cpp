// SPDX-License-Identifier: Apache-2.0
// cpu::Operators::sample: greedy or nucleus sampling, a function of logits, seed and counter alone.
#include <algorithm>
#include <cmath>
#include <cstddef>
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

/// The likeliest token. @throws Error(invalid_argument) if a logit is NaN or +inf, or all are -inf: the model
/// has gone wrong, and any choice would hide it.
Candidate likeliest(const SampleArgs<float>& args, std::int64_t row) {
  Candidate best{-std::numeric_limits<float>::infinity(), -1};
  for_each_logit(args, row, [&](float logit, std::int32_t id) {
    HELIX_EXPECTS(!std::isnan(logit), ErrorCode::invalid_argument, "sample: the logit of token ", id,
                  " in row ", row, " is NaN");
    if (logit > best.logit) best = {logit, id};
  });
  HELIX_EXPECTS(std::isfinite(best.logit), ErrorCode::invalid_argument, "sample: the largest logit of row ",
                row, " is ", best.logit, "; it must be finite");
  return best;
}

/// All tokens of one row, of which ever more are in order. A nucleus is a few tokens of a hundred thousand:
/// they are found by selection, not by sorting the vocabulary.
class Ranking {
 public:
  explicit Ranking(std::vector<Candidate>& candidates) : candidates_(candidates) {}

  std::size_t size() const { return candidates_.size(); }

  /// The token with the `index`-th largest logit.
  const Candidate& operator[](std::size_t index) {
    while (index >= sorted_) {
      const std::size_t end = std::min(candidates_.size(), std::max<std::size_t>(64, 8 * sorted_));
      const auto at = [&](std::size_t i) { return candidates_.begin() + static_cast<std::ptrdiff_t>(i); };
      if (end < candidates_.size()) std::nth_element(at(sorted_), at(end), candidates_.end(), comes_before);
      std::sort(at(sorted_), at(end), comes_before);
      sorted_ = end;
    }
    return candidates_[index];
  }

 private:
  std::vector<Candidate>& candidates_;
  std::size_t sorted_ = 0;
};

std::int32_t draw(const SampleArgs<float>& args, std::int64_t row) {
  const double max = likeliest(args, row).logit;
  const auto weight = [&](float logit) { return std::exp((logit - max) / args.temperature); };
  thread_local std::vector<Candidate>
      candidates;  // grows to the vocabulary once, then steps allocate nothing
  candidates.clear();
  double total = 0.0;  // in the order of ids, so that it does not depend on the shards
  for_each_logit(args, row, [&](float logit, std::int32_t id) {
    const double w = weight(logit);
    total += w;
    if (w > 0.0) candidates.push_back({logit, id});
  });
  Ranking ranking(candidates);

  // The nucleus: the shortest prefix that reaches top_p of the mass; at least one token.
  std::size_t nucleus = ranking.size();
  double mass = total;
  if (args.top_p < 1.0f) {
    const double wanted = static_cast<double>(args.top_p) * total;
    mass = weight(ranking[0].logit);
    for (nucleus = 1; nucleus < ranking.size() && mass < wanted; ++nucleus)
      mass += weight(ranking[nucleus].logit);
  }
  double rest = philox_uniform(args.seed, args.counters[row]) * mass;
  for (std::size_t i = 0; i + 1 < nucleus; ++i) {
    rest -= weight(ranking[i].logit);
    if (rest < 0.0) return ranking[i].id;
  }
  return ranking[nucleus - 1].id;
}

}  // namespace

void Operators::sample(const SampleArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const auto body = [&](std::int64_t row, int) {
      args.tokens[row] = args.temperature == 0.0f ? likeliest(args, row).id : draw(args, row);
    };
    pool->parallel_for(args.logits.extent(1), std::cref(body));
  });
}

}  // namespace helix::cpu
