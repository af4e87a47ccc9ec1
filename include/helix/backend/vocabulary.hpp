// SPDX-License-Identifier: Apache-2.0
// VocabularyBackend: embedding, LM head and sampling, the two ends of the stack.
#pragma once

#include <cstdint>
#include <limits>

#include <helix/backend/layer.hpp>
#include <helix/error.hpp>
#include <helix/tensor_view.hpp>

namespace helix {

/// Arguments of embed(): out[t] = table[ids[t] - first_id], or 0 for ids of another shard. An all-reduce then
/// sums the shards.
template <class T>
struct EmbedArgs {
  const std::int32_t* ids = nullptr;  ///< [tokens].
  WeightView table;                   ///< [ids of this shard of the vocabulary, M].
  std::int64_t first_id = 0;
  TensorView<T, 2> out;  ///< [tokens, M].
};

/// Arguments of gather_rows(): out[i] = in[rows[i]].
template <class T>
struct GatherRowsArgs {
  TensorView<const T, 2> in;           ///< [n, M].
  const std::int32_t* rows = nullptr;  ///< [rows of out], row numbers of `in`.
  TensorView<T, 2> out;                ///< [rows of out, M].
};

/// How the next token of one row is drawn; backends read it from device memory. Tokens are cut three times:
/// to the top_k likeliest, then to those with at least min_p times the largest probability, then to the
/// nucleus, which is the smallest set of likeliest tokens that holds top_p of what the first two cuts left.
struct SamplingConfig {
  float temperature = 0.0f;  ///< 0: greedy, whatever the cuts.
  float top_p = 1.0f;        ///< Probability of the nucleus, in (0, 1].
  float min_p = 0.0f;        ///< Share of the largest probability that a token must have, in [0, 1].
  std::int32_t top_k = 0;    ///< Likeliest tokens kept, ties with the last too; 0: all.
  std::uint64_t seed = 0;

  friend bool operator==(const SamplingConfig&, const SamplingConfig&) = default;
};

/// Checks a sampling config. @throws Error(invalid_argument) naming the value that is NaN or out of range.
inline void check_sampling(const SamplingConfig& config) {
  HELIX_EXPECTS(config.temperature >= 0.0f && config.temperature <= std::numeric_limits<float>::max(),
                ErrorCode::invalid_argument, "temperature is ", config.temperature,
                "; it must be finite and at least 0");
  HELIX_EXPECTS(config.top_p > 0.0f && config.top_p <= 1.0f, ErrorCode::invalid_argument, "top_p is ",
                config.top_p, "; it must be in (0, 1]");
  HELIX_EXPECTS(config.min_p >= 0.0f && config.min_p <= 1.0f, ErrorCode::invalid_argument, "min_p is ",
                config.min_p, "; it must be in [0, 1]");
  HELIX_EXPECTS(config.top_k >= 0, ErrorCode::invalid_argument, "top_k is ", config.top_k,
                "; it must be at least 0, which keeps all");
}

/// Arguments of sample(), which draws one token a row. The token is -1 where a logit is NaN or +inf, or none
/// is above -inf, whatever the config. A greedy draw takes the smallest id on ties. Any other draw is a
/// function of (seed, counters[row]) and the logits alone, so that ranks with equal logits draw equal tokens.
template <class T>
struct SampleArgs {
  /// [shards, rows, width]: shard s holds ids [shard_begins[s], shard_begins[s+1]) in its first columns; the
  /// rest is padding.
  TensorView<const T, 3> logits;
  const std::int64_t* shard_begins = nullptr;  ///< [shards + 1], device memory.
  const SamplingConfig* configs = nullptr;     ///< [rows], device memory; nullptr: all rows are greedy.
  const std::uint64_t* counters = nullptr;     ///< [rows]; nullptr only when `configs` is.
  std::int32_t* tokens = nullptr;              ///< [rows], written.
};

/// Arguments of choose_greedy(), a greedy choice over the ranks' shards that moves no logits between ranks:
/// tokens[r] is the id of the largest logit of row r on any rank, as a greedy draw of sample() would give. A
/// backend may have choose_greedy(args, stream). It is collective over the stage, with equally many rows on
/// all ranks. If it cannot choose it returns false on all ranks, and nothing is queued.
template <class T>
struct ChooseGreedyArgs {
  TensorView<const T, 3> logits;  ///< [1, rows, width], this rank's shard.
  /// [2], device memory: first id of this shard and of the next.
  const std::int64_t* shard_begins = nullptr;
  std::int64_t num_tokens = 0;              ///< Tokens of the step, equal on all ranks.
  const std::int64_t* positions = nullptr;  ///< [num_tokens], equal on all ranks, or nullptr.
  std::int32_t* tokens = nullptr;           ///< [rows], written.
  float* norms = nullptr;                   ///< [rows], written as LogitNormsArgs says, or nullptr.
};

/// What makes one token of one row less or more likely. `repetition` divides a positive logit and multiplies
/// any other, as transformers does; then `subtract` is subtracted.
struct LogitPenalty {
  std::int32_t row = 0;
  std::int32_t id = 0;
  float repetition = 1.0f;
  float subtract = 0.0f;

  friend bool operator==(const LogitPenalty&, const LogitPenalty&) = default;
};

/// Arguments of penalize(), which changes the logits that `penalties` name. Each logit may be named once at
/// most. Ids beyond the vocabulary are ignored.
template <class T>
struct PenalizeArgs {
  TensorView<T, 3> logits;                     ///< [shards, rows, width], as in SampleArgs.
  const std::int64_t* shard_begins = nullptr;  ///< [shards + 1], as in SampleArgs.
  const LogitPenalty* penalties = nullptr;  ///< [count], device memory; rows are in range: a CPU checks them.
  std::int64_t count = 0;
};

/// Arguments of log_probs(): natural logarithms of softmax(logits), for each row's token and for its
/// likeliest ids.
template <class T>
struct LogProbsArgs {
  TensorView<const T, 3> logits;               ///< [shards, rows, width], as in SampleArgs.
  const std::int64_t* shard_begins = nullptr;  ///< [shards + 1], as in SampleArgs.
  const std::int32_t* tokens = nullptr;        ///< [rows]; -1 and others beyond the vocabulary give NaN.
  std::int64_t num_best = 0;   ///< Likeliest ids to return for each row, best first, the smaller id on ties.
  float* log_probs = nullptr;  ///< [rows], written.
  std::int32_t* best_ids = nullptr;  ///< [rows, num_best], written; -1 beyond the vocabulary.
  float* best_log_probs = nullptr;   ///< [rows, num_best], written.
};

/// Arguments of logit_norms(): norms[r] = L2 norm of row r's logits, summed in f32 or wider. A fingerprint of
/// a step for reports and comparisons.
template <class T>
struct LogitNormsArgs {
  TensorView<const T, 3> logits;               ///< [shards, rows, width], as in SampleArgs.
  const std::int64_t* shard_begins = nullptr;  ///< [shards + 1], as in SampleArgs.
  float* norms = nullptr;                      ///< [rows], written.
};

/// Arguments of advance(): values[i] += 1 where values[i] >= 0. The positions of one decode step become those
/// of the next, and padding (-1) stays.
struct AdvanceArgs {
  std::int64_t* values = nullptr;  ///< [count].
  std::int64_t count = 0;
};

/// A backend with all that embed_tokens, VocabularyHead and BatchBuffer::advance need.
template <class B>
concept VocabularyBackend = ExchangeBackend<B> && ReduceComm<typename B::Comm, typename B::Stream> &&
    GatherComm<typename B::Comm, typename B::Stream> &&
    requires(B& backend, typename B::Stream stream, typename B::Activation a) {
  backend.rms_norm(RmsNormArgs<decltype(a)>{}, stream);
  backend.linear(LinearArgs<decltype(a)>{}, stream);
  backend.stamp(StampArgs{}, stream);
  backend.embed(EmbedArgs<decltype(a)>{}, stream);
  backend.gather_rows(GatherRowsArgs<decltype(a)>{}, stream);
  backend.sample(SampleArgs<decltype(a)>{}, stream);
  backend.penalize(PenalizeArgs<decltype(a)>{}, stream);
  backend.log_probs(LogProbsArgs<decltype(a)>{}, stream);
  backend.logit_norms(LogitNormsArgs<decltype(a)>{}, stream);
  backend.advance(AdvanceArgs{}, stream);
};

}  // namespace helix
