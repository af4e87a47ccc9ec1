// SPDX-License-Identifier: Apache-2.0
// StepWorkspace: the memory that the steps of one rank take besides weights and cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/decode_layer.hpp>
#include <helix/exchange_layout.hpp>
#include <helix/rank_shape.hpp>
#include <helix/topology.hpp>
#include <helix/vocabulary_head.hpp>

#include "model/decoder_backend.hpp"
#include "model/stage_plan.hpp"

namespace helix::decode {

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
