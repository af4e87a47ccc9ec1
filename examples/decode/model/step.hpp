// SPDX-License-Identifier: Apache-2.0
// Step: the tokens that go through the model at once, and what is drawn after them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

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
  bool is_decode = false;                    ///< Steps of its shape may come again: worth to be captured.

  friend bool operator==(const Step&, const Step&) = default;

  /// Empties it; keeps the memory.
  void clear() {
    tokens.clear();
    positions.clear();
    query_offsets.assign(1, 0);
    sequences.clear();
    logit_rows.clear();
    draw_counters.clear();
    is_decode = false;
  }
};

/// What a step drew, [logit rows].
struct Drawn {
  std::span<const std::int32_t> tokens;  ///< The same on all ranks of the replica.
  std::span<const float> logit_norms;    ///< L2 norms of the logits, where StepOptions asks for them.
};

}  // namespace helix::decode
