// SPDX-License-Identifier: Apache-2.0
// DecodeTotals: counts and times of the decode steps of a generation.
#pragma once

#include <cstdint>
#include <numeric>
#include <tuple>
#include <vector>

#include "generate/generation.hpp"
#include "generate/measure.hpp"

namespace helix::decode {

/// Counts of one rank, for the sequences of its replica.
struct DecodeTotals {
  std::vector<double> step_ms;  ///< From the tokens of one step to those of the next.
  std::int64_t decoded = 0;     ///< Tokens gained.
  std::int64_t kv_tokens = 0;   ///< Cached tokens that queries read, over all ranks.

  /// Adds a step that gained `tokens` and whose queries read `read_tokens` of the cache.
  void add(std::int64_t tokens, std::int64_t read_tokens, double ms) {
    decoded += tokens;
    kv_tokens += read_tokens;
    step_ms.push_back(ms);
  }
  /// Sets the decode times in `timing`. `kv_token_bytes` is the size of a cached token.
  void summarize(std::int64_t kv_token_bytes, GenerationTiming& timing) const {
    const double decode_ms = std::accumulate(step_ms.begin(), step_ms.end(), 0.0);
    if (step_ms.empty() || decode_ms == 0.0) return;
    std::tie(timing.ttl_median_ms, timing.ttl_p99_ms) = median_and_p99(step_ms);
    timing.tokens_per_s = static_cast<double>(decoded) / decode_ms * 1e3;
    timing.kv_gb_per_s =
        static_cast<double>(kv_tokens) * static_cast<double>(kv_token_bytes) / decode_ms * 1e-6;
  }
};

}  // namespace helix::decode
