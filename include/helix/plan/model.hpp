// SPDX-License-Identifier: Apache-2.0
// Model: a ModelShape with a name, and what else of a transformer decides a step: windows, tied embeddings.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <helix/dtype.hpp>
#include <helix/export.hpp>
#include <helix/model_shape.hpp>
#include <helix/plan/units.hpp>

namespace helix::plan {

/// Expected number of different experts that `tokens` tokens choose under uniform routing: E * (1 - (1 -
/// k/E)^tokens).
/// @throws Error(invalid_argument) without experts, for k outside [0, E], and for negative or NaN tokens.
HELIX_API double expected_expert_hits(const MoeShape& moe, double tokens);

/// A model as the planner sees it. Every FFN has a gate (SwiGLU and the like): three matrices.
struct HELIX_API Model {
  std::string name{};
  std::string source{};  ///< Where the sizes come from, for reports.
  ModelShape shape{};
  bool tie_word_embeddings = false;
  bool has_qk_norm = false;
  std::int64_t window = 0;  ///< Tokens that a query of a windowed layer sees; 0: all layers are full.
  /// Layer i has full attention if (i + 1) is a multiple; the others are windowed. 0 with a window: no layer
  /// is full.
  std::int64_t full_attention_stride = 1;
  /// With a window: whether each layer is windowed, if no stride describes it. Empty: the stride decides.
  std::vector<bool> window_layers{};

  /// Whether a query of the layer sees `window` tokens only.
  /// @throws Error(invalid_argument) for a layer that a window_layers in use does not have.
  bool is_window_layer(std::int64_t layer) const;
  /// Checks that every size is in range and that they agree.
  /// @throws Error(invalid_argument) naming the size, its value and the range.
  void check() const;
};

/// Bits of an element. Any positive number: 4.25 is a 4-bit format with one 8-bit scale for 32 elements.
struct HELIX_API Precision {
  double weight_bits = 16;
  double kv_bits = 16;
  double activation_bits = 16;  ///< Bits of an activation, also of what collectives carry.

  /// Checks the bits. @throws Error(invalid_argument) unless each is in (0, 64].
  void check() const;
};

/// Bits of a cached element of `dtype`. Of latent attention they are the bits of a row over its head_dim
/// columns, so they include the scales of DType::fp8_ds_mla.
HELIX_API double kv_element_bits(const ModelShape& shape, DType dtype);

/// Parameters of the whole model, by part.
struct ParameterCounts {
  std::int64_t embedding = 0;
  std::int64_t lm_head = 0;  ///< 0 if tied
  std::int64_t attention = 0;
  std::int64_t dense_ffn = 0;
  std::int64_t routed_experts = 0;
  std::int64_t shared_experts = 0;
  std::int64_t router = 0;
  std::int64_t norms = 0;
  std::int64_t routed_experts_active = 0;  ///< Parameters of routed_experts that one token uses.

  /// Parameters of the whole model.
  std::int64_t total() const {
    return embedding + lm_head + attention + dense_ffn + routed_experts + shared_experts + router + norms;
  }
  /// Parameters that one token uses.
  std::int64_t active() const { return total() - routed_experts + routed_experts_active; }
};

/// Counts the parameters of the model by part.
HELIX_API ParameterCounts count_parameters(const Model& model);

/// Bytes of the KV cache of `context` tokens in all layers, each KV head (or the latent) stored once, without
/// page rounding and with values as wide as they are.
/// @throws Error(invalid_argument) for a context that is negative or NaN, and as Precision::check().
HELIX_API Bytes kv_cache_bytes(const Model& model, const Precision& precision, Tokens context);

/// A model by name, e.g. "llama-3.1-405b"; sizes of the public config.json. @throws Error(invalid_argument)
/// listing the known names.
HELIX_API Model model_preset(std::string_view name);
/// Names that model_preset() knows.
HELIX_API std::vector<std::string> model_preset_names();

}  // namespace helix::plan
