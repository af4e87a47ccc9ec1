// SPDX-License-Identifier: Apache-2.0
// Step: the tokens that go through the model in one pass, and which tokens are drawn after them.
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

/// The tokens of one step on the host. Every stage of a replica gets the same step.
struct Step {
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> positions;
  std::vector<std::int32_t> query_offsets{0};
  std::vector<SequenceId> sequences;         ///< One per interval of query_offsets.
  std::vector<std::int32_t> logit_rows;      ///< Rows of the tokens whose next token is drawn.
  std::vector<std::uint64_t> draw_counters;  ///< One per logit row, unique in the generation.
  std::vector<SamplingConfig> sampling;      ///< One per logit row.
  std::vector<LogitPenalty> penalties;       ///< Row numbers here count logit rows.
  /// Number of likeliest ids per logit row whose log-probabilities are wanted, besides that of the drawn
  /// token; nullopt: no log-probabilities.
  std::optional<std::int64_t> num_best;
  bool is_decode = false;  ///< Steps of this shape may occur again: worth capturing.

  /// Whether any row's token is drawn at random.
  bool is_random() const {
    return std::ranges::any_of(sampling, [](const SamplingConfig& row) { return row.temperature > 0.0f; });
  }

  friend bool operator==(const Step&, const Step&) = default;

  /// Empties the step but keeps its memory.
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

/// A step of `sequences` times `tokens` tokens without positions and sequences. In a decode step all rows
/// have logits, otherwise only the last row.
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

/// Natural log-probabilities after penalties, but before temperature and cuts.
struct LogProbs {
  std::span<const float> chosen;           ///< Of the drawn tokens, [logit rows].
  std::span<const std::int32_t> best_ids;  ///< [logit rows, num_best], likeliest first; -1: no more ids.
  std::span<const float> best;             ///< Of best_ids.
};

/// Number of first logits of a row that reports show. If the vocabulary has fewer ids, the rest is 0.
inline constexpr std::size_t kFirstLogits = 8;

/// The results of a step, by logit row.
struct Drawn {
  std::span<const std::int32_t> tokens;  ///< Equal on all ranks of the replica.
  std::span<const float> logit_norms;    ///< L2 norms of the logits, if StepOptions asks for them.
  /// Logits of the first ids, [logit rows, kFirstLogits], if StepOptions asks for norms.
  std::span<const float> first_logits;
  LogProbs log_probs;  ///< Empty unless the step asks for them.
};

}  // namespace helix::decode
