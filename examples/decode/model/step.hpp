// SPDX-License-Identifier: Apache-2.0
// Step: the tokens that go through the model at once, and what is drawn after them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <helix/backend/vocabulary.hpp>
#include <helix/page_ledger.hpp>

namespace helix::decode {

/// The tokens of one step on the host. Every stage of a replica gets the same.
struct Step {
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> positions;
  std::vector<std::int32_t> query_offsets{0};
  std::vector<SequenceId> sequences;         ///< One an interval of query_offsets.
  std::vector<std::int32_t> logit_rows;      ///< Tokens whose successor is drawn.
  std::vector<std::uint64_t> draw_counters;  ///< One a logit row, unique over the generation.
  std::vector<SamplingConfig> sampling;      ///< One a logit row.
  std::vector<LogitPenalty> penalties;       ///< Their rows count logit rows.
  /// Likeliest ids a logit row whose log-probabilities are wanted beside the drawn token's; nullopt: none.
  std::optional<std::int64_t> num_best;
  bool is_decode = false;  ///< Steps of its shape may come again: worth to be captured.

  /// Whether a row's token is drawn at random.
  bool is_random() const {
    return std::ranges::any_of(sampling, [](const SamplingConfig& row) { return row.temperature > 0.0f; });
  }

  friend bool operator==(const Step&, const Step&) = default;

  /// Empties it; keeps the memory.
  void clear() {
    tokens.clear();
    positions.clear();
    query_offsets.assign(1, 0);
    sequences.clear();
    logit_rows.clear();
    draw_counters.clear();
    sampling.clear();
    penalties.clear();
    num_best.reset();
    is_decode = false;
  }
};

/// A step of `sequences` times `tokens` tokens at no position, of no sequence. All rows of a decode step have
/// logits, of another its last one.
inline Step padding_step(std::int64_t sequences, std::int64_t tokens, bool is_random, bool is_decode) {
  Step step;
  step.is_decode = is_decode;
  const auto total = static_cast<std::size_t>(sequences * tokens);
  step.tokens.assign(total, 0);
  step.positions.assign(total, -1);
  for (std::int64_t i = 1; i <= sequences; ++i)
    step.query_offsets.push_back(static_cast<std::int32_t>(i * tokens));
  for (std::size_t row = is_decode ? 0 : total - 1; row < total; ++row)
    step.logit_rows.push_back(static_cast<std::int32_t>(row));
  step.draw_counters.assign(step.logit_rows.size(), 0);
  step.sampling.assign(step.logit_rows.size(), {.temperature = is_random ? 1.0f : 0.0f});
  return step;
}

/// Natural logarithms of the probabilities after penalties, before temperature and cuts.
struct LogProbs {
  std::span<const float> chosen;           ///< Of the tokens drawn, [logit rows].
  std::span<const std::int32_t> best_ids;  ///< [logit rows, num_best], likeliest first; -1: no more ids.
  std::span<const float> best;             ///< Of best_ids.
};

inline constexpr std::size_t kFirstLogits = 8;  ///< Logits of a row that reports have; the rest is 0.

/// What a step drew, [logit rows].
struct Drawn {
  std::span<const std::int32_t> tokens;  ///< The same on all ranks of the replica.
  std::span<const float> logit_norms;    ///< L2 norms of the logits, where StepOptions asks for them.
  std::span<const float> first_logits;   ///< Of the first ids, [logit rows, kFirstLogits], likewise.
  LogProbs log_probs;                    ///< Empty unless the step asks for them.
};

}  // namespace helix::decode
