// SPDX-License-Identifier: Apache-2.0
// cpu::Operators: sample, greedy or from the tokens that the cuts leave; depends on logits, config and
// counter alone.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include <helix/cpu/backend.hpp>
#include <helix/philox.hpp>

#include "cpu/sampling/logit_rows.hpp"

namespace helix::cpu {
namespace {

struct Candidate {
  float logit;
  std::int32_t id;
};

/// The likeliest token. The id is -1 if a logit is NaN or +inf, or all are -inf: then the model has failed,
/// and any choice would hide it.
Candidate likeliest(const SampleArgs<float>& args, std::int64_t row) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Candidate best{-kInfinity, -1};
  bool is_sound = true;
  for_each_logit(args, row, [&](float logit, std::int32_t id) {
    is_sound = is_sound && logit < kInfinity;  // false for NaN too
    if (logit > best.logit) best = {logit, id};
  });
  return is_sound ? best : Candidate{-kInfinity, -1};
}

/// An integer in the order of `logit`: flips the sign bit, and all bits of negative numbers.
std::uint32_t key_of(float logit) {
  const auto bits = std::bit_cast<std::uint32_t>(logit + 0.0f);  // -0 becomes 0: they are equally likely
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

float logit_of(std::uint32_t key) {
  return std::bit_cast<float>((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

/// A token by its place in the order of likelihood: number `rank`, from 0, of the tokens with this logit.
struct Place {
  std::uint32_t key = 0;
  std::int64_t rank = 0;
  double mass = 0.0;  // of all tokens up to and including this one

  bool is_behind(const Place& other) const { return key != other.key ? key < other.key : rank > other.rank; }
};

/// One row's tokens, likeliest first (the lower id on ties), without sorting them and using only stack
/// memory: a radix selection by mass, digit by digit of the keys. Sums run in the order of ids within each
/// bucket, so nothing depends on the shards. weight(logit): a token's mass, at least 0.
template <class Weight>
class RankedRow {
 public:
  RankedRow(const SampleArgs<float>& args, std::int64_t row, const Weight& weight)
      : args_(args), row_(row), weight_(weight) {
    for_each_logit(args_, row_, [&](float logit, std::int32_t) {
      const double mass = weight_(logit);
      total_ += mass;
      first_digit_[key_of(logit) >> kShifts[0]] += mass;
    });
  }

  double total() const { return total_; }

  /// The first token at which reached(running mass, including its own) is true, or the last token with any
  /// mass.
  template <class Reached>
  Place find(const Reached& reached) const {
    Place place;
    double above = 0.0;  // mass of the tokens before the current bucket
    Histogram digit = first_digit_;
    for (std::size_t level = 0; level < kShifts.size(); ++level) {
      if (level > 0) {
        const std::uint32_t mask = (1u << (kShifts[level - 1] - kShifts[level])) - 1;
        digit.fill(0.0);
        for_each_logit(args_, row_, [&](float logit, std::int32_t) {
          const std::uint32_t key = key_of(logit);
          if (key >> kShifts[level - 1] == place.key) digit[key >> kShifts[level] & mask] += weight_(logit);
        });
        place.key <<= kShifts[level - 1] - kShifts[level];
      }
      std::size_t chosen = 0;
      double before = above;
      for (std::size_t bucket = digit.size(); bucket-- > 0;) {
        if (digit[bucket] == 0.0) continue;
        chosen = bucket;
        before = above;
        if (reached(above + digit[bucket])) break;
        above += digit[bucket];
      }
      above = before;
      place.key |= static_cast<std::uint32_t>(chosen);
    }
    std::int64_t equals = 0;
    for_each_logit(args_, row_, [&](float logit, std::int32_t) { equals += key_of(logit) == place.key; });
    const double each = weight_(logit_of(place.key));
    const auto mass_with = [&](std::int64_t rank) { return above + static_cast<double>(rank + 1) * each; };
    while (place.rank + 1 < equals && !reached(mass_with(place.rank))) ++place.rank;
    place.mass = mass_with(place.rank);
    return place;
  }

  std::int32_t token_at(const Place& place) const {
    std::int32_t token = -1;
    std::int64_t left = place.rank;
    for_each_logit(args_, row_, [&](float logit, std::int32_t id) {
      if (key_of(logit) == place.key && left-- == 0) token = id;
    });
    return token;
  }

 private:
  using Histogram = std::array<double, 2048>;
  static constexpr std::array<std::uint32_t, 3> kShifts{21, 10, 0};  // digits of 11, 11 and 10 bits

  const SampleArgs<float>& args_;
  std::int64_t row_;
  Weight weight_;
  double total_ = 0.0;
  Histogram first_digit_{};
};

/// The smallest logit that top_k and min_p keep.
double smallest_logit(const SampleArgs<float>& args, std::int64_t row, const SamplingConfig& config,
                      float largest) {
  double smallest = -std::numeric_limits<double>::infinity();
  if (config.top_k > 0 && config.top_k < args.shard_begins[args.logits.extent(0)]) {
    const RankedRow counts(args, row, [](float) { return 1.0; });
    smallest = logit_of(counts.find([&](double count) { return count >= config.top_k; }).key);
  }
  if (config.min_p > 0.0f) {
    const double log_min_p = std::log(static_cast<double>(config.min_p));
    smallest = std::max(smallest, largest + static_cast<double>(config.temperature) * log_min_p);
  }
  return smallest;
}

std::int32_t draw(const SampleArgs<float>& args, std::int64_t row) {
  const SamplingConfig& config = args.configs[row];
  const Candidate best = likeliest(args, row);
  if (best.id < 0) return -1;
  const float largest = best.logit;
  const double smallest = smallest_logit(args, row, config, largest);
  const RankedRow ranked(args, row, [&, max = double{largest}](float logit) {
    return logit < smallest ? 0.0 : std::exp((logit - max) / config.temperature);
  });
  // The nucleus ends where its mass reaches top_p of the total; it holds at least one token.
  const double wanted = static_cast<double>(config.top_p) * ranked.total();
  Place last;
  last.mass = ranked.total();
  if (config.top_p < 1.0f) last = ranked.find([&](double mass) { return mass >= wanted; });
  const double target = philox_uniform(config.seed, args.counters[row]) * last.mass;
  Place drawn = ranked.find([&](double mass) { return mass > target; });
  if (config.top_p < 1.0f && drawn.is_behind(last)) drawn = last;  // only through rounding
  return ranked.token_at(drawn);
}

}  // namespace

void Operators::sample(const SampleArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const auto body = [&](std::int64_t row, int) {
      const bool is_greedy = args.configs == nullptr || args.configs[row].temperature == 0.0f;
      args.tokens[row] = is_greedy ? likeliest(args, row).id : draw(args, row);
    };
    pool->parallel_for(args.logits.extent(1), body);
  });
}

}  // namespace helix::cpu
