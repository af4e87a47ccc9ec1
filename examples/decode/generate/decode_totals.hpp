// SPDX-License-Identifier: Apache-2.0
// DecodeTotals: what the decode steps of a generation took and did.
#pragma once

#include <cstdint>
#include <numeric>
#include <tuple>
#include <vector>

#include "generate/generation.hpp"
#include "generate/measure.hpp"

namespace helix::decode {

/// Counted by one rank, for the sequences of its replica.
struct DecodeTotals {
  std::vector<double> step_ms;  ///< From one step's tokens to the next one's.
  std::int64_t decoded = 0;     ///< Tokens gained.
  std::int64_t kv_tokens = 0;   ///< Tokens of the cache that queries read, over all ranks.

  /// A step that gained `tokens`, whose queries read `read_tokens` of the cache.
  void add(std::int64_t tokens, std::int64_t read_tokens, double ms) {
    decoded += tokens;
    kv_tokens += read_tokens;
    step_ms.push_back(ms);
  }
  /// Sets the times of decoding in `timing`; a token of the cache has `kv_token_bytes`.
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
