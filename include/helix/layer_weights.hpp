// SPDX-License-Identifier: Apache-2.0
// LayerWeights: one layer's weights as one rank holds them, views only.
#pragma once

#include <variant>
#include <vector>

#include <helix/backend/layer.hpp>

namespace helix {

/// Weights of grouped-query attention, with MHA and MQA as its limits. Split over TPA, replicated over KVP;
/// W_o is split over N.
struct GqaWeights {
  /// [Hq/TPA * D + Hkv/TPA * (D + Dv), M], RankShape::qkv_columns() rows: queries, then keys, then values.
  WeightView qkv;
  WeightView qkv_bias{};  ///< [1, rows of qkv] or empty
  WeightView q_norm{};    ///< [1, D] or empty: RMSNorm of each query head before rope
  WeightView k_norm{};    ///< [1, D] or empty
  WeightView o;           ///< [M, Hq/N * Dv]: the columns of Topology::combined_heads
  WeightView o_bias{};  ///< [1, M] on stage_rank 0, which adds it once before the all-reduce; empty elsewhere
  /// [Hq/N] attention-sink logits of Topology::combined_heads, device memory; or nullptr.
  const float* sinks = nullptr;
};

/// Weights of DeepSeek's multi-head latent attention, with TPA = 1. Replicated over KVP, except W_UV and W_o.
/// Prompt chunks attend expanded (MlaPrefill) only if expand_k and expand_v are given. These are the two
/// halves of DeepSeek's kv_b_proj.
struct MlaWeights {
  /// [q_lora + kv_lora + rope, M], RankShape::qkv_a_columns() rows: W_DQ, then W_DKV. Without a query LoRA
  /// (q_lora_rank 0): [Hq * (nope + rope) + kv_lora + rope, M], W_Q, then W_DKV.
  WeightView qkv_a;
  WeightView qkv_a_bias{};  ///< [1, rows of qkv_a] or empty
  WeightView q_a_norm{};    ///< [1, q_lora], or empty without a query LoRA
  WeightView q_b{};         ///< [Hq * (nope + rope), q_lora], or empty without a query LoRA
  WeightView kv_a_norm;     ///< [1, kv_lora]
  WeightView w_uk;          ///< [Hq * kv_lora, nope]: absorbs q_nope into the latent space, head by head
  WeightView w_uv;          ///< [Hq/N * v, kv_lora]: W_UV of Topology::combined_heads
  WeightView o;             ///< [M, Hq/N * v]
  WeightView o_bias{};  ///< [1, M] on stage_rank 0, which adds it once before the all-reduce; empty elsewhere
  WeightView expand_k{};  ///< [Hq * nope, kv_lora] or empty: W_UK, each head's block transposed
  WeightView expand_v{};  ///< [Hq * v, kv_lora], or empty if expand_k is: W_UV of all heads
};

/// Weights of a SwiGLU FFN, split over N.
struct DenseFfnWeights {
  WeightView gate_up;         ///< [2 F/N, M]: gate rows, then up rows
  WeightView gate_up_bias{};  ///< [1, 2 F/N] or empty
  WeightView down;            ///< [M, F/N]
  WeightView down_bias{};     ///< [1, M] on stage_rank 0; empty elsewhere
};

/// Weights of an MoE FFN: routed experts split over EP, each of them over TPF; the shared expert split over
/// N.
struct MoeWeights {
  WeightView router;                   ///< [E, M], replicated
  const float* router_bias = nullptr;  ///< [E], device memory, or nullptr; used only to select experts.
  std::vector<ExpertWeights> experts;  ///< Weights of Topology::experts, in order.
  DenseFfnWeights shared{};            ///< Empty views when the model has no shared expert
};

/// Weights of a layer's attention: grouped-query or latent.
using AttentionWeights = std::variant<GqaWeights, MlaWeights>;
/// Weights of a layer's FFN: dense or mixture of experts.
using FfnWeights = std::variant<DenseFfnWeights, MoeWeights>;

/// Weights of one layer as one rank holds them.
struct LayerWeights {
  WeightView input_norm;           ///< [1, M]
  WeightView post_attention_norm;  ///< [1, M]
  AttentionWeights attention;
  FfnWeights ffn;
};

}  // namespace helix
