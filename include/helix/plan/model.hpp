// SPDX-License-Identifier: Apache-2.0
// Model: the sizes of a decoder-only transformer that decide what a step reads, computes and stores.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <helix/export.hpp>
#include <helix/plan/units.hpp>
#include <helix/topology.hpp>

namespace helix::plan {

/// Latent attention's sizes. With them Model::num_kv_heads is 1, head_dim kv_lora_rank + qk_rope_head_dim and
/// value_dim kv_lora_rank: the absorbed form that decoding runs.
struct LatentAttention {
  std::int64_t q_lora_rank = 0;  ///< 0: queries straight from hidden
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_head_dim = 0;
  std::int64_t qk_rope_head_dim = 0;
  std::int64_t v_head_dim = 0;
};

/// Routed and shared experts. Layer i is an MoE layer if i >= first_dense_layers and (i - first_dense_layers)
/// is a multiple of layer_stride.
struct Experts {
  std::int64_t num_experts = 0;
  std::int64_t top_k = 1;
  std::int64_t expert_ffn = 0;  ///< F of one routed expert
  std::int64_t shared_ffn = 0;  ///< F of all shared experts together
  std::int64_t first_dense_layers = 0;
  std::int64_t layer_stride = 1;
};

/// Different experts that `tokens` tokens choose, expected under uniform routing: E * (1 - (1 - k/E)^tokens).
HELIX_API double expected_expert_hits(const Experts& experts, double tokens);

/// A model as the planner sees it. Every FFN has a gate (SwiGLU and the like): three matrices.
struct HELIX_API Model {
  std::string name{};
  std::string source{};  ///< where the sizes come from
  std::int64_t hidden = 0;
  std::int64_t num_layers = 0;
  std::int64_t num_query_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;   ///< of queries and keys, as cached
  std::int64_t value_dim = 0;  ///< of a partial attention output
  std::int64_t ffn = 0;        ///< of the dense layers
  std::int64_t vocab = 0;
  bool tie_word_embeddings = false;
  bool has_qk_norm = false;
  std::int64_t window = 0;  ///< tokens that a query of a windowed layer sees; 0: all layers are full
  /// Layer i is a full one if (i + 1) is a multiple; the others are windowed. 0 with a window: none is full.
  std::int64_t full_attention_stride = 1;
  std::optional<LatentAttention> latent{};
  std::optional<Experts> experts{};

  /// The sizes that Topology needs.
  ModelShape shape() const;
  bool is_moe_layer(std::int64_t layer) const;
  /// Whether a query of the layer sees `window` tokens only.
  bool is_window_layer(std::int64_t layer) const;
  /// Cached elements of one token in one layer, stored once: 2 * Hkv * D, for MLA the latent alone.
  std::int64_t kv_elements_per_layer() const;
  /// Throws unless every size is in range and they agree.
  /// @throws Error(invalid_argument) naming the size, its value and the range.
  void check() const;
};

/// Bits of an element. Any positive number: 4.25 is a 4-bit format with one 8-bit scale for 32 elements.
struct HELIX_API Precision {
  double weight_bits = 16;
  double kv_bits = 16;
  double activation_bits = 16;  ///< of what collectives carry, too

  /// @throws Error(invalid_argument) unless each is in (0, 64].
  void check() const;
};

/// Parameters by part, of the whole model.
struct ParameterCounts {
  std::int64_t embedding = 0;
  std::int64_t lm_head = 0;  ///< 0 if tied
  std::int64_t attention = 0;
  std::int64_t dense_ffn = 0;
  std::int64_t routed_experts = 0;
  std::int64_t shared_experts = 0;
  std::int64_t router = 0;
  std::int64_t norms = 0;
  std::int64_t routed_experts_active = 0;  ///< of routed_experts, what one token uses

  std::int64_t total() const {
    return embedding + lm_head + attention + dense_ffn + routed_experts + shared_experts + router + norms;
  }
  std::int64_t active() const { return total() - routed_experts + routed_experts_active; }
};

HELIX_API ParameterCounts count_parameters(const Model& model);

/// Bytes of the KV cache of `context` tokens in all layers, each KV head (or the latent) stored once, without
/// page rounding.
HELIX_API Bytes kv_cache_bytes(const Model& model, const Precision& precision, Tokens context);

/// A model by name, e.g. "llama-3.1-405b"; sizes of the public config.json. @throws Error(invalid_argument)
/// listing the known names.
HELIX_API Model model_preset(std::string_view name);
HELIX_API std::vector<std::string> model_preset_names();

}  // namespace helix::plan
