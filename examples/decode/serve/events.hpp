// SPDX-License-Identifier: Apache-2.0
// The events that a serving decoder sends to its client, one line of JSON each. docs/decoding.md describes
// them.
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

/// Token counts of an ended request.
struct Usage {
  std::int64_t prompt_tokens = 0;
  std::int64_t cached_tokens = 0;  ///< Prompt tokens taken from another request's cache.
  std::int64_t completion_tokens = 0;
};

/// Times of an ended request in milliseconds.
struct RequestTiming {
  double queued_ms = 0.0;   ///< Until its first step.
  double prefill_ms = 0.0;  ///< From its first step to its first token.
  double decode_ms = 0.0;   ///< From its first token to its last.
};

/// Resources in use, over all replicas.
struct ServeStats {
  std::int64_t queued = 0;    ///< Waiting requests.
  std::int64_t running = 0;   ///< Requests in the steps.
  std::int64_t retained = 0;  ///< Ended requests whose cache is kept.
  std::int64_t pages = 0;     ///< Pages of one rank of each replica.
  std::int64_t pages_used = 0;
  std::int64_t resident_bytes = 0;  ///< Current resident memory of the root's process.
};

/// The decoder's capabilities, sent once it is ready.
struct ServeAbilities {
  int kvp = 1;
  int tpa = 1;
  int ep = 1;
  int pp = 1;
  int dp = 1;
  std::string activation;
  std::int64_t vocab = 0;
  std::vector<std::int64_t> eos_ids;
  std::int64_t max_sequences = 0;  ///< Requests that decode at the same time, per replica.
  std::int64_t max_tokens = 0;     ///< Tokens of a request's prompt and output together.
  std::int64_t kv_tokens = 0;      ///< Tokens of all caches of a replica.
  float temperature = 0.0f;        ///< Default of requests; 0: greedy.
  RankMemory memory;               ///< Memory of the root's rank, including all pages of its cache.
};

/// Each function returns a whole line, including its line end.
std::string ready_event(const ServeAbilities& abilities);
/// `index` is the token's position in the output. `log_probs` is that of this token's row alone, or empty.
std::string token_event(std::string_view id, std::int64_t index, std::int32_t token,
                        const LogProbs& log_probs);
std::string end_event(std::string_view id, FinishReason reason, const Usage& usage,
                      const RequestTiming& timing);
/// `id` is empty if the error belongs to no request.
std::string error_event(std::string_view id, std::string_view message);
std::string stats_event(const ServeStats& stats);

}  // namespace helix::decode
