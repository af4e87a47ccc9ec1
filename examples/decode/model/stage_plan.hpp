// SPDX-License-Identifier: Apache-2.0
// What a stage of the model is built for: the capacities and options of its steps, and the memory that they
// take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <helix/decode_layer.hpp>
#include <helix/exchange_layout.hpp>
#include <helix/mla_prefill.hpp>
#include <helix/rank_shape.hpp>
#include <helix/topology.hpp>
#include <helix/vocabulary_head.hpp>

#include "model/decoder_backend.hpp"

namespace helix::decode {

/// Capacities of a stage. Equal on all ranks.
struct StageLimits {
  std::int64_t max_sequences = 0;
  std::int64_t max_step_tokens = 0;
  std::int64_t max_logit_rows = 0;
  int max_slices = 8;
  MlaPrefill mla_prefill{.form = MlaForm::absorbed};  ///< Setting of all layers.
};

/// Options that stay the same from step to step. Equal on all ranks.
struct StepOptions {
  int hop_b_slices = 0;          ///< 0: chosen automatically, 1: off.
  bool has_logit_norms = false;  ///< Whether the last stage computes the norm of each logit row.
  /// Whether decode steps of equal shapes are replayed, if the backend and the ranks allow it.
  bool captures = true;
};

/// Steps that a model runs before its first real one, see StageModel::warm_up(). Equal on all ranks.
struct WarmUp {
  std::int64_t prefill_tokens = 0;  ///< Tokens of one sequence; 0: no prefill step.
  /// Lengths of prompts whose last prefill_tokens run too, each in a step of its own. Prompts may take a path
  /// that padding does not take (MlaPrefill).
  std::vector<std::int64_t> prompts{};
  std::int64_t sequences = 0;      ///< Sequences of a decode step; 0: no decode step.
  std::int64_t decode_tokens = 1;  ///< Tokens of each of these sequences.
  bool is_random = false;          ///< Whether tokens are drawn at random.
};

/// Memory of one rank.
struct RankMemory {
  /// All weights: those in buffers, and those used in place in the checkpoint's files.
  std::int64_t weights_bytes = 0;
  /// Part of weights_bytes that is used in place in the files; all ranks of a machine share these pages.
  std::int64_t weights_in_place_bytes = 0;
  std::int64_t kv_bytes = 0;  ///< Pages in use, over all layers.
  std::int64_t workspace_bytes = 0;
  /// Peak resident memory of the rank's process, which rank threads share. Measured, not planned.
  std::int64_t resident_bytes = 0;
};

/// The specification of the exchange that a rank's steps need.
inline KvpAllToAllSpec exchange_spec(const RankShape& shape, const StageLimits& limits) {
  return KvpAllToAllSpec::of_layers(shape, limits.max_step_tokens, limits.max_slices);
}

/// Bytes of the buffers that the steps of one rank of `stage` use, without weights and cache.
template <DecoderBackend B>
struct StepWorkspace {
  std::size_t hidden = 0;  ///< Hidden states; the normed ones take as much again.
  std::size_t layer = 0;
  std::size_t messages = 0;  ///< Messages of the exchange, sent and received.
  std::size_t head = 0;      ///< LM head, on the last stage only.

  static StepWorkspace plan(B& backend, const Topology& topo, const RankShape& shape, int stage,
                            const StageLimits& limits) {
    constexpr auto kElementBytes = static_cast<std::int64_t>(sizeof(typename B::Activation));
    StepWorkspace bytes;
    bytes.hidden = static_cast<std::size_t>(limits.max_step_tokens * shape.hidden * kElementBytes);
    bytes.layer = decode_layer_workspace_bytes(backend, shape, limits.max_step_tokens, LayerInput::normed,
                                               limits.mla_prefill);
    if (shape.kvp > 1) {
      const ExchangeLayout layout(exchange_spec(shape, limits), kElementBytes);
      bytes.messages = static_cast<std::size_t>(2 * layout.total_bytes());
    }
    if (stage == topo.pp() - 1) bytes.head = VocabularyHead<B>::workspace_bytes(topo, limits.max_logit_rows);
    return bytes;
  }
  std::size_t total() const { return 2 * hidden + layer + messages + head; }
};

}  // namespace helix::decode
