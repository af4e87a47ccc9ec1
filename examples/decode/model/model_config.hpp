// SPDX-License-Identifier: Apache-2.0
// ModelConfig: a Llama-like or DeepSeek model as described by its config.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <helix/dtype.hpp>
#include <helix/layer_config.hpp>
#include <helix/model_shape.hpp>

#include "model/rope.hpp"

namespace helix::decode {

/// A block-scaled fp8 checkpoint: one scale for each [block_rows, block_cols] of a weight.
struct Fp8BlockConfig {
  std::int64_t block_rows = 128;
  std::int64_t block_cols = 128;
};

/// A checked model description. Absent keys have transformers' default values, except sizes of latent
/// attention and of experts, which must be given.
struct ModelConfig {
  std::string model_type;
  /// Model sizes. Sizes that no layer uses are left out, because they must not forbid a topology.
  ModelShape shape;
  std::int64_t max_positions = 0;
  float rms_norm_eps = 1e-6f;
  /// torch_dtype or dtype, or else the embedding's type: the type that the model was trained to compute and
  /// cache in.
  DType dtype = DType::bf16;
  bool tie_word_embeddings = false;  ///< The embedding and the LM head are one tensor.
  bool has_qkv_bias = false;
  bool has_output_bias = false;
  bool has_mlp_bias = false;
  bool has_qk_norm = false;
  bool has_router_bias = false;
  RouterConfig router;  ///< How a token chooses experts; used where shape.moe is given.
  /// Number of tokens that a query of a windowed layer sees, including itself; 0: no window.
  std::int64_t sliding_window = 0;
  std::vector<bool> is_window_layer;  ///< Empty: all layers are alike.
  std::vector<std::int64_t> eos_ids;
  RopeConfig rope;
  std::vector<std::string> unread_rope_keys;  ///< Keys that the rope's type does not take.
  /// Window and chunk keys, given to an architecture that attends to all tokens.
  std::vector<std::string> unread_attention_keys;
  std::int64_t num_mtp_layers = 0;  ///< Multi-token-prediction layers after the last layer; not run.
  std::optional<Fp8BlockConfig> fp8_blocks;

  /// Number of tokens that a query of the layer sees, including itself; 0: all tokens.
  std::int64_t window(std::int64_t layer) const;

  /// Factor on q k before the softmax: (head size)^-1/2. For MLA it is (nope + rope)^-1/2 times
  /// rope.latent_softmax_factor().
  float softmax_scale() const;

  /// The LayerConfig of layer `layer`. `inverse_frequency` points to rope.inverse_frequencies() on the
  /// device.
  LayerConfig layer(std::int64_t layer, const float* inverse_frequency) const;

  /// Epsilon of MLA's two latent norms; transformers does not read it from the config.
  static constexpr float kLatentNormEps = 1e-6f;
};

}  // namespace helix::decode
