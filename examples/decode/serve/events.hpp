// SPDX-License-Identifier: Apache-2.0
// What a serving decoder tells its client, one line of JSON each. docs/decoding.md describes them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/stage_plan.hpp"
#include "model/step.hpp"

namespace helix::decode {

/// Why a request ended.
enum class FinishReason { stop, length, cancelled };

/// Tokens of an ended request.
struct Usage {
  std::int64_t prompt_tokens = 0;
  std::int64_t cached_tokens = 0;  ///< Of the prompt, taken from another request's cache.
  std::int64_t completion_tokens = 0;
};

/// Times of an ended request, milliseconds.
struct RequestTiming {
  double queued_ms = 0.0;   ///< Until it was first part of a step.
  double prefill_ms = 0.0;  ///< From there to its first token.
  double decode_ms = 0.0;   ///< From there to its last.
};

/// What is in use, over all replicas.
struct ServeStats {
  std::int64_t queued = 0;    ///< Requests that wait.
  std::int64_t running = 0;   ///< Requests in the steps.
  std::int64_t retained = 0;  ///< Ended requests whose cache is kept.
  std::int64_t pages = 0;     ///< Of a rank of each replica.
  std::int64_t pages_used = 0;
  std::int64_t resident_bytes = 0;  ///< Of the root's process, now.
};

/// What a decoder is able to do, told once it is ready.
struct ServeAbilities {
  int kvp = 1;
  int tpa = 1;
  int ep = 1;
  int pp = 1;
  int dp = 1;
  std::string activation;
  std::int64_t vocab = 0;
  std::vector<std::int64_t> eos_ids;
  std::int64_t max_sequences = 0;  ///< That decode side by side, a replica.
  std::int64_t max_tokens = 0;     ///< Prompt and output of a request.
  std::int64_t kv_tokens = 0;      ///< Of all caches of a replica.
  float temperature = 0.0f;        ///< Of requests that do not say; 0: greedy.
  RankMemory memory;               ///< Of the root's rank, all pages of its cache included.
};

/// Each is a whole line with its end.
std::string ready_event(const ServeAbilities& abilities);
/// `index`: of the output. `log_probs`: of this token's row alone, or empty.
std::string token_event(std::string_view id, std::int64_t index, std::int32_t token,
                        const LogProbs& log_probs);
std::string end_event(std::string_view id, FinishReason reason, const Usage& usage,
                      const RequestTiming& timing);
/// `id`: empty if the error is of no request.
std::string error_event(std::string_view id, std::string_view message);
std::string stats_event(const ServeStats& stats);

}  // namespace helix::decode
