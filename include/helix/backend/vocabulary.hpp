// SPDX-License-Identifier: Apache-2.0
// VocabularyBackend: embedding, LM head and sampling, the two ends of the stack.
#pragma once

#include <cstdint>

#include <helix/backend/layer.hpp>
#include <helix/tensor_view.hpp>

namespace helix {

/// out[t] = table[ids[t] - first_id], or 0 for ids of another shard (an all-reduce then sums the shards).
template <class T>
struct EmbedArgs {
  const std::int32_t* ids = nullptr;  ///< [tokens].
  WeightView table;                   ///< [shard of the vocabulary, M].
  std::int64_t first_id = 0;
  TensorView<T, 2> out;  ///< [tokens, M].
};

/// out[i] = in[rows[i]].
template <class T>
struct GatherRowsArgs {
  TensorView<const T, 2> in;           ///< [n, M].
  const std::int32_t* rows = nullptr;  ///< [rows of out].
  TensorView<T, 2> out;                ///< [rows of out, M].
};

/// How the next token of one row is drawn. Backends read it in device memory. Tokens are cut to the top_k
/// likeliest, then to those of at least min_p times the largest probability, then to the nucleus: the
/// smallest set of likeliest ones that holds top_p of what the first two cuts left.
struct SamplingConfig {
  float temperature = 0.0f;  ///< 0: greedy, whatever the cuts.
  float top_p = 1.0f;        ///< Probability of the nucleus, in (0, 1].
  float min_p = 0.0f;        ///< In [0, 1].
  std::int32_t top_k = 0;    ///< Those as likely as the k-th stay too; 0: all.
  std::uint64_t seed = 0;

  friend bool operator==(const SamplingConfig&, const SamplingConfig&) = default;
};

/// Draws one token a row: -1 where a logit is NaN or +inf, or none is above -inf, whatever the config. Greedy
/// takes the smallest id on ties. Otherwise the draw is a function of (seed, counters[row]) and the logits
/// alone, so that ranks with equal logits draw equal tokens.
template <class T>
struct SampleArgs {
  /// [shards, rows, width]: shard s holds ids [shard_begins[s], shard_begins[s+1]); the rest is padding.
  TensorView<const T, 3> logits;
  const std::int64_t* shard_begins = nullptr;  ///< [shards + 1], device memory.
  const SamplingConfig* configs = nullptr;     ///< [rows], device memory; nullptr: all rows are greedy.
  const std::uint64_t* counters = nullptr;     ///< [rows]; nullptr only when all rows are greedy.
  std::int32_t* tokens = nullptr;              ///< [rows], written.
};

/// Greedy choice over the ranks' shards, of which none leaves its rank: tokens[r] is the id of the largest
/// logit of row r on any rank, as a greedy draw of SampleArgs. What a backend may bring as
/// choose_greedy(args, stream), collective over the stage; false, alike on all ranks: it cannot, and nothing
/// is queued.
template <class T>
struct ChooseGreedyArgs {
  TensorView<const T, 3> logits;               ///< [1, rows, width], this rank's shard.
  const std::int64_t* shard_begins = nullptr;  ///< [2], device memory: its first id, and the next shard's.
  std::int64_t num_tokens = 0;                 ///< Of the step, alike on all ranks.
  const std::int64_t* positions = nullptr;     ///< [num_tokens], alike on all ranks, or nullptr.
  std::int32_t* tokens = nullptr;              ///< [rows], written.
  float* norms = nullptr;                      ///< [rows], written as LogitNormsArgs says, or nullptr.
};

/// What makes one token of one row less likely, or more: repetition divides a positive logit and multiplies
/// any other, as transformers does; then `subtract` is taken off.
struct LogitPenalty {
  std::int32_t row = 0;
  std::int32_t id = 0;
  float repetition = 1.0f;
  float subtract = 0.0f;

  friend bool operator==(const LogitPenalty&, const LogitPenalty&) = default;
};

/// Changes the logits that `penalties` name, each at most once; ids beyond the vocabulary name none.
template <class T>
struct PenalizeArgs {
  TensorView<T, 3> logits;                     ///< Logits as in SampleArgs.
  const std::int64_t* shard_begins = nullptr;  ///< Begins as in SampleArgs.
  const LogitPenalty* penalties = nullptr;     ///< [count], device memory; rows are in range.
  std::int64_t count = 0;
};

/// Natural logarithms of probabilities by softmax(logits): of each row's token, and of its likeliest ids.
template <class T>
struct LogProbsArgs {
  TensorView<const T, 3> logits;               ///< Logits as in SampleArgs.
  const std::int64_t* shard_begins = nullptr;  ///< Begins as in SampleArgs.
  const std::int32_t* tokens = nullptr;        ///< [rows]; -1 and others beyond the vocabulary give NaN.
  std::int64_t num_best = 0;                   ///< Ids a row, likeliest first, the smaller id on ties.
  float* log_probs = nullptr;                  ///< [rows], written.
  std::int32_t* best_ids = nullptr;            ///< [rows, num_best], written; -1 beyond the vocabulary.
  float* best_log_probs = nullptr;             ///< [rows, num_best], written.
};

/// norms[r] = L2 norm of row r's logits, summed in f32 or wider: a fingerprint of a step for reports and
/// comparisons.
template <class T>
struct LogitNormsArgs {
  TensorView<const T, 3> logits;               ///< Logits as in SampleArgs.
  const std::int64_t* shard_begins = nullptr;  ///< Begins as in SampleArgs.
  float* norms = nullptr;                      ///< [rows], written.
};

/// values[i] += 1 where values[i] >= 0: the positions of one decode step become those of the next, and
/// padding (-1) stays.
struct AdvanceArgs {
  std::int64_t* values = nullptr;  ///< [count].
  std::int64_t count = 0;
};

/// What embed_tokens, VocabularyHead and BatchBuffer::advance ask of a machine.
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
