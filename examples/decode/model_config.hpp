// SPDX-License-Identifier: Apache-2.0
// ModelConfig: what config.json says about a Llama-like or DeepSeek model, checked, with the rope and router
// it implies.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <helix/backend.hpp>
#include <helix/dtype.hpp>
#include <helix/topology.hpp>

namespace helix::decode {

enum class RopeType : std::uint8_t { standard, linear, llama3, yarn };

/// Rotary embedding as the config states it; `standard` uses theta alone.
struct RopeConfig {
  RopeType type = RopeType::standard;
  double theta = 10000.0;
  std::int64_t rotary_dim = 0;  ///< of a head: all of it, or MLA's qk_rope_head_dim
  bool is_interleaved = false;
  double factor = 1.0;                                ///< linear, llama3, yarn
  std::int64_t original_max_position_embeddings = 0;  ///< llama3, yarn
  double low_freq_factor = 1.0;                       ///< llama3
  double high_freq_factor = 4.0;                      ///< llama3
  double beta_fast = 32.0;                            ///< yarn
  double beta_slow = 1.0;                             ///< yarn
  double mscale = 0.0;                                ///< yarn; 0: not given
  double mscale_all_dim = 0.0;                        ///< yarn; 0: not given
  std::optional<double> attention_factor;             ///< yarn
  bool truncate = true;  ///< yarn: round the correction range to whole dimensions
};

/// MLA's sizes.
struct MlaConfig {
  std::int64_t q_lora_rank = 0;  ///< 0: queries straight from hidden
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_head_dim = 0;
  std::int64_t qk_rope_head_dim = 0;
  std::int64_t v_head_dim = 0;

  std::int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
};

/// The routed and shared experts, and how a token chooses (RouteArgs).
struct MoeConfig {
  std::int64_t num_experts = 0;
  std::int64_t num_shared_experts = 0;
  std::int64_t expert_ffn = 0;
  std::int64_t first_dense_layers = 0;  ///< layers before this one are dense
  std::int64_t layer_freq = 1;          ///< of the others, multiples of this are MoE layers
  RouterScoring scoring = RouterScoring::softmax;
  bool has_router_bias = false;
  std::int64_t num_groups = 1;
  std::int64_t groups_kept = 1;
  std::int64_t top_k = 1;
  bool normalize = false;
  float routed_scaling_factor = 1.0f;

  std::int64_t shared_ffn() const { return num_shared_experts * expert_ffn; }
};

/// A block-scaled fp8 checkpoint: one scale for each [block_rows, block_cols] of a weight.
struct Fp8BlockConfig {
  std::int64_t block_rows = 128;
  std::int64_t block_cols = 128;
};

/// A checked model description. Absent optional keys have the values that transformers gives them.
struct ModelConfig {
  std::string model_type;
  std::int64_t hidden = 0;
  std::int64_t ffn = 0;  ///< of the dense layers
  std::int64_t num_layers = 0;
  std::int64_t num_query_heads = 0;
  std::int64_t num_kv_heads = 0;  ///< of the cache: 1 for MLA
  std::int64_t head_dim = 0;      ///< of the cache's keys: MLA's is kv_lora_rank + qk_rope_head_dim
  std::int64_t vocab = 0;
  std::int64_t max_positions = 0;
  float rms_norm_eps = 1e-6f;
  DType dtype = DType::bf16;  ///< torch_dtype or dtype: what the model was trained to compute and cache in
  bool tie_word_embeddings = false;
  bool has_qkv_bias = false;
  bool has_output_bias = false;
  bool has_mlp_bias = false;
  bool has_qk_norm = false;
  std::int64_t sliding_window =
      0;  ///< tokens that a query of a windowed layer sees, itself included; 0: no window
  std::vector<bool> is_window_layer;  ///< empty: all layers alike
  std::vector<std::int64_t> eos_ids;
  RopeConfig rope;
  std::optional<MlaConfig> mla;
  std::optional<MoeConfig> moe;
  std::optional<Fp8BlockConfig> fp8_blocks;

  /// The sizes that Topology needs.
  ModelShape shape() const;

  /// Whether the layer's FFN is routed experts.
  bool is_moe_layer(std::int64_t layer) const;

  /// Tokens that a query of the layer sees, itself included; 0: all.
  std::int64_t window(std::int64_t layer) const;

  /// Inverse frequency of each rotary pair, [rotary_dim / 2], scaled as rope.type says, in float32 operation
  /// by operation as transformers computes it.
  std::vector<float> inverse_frequencies() const;

  /// Factor on cos and sin: yarn's attention factor, else 1.
  float rope_magnitude() const;

  /// Factor on q k before the softmax: head size^-1/2, for MLA (nope + rope)^-1/2 times yarn's m^2.
  float softmax_scale() const;

  /// Epsilon of MLA's two latent norms, which transformers does not take from the config.
  static constexpr float kLatentNormEps = 1e-6f;
};

/// Parses and checks config.json.
/// @throws Error(invalid_file) naming `file`, the key, its value and what was expected; Error(unsupported)
/// for a model, activation, rope or quantization that is not built.
ModelConfig parse_model_config(std::string_view json, std::string_view file);

}  // namespace helix::decode
