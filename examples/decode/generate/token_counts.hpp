// SPDX-License-Identifier: Apache-2.0
// TokenCounts: how often a sequence has each token, for its penalties.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include <helix/backend/vocabulary.hpp>

#include "generate/generation.hpp"

namespace helix::decode {

/// Keeps nothing if no penalty is active.
class TokenCounts {
 public:
  TokenCounts() = default;
  TokenCounts(const Penalties& penalties, std::span<const std::int32_t> prompt) : penalties_(penalties) {
    if (penalties_.repetition == 1.0f) return;
    for (const std::int32_t token : prompt) output_counts_.try_emplace(token, 0);
  }

  /// Counts an output token.
  void add(std::int32_t token) {
    if (penalties_.any()) ++output_counts_[token];
  }

  /// Appends the penalties for the next token, which is drawn at logit row `row`.
  void append_penalties(std::int32_t row, std::vector<LogitPenalty>& penalties) const {
    for (const auto& [id, count] : output_counts_) {
      const float presence = count > 0 ? penalties_.presence : 0.0f;
      penalties.push_back(
          {row, id, penalties_.repetition, presence + static_cast<float>(count) * penalties_.frequency});
    }
  }

 private:
  Penalties penalties_;
  std::map<std::int32_t, std::int64_t> output_counts_;  // 0: only in the prompt
};

}  // namespace helix::decode
