// SPDX-License-Identifier: Apache-2.0
// What a stage of the model is built for: capacities and options of its steps, and the memory they take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <helix/decode_layer.hpp>
#include <helix/exchange_layout.hpp>
#include <helix/mla_prefill.hpp>
#include <helix/rank_shape.hpp>
#include <helix/topology.hpp>
#include <helix/vocabulary.hpp>

#include "model/decoder_backend.hpp"

namespace helix::decode {

/// Capacities, equal on all ranks.
struct StageLimits {
  std::int64_t max_sequences = 0;
  std::int64_t max_step_tokens = 0;
  std::int64_t max_logit_rows = 0;
  int max_slices = 8;
  MlaPrefill mla_prefill{.form = MlaForm::absorbed};  ///< Of all layers.
};

/// What stays the same from step to step. Equal on all ranks.
struct StepOptions {
  int hop_b_slices = 0;          ///< 0: chosen, 1: off.
  bool has_logit_norms = false;  ///< Norms of each logit row are computed, on the last stage.
  bool captures = true;  ///< Replays decode steps of equal shapes where the backend and the ranks allow it.
};

/// Steps that a model runs before its first one, see StageModel::warm_up(). Equal on all ranks.
struct WarmUp {
  std::int64_t prefill_tokens = 0;  ///< Of one sequence; 0: no such step.
  /// Tokens of sequences whose last prefill_tokens run too, each in its step: prompts may take what padding
  /// does not (MlaPrefill).
  std::vector<std::int64_t> prompts{};
  std::int64_t sequences = 0;      ///< Of a decode step; 0: no such step.
  std::int64_t decode_tokens = 1;  ///< Of each of them.
  bool is_random = false;          ///< Whether tokens are drawn at random.
};

/// Memory of one rank.
struct RankMemory {
  std::int64_t weights_bytes = 0;  ///< All weights: buffers, and what is used in the checkpoint's files.
  /// Part of weights_bytes that is used in the files, whose pages all ranks of a machine share.
  std::int64_t weights_in_place_bytes = 0;
  std::int64_t kv_bytes = 0;  ///< Pages in use, all layers.
  std::int64_t workspace_bytes = 0;
  /// Peak of the rank's process, which ranks that are threads share; not planned.
  std::int64_t resident_bytes = 0;
};

/// The exchange that the steps of a rank need.
inline KvpAllToAllSpec exchange_spec(const RankShape& shape, const StageLimits& limits) {
  return {.max_tokens = limits.max_step_tokens,
          .num_query_heads = shape.query_heads,
          .value_dim = shape.value_dim,
          .max_slices = limits.max_slices};
}

/// Bytes of the buffers that the steps of one rank of `stage` work in, besides weights and cache.
template <DecoderBackend B>
struct StepWorkspace {
  std::size_t hidden = 0;  ///< Hidden states; as many again hold the normed ones.
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
