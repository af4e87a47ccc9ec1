// SPDX-License-Identifier: Apache-2.0
// What a generation is asked for and what it returns, independent of ranks and backends.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <helix/dtype.hpp>
#include <helix/mla_prefill.hpp>
#include <helix/vocabulary.hpp>

#include "model/stage_plan.hpp"
#include "model/step.hpp"

namespace helix::decode {

using TokenIds = std::vector<std::int32_t>;

/// What makes tokens less likely that a sequence has already.
struct Penalties {
  float repetition = 1.0f;  ///< Divides the positive logits of prompt and output tokens, multiplies others.
  float presence = 0.0f;    ///< Taken off the logits of output tokens.
  float frequency = 0.0f;   ///< Taken off once for each time that the output has the token.

  bool any() const { return *this != Penalties{}; }
  friend bool operator==(const Penalties&, const Penalties&) = default;
};

/// Room for requests that come while the decoder runs, in each replica.
struct ServeLimits {
  std::int64_t max_sequences = 8;  ///< Requests that decode side by side.
  std::int64_t max_tokens = 0;     ///< Prompt and output of a request.
  std::int64_t kv_tokens = 0;      ///< Tokens of all caches, of running and of ended requests.

  friend bool operator==(const ServeLimits&, const ServeLimits&) = default;
};

class Frontend;

/// What the root rank shows and whom it talks to, and how often ranks hear of each other.
struct RootIo {
  bool show_progress = false;
  Frontend* client = nullptr;                       ///< Where a serving decoder's requests come from.
  std::string activation;                           ///< For the client.
  std::chrono::milliseconds longest_silence{1000};  ///< Of an idle root, before other ranks worry.
  /// Between two meetings of ranks that load, or of replicas that decode, without each other.
  std::chrono::milliseconds meeting_interval{7500};
};

/// What is to be generated. Equal on all ranks.
struct GenerationRequest {
  std::vector<TokenIds> prompts;  ///< One a sequence; empty with synthetic_context.
  std::int64_t max_new_tokens = 16;
  bool ignore_eos = false;
  /// Continuations to feed (draft_tokens 1) or to propose as drafts, one a sequence; or empty.
  std::vector<TokenIds> teacher;
  std::int64_t draft_tokens = 1;       ///< Query tokens a sequence and decode step.
  std::int64_t synthetic_context = 0;  ///< Tokens of generated KV instead of a prompt; 0: none.
  SamplingConfig sampling;
  Penalties penalties;
  DType kv_dtype = DType::bf16;
  std::int64_t chunk = 16;  ///< Chunk of KvLayout, tokens.
  std::int64_t page_tokens = 64;
  int hop_b_slices = 0;                ///< 0: chosen, 1: off.
  std::int64_t prefill_tokens = 256;   ///< Most prompt tokens a step, over all sequences.
  std::optional<ServeLimits> serving;  ///< Prompts come from a client; above are what they have unsaid.
  bool cuda_graphs = true;             ///< On GPUs, replays decode steps of equal shapes from a captured one.
  MlaForm mla_prefill = MlaForm::automatic;  ///< How prompts attend in models of latent attention.

  std::int64_t num_sequences() const {
    return synthetic_context > 0 ? 1 : static_cast<std::int64_t>(prompts.size());
  }
  std::int64_t prompt_length(std::int64_t sequence) const {
    return synthetic_context > 0
               ? synthetic_context
               : static_cast<std::int64_t>(prompts[static_cast<std::size_t>(sequence)].size());
  }
  /// The longest that the sequence's cache gets: the last drawn token is never stored, rejected drafts are
  /// for a while.
  std::int64_t longest_length(std::int64_t sequence) const {
    return prompt_length(sequence) + max_new_tokens;
  }
};

/// One sequence's result.
struct GeneratedSequence {
  TokenIds prompt;
  TokenIds tokens;  ///< Generated tokens only; under teacher forcing the model's own choice at each step.
  /// First logits behind the first and the last generated token.
  std::array<std::array<float, kFirstLogits>, 2> logits_first8{};
  std::vector<float> logits_norm;  ///< L2 norm of the logits behind each generated token.
};

/// Times of one rank's generation.
struct GenerationTiming {
  double load_ms = 0.0;
  double prefill_ms = 0.0;
  double ttl_median_ms = 0.0;  ///< Median token-to-token latency of decode steps.
  double ttl_p99_ms = 0.0;
  double tokens_per_s = 0.0;  ///< Generated tokens of decode steps over their time.
  double kv_gb_per_s = 0.0;   ///< KV bytes read by decode steps over their time, all ranks.
};

/// Sequences and memory of all ranks; timing and counts of the rank that returns it.
struct GenerationResult {
  std::vector<GeneratedSequence> sequences;
  std::vector<RankMemory> memory;  ///< By world rank.
  GenerationTiming timing;
  /// Payload that a rank sent to others in the last decode step, a layer.
  std::int64_t exchange_bytes_per_rank_per_layer = 0;
  std::int64_t captured_steps = 0;  ///< Decode steps that this rank replayed from a captured one.
};

}  // namespace helix::decode
