// SPDX-License-Identifier: Apache-2.0
// ModelShape: the sizes of a decoder-only transformer, the one description that library, decoder, planner and
// benchmarks share.
#pragma once

#include <cstdint>
#include <optional>

namespace helix {

/// Sizes of multi-head latent attention (MLA). ModelShape::num_kv_heads is then 1, head_dim is kv_lora_rank +
/// qk_rope_head_dim and value_dim is kv_lora_rank: the absorbed form that decoding runs.
struct MlaShape {
  std::int64_t q_lora_rank = 0;  ///< Compressed query size; 0: queries are projected from hidden.
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_head_dim = 0;  ///< 0 will do for a cache, but not for decode_layer().
  std::int64_t qk_rope_head_dim = 0;
  std::int64_t v_head_dim = 0;  ///< As qk_nope_head_dim.

  /// Size of a query head before absorption.
  constexpr std::int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  /// Size of the latent row that is cached for a token.
  constexpr std::int64_t latent_dim() const { return kv_lora_rank + qk_rope_head_dim; }
};

/// Sizes of mixture-of-experts FFNs. Layer i is an MoE layer if i >= first_dense_layers and (i -
/// first_dense_layers) is a multiple of layer_stride.
struct MoeShape {
  std::int64_t num_experts = 0;  ///< Routed experts, E.
  std::int64_t top_k = 1;        ///< Routed experts a token.
  std::int64_t expert_ffn = 0;   ///< F of one routed expert.
  std::int64_t shared_ffn = 0;   ///< F of all shared experts together; 0: none.
  std::int64_t first_dense_layers = 0;
  std::int64_t layer_stride = 1;  ///< At least 1, else is_moe_layer() divides by 0; Topology refuses it.

  constexpr bool is_moe_layer(std::int64_t layer) const {
    return layer >= first_dense_layers && (layer - first_dense_layers) % layer_stride == 0;
  }
};

/// The sizes of a model that decide how it may be split and what a step reads, computes and stores. Zero
/// means that the model has no such part.
struct ModelShape {
  std::int64_t num_query_heads = 0;  ///< Hq.
  std::int64_t num_kv_heads = 0;     ///< Hkv; 1 for MLA, whose latent is one KV head.
  std::int64_t head_dim = 0;         ///< D, size of a query and key head as cached.
  std::int64_t value_dim = 0;        ///< Dv, size of a partial attention output.
  std::int64_t hidden = 0;           ///< M.
  std::int64_t ffn = 0;              ///< F of the dense layers.
  std::int64_t vocab = 0;
  std::int64_t num_layers = 0;
  std::optional<MlaShape> mla{};  ///< Latent attention: TPA must be 1.
  std::optional<MoeShape> moe{};

  constexpr bool is_mla() const { return mla.has_value(); }
  constexpr bool is_moe_layer(std::int64_t layer) const { return moe && moe->is_moe_layer(layer); }
  constexpr std::int64_t num_experts() const { return moe ? moe->num_experts : 0; }
  constexpr std::int64_t expert_ffn() const { return moe ? moe->expert_ffn : 0; }
  constexpr std::int64_t shared_ffn() const { return moe ? moe->shared_ffn : 0; }
  /// Elements of one token's keys and values in one layer, with each KV head once: Hkv * (D + Dv), or for MLA
  /// the latent row. ShardedKVCache takes 2 * Hkv * D, because its rows of V take D columns.
  constexpr std::int64_t kv_elements() const {
    return mla ? head_dim : num_kv_heads * (head_dim + value_dim);
  }
};

}  // namespace helix
