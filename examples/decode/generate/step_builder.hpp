// SPDX-License-Identifier: Apache-2.0
// StepBuilder: builds a step from tokens of several sequences.
#pragma once

#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include <helix/page_ledger.hpp>

#include "generate/generation.hpp"
#include "generate/token_counts.hpp"
#include "model/step.hpp"

namespace helix::decode {

/// Progress of one sequence; equal on all ranks of a replica.
struct SequenceProgress {
  SequenceId id;
  const TokenIds* prompt = nullptr;
  std::int64_t index = 0;      ///< Position in the request.
  std::int64_t prefilled = 0;  ///< Prompt tokens that are in the cache.
  std::int32_t pending = 0;    ///< Token that was drawn but is not yet in the cache.
  bool is_done = false;
  TokenCounts counts;
  GeneratedSequence result;

  std::int64_t generated() const { return std::ssize(result.tokens); }
};

/// Builds one step after another and keeps the memory.
class StepBuilder {
 public:
  /// Starts a new step.
  void begin(bool is_decode) {
    step_.clear();
    step_.is_decode = is_decode;
    counts_.clear();
  }

  /// Adds `tokens` of one sequence, from position `first`.
  void add_tokens(const SequenceProgress& sequence, std::span<const std::int32_t> tokens,
                  std::int64_t first) {
    for (const std::int32_t token : tokens) {
      step_.tokens.push_back(token);
      step_.positions.push_back(first++);
    }
    step_.query_offsets.push_back(static_cast<std::int32_t>(step_.tokens.size()));
    step_.sequences.push_back(sequence.id);
    counts_.push_back(std::ssize(tokens));
  }

  /// Asks for the token that follows the token at `row`.
  void add_logit_row(const SequenceProgress& sequence, std::int64_t row, const SamplingConfig& sampling) {
    const auto logit_row = static_cast<std::int32_t>(step_.logit_rows.size());
    sequence.counts.append_penalties(logit_row, step_.penalties);
    step_.sampling.push_back(sampling);
    step_.logit_rows.push_back(static_cast<std::int32_t>(row));
    step_.draw_counters.push_back(static_cast<std::uint64_t>(sequence.index) << 40 |
                                  static_cast<std::uint64_t>(step_.positions[static_cast<std::size_t>(row)]));
  }

  const Step& step() const { return step_; }
  std::int64_t num_tokens() const { return std::ssize(step_.tokens); }
  /// Number of tokens of each sequence of the step.
  std::span<const std::int64_t> counts() const { return counts_; }

 private:
  Step step_;
  std::vector<std::int64_t> counts_;
};

}  // namespace helix::decode
