// SPDX-License-Identifier: Apache-2.0
// RankShape: the sizes of a layer on one rank of a stage, computed once.
#pragma once

#include <cstdint>
#include <optional>

#include <helix/model_shape.hpp>
#include <helix/range.hpp>

namespace helix {

/// Sizes of a layer on one rank: its heads, widths and experts. Topology::rank_shape() makes it.
struct RankShape {
  int stage_rank = 0;
  int stage_size = 1;  ///< N.
  int kvp = 1;
  int kvp_rank = 0;
  std::int64_t hidden = 0;          ///< M.
  std::int64_t query_heads = 0;     ///< Hq/TPA, the query heads that the rank projects and attends with.
  std::int64_t kv_heads = 0;        ///< Hkv/TPA, the KV heads that the rank stores.
  std::int64_t combined_heads = 0;  ///< Hq/N, the heads whose exact attention the rank ends with.
  std::int64_t head_dim = 0;        ///< D.
  std::int64_t value_dim = 0;       ///< Dv.
  std::optional<MlaShape> mla{};    ///< Sizes of the whole model, as no latent is split.
  std::int64_t ffn = 0;             ///< F/N.
  std::int64_t shared_ffn = 0;      ///< F/N of the shared experts.
  std::int64_t expert_ffn = 0;      ///< F/TPF of a routed expert.
  std::int64_t num_experts = 0;     ///< E of the whole model.
  std::int64_t top_k = 0;
  Range experts{};  ///< Global ids of the routed experts that the rank holds.

  constexpr int tpa() const { return stage_size / kvp; }
  constexpr int tpa_rank() const { return stage_rank % tpa(); }
  /// Columns of the fused projection of grouped-query attention: q, k and v.
  std::int64_t qkv_columns() const { return query_heads * head_dim + kv_heads * (head_dim + value_dim); }
  /// Columns of queries in MlaWeights::qkv_a's product: the query LoRA, or without one all heads. Only with
  /// `mla`.
  std::int64_t q_a_columns() const {
    return mla->q_lora_rank > 0 ? mla->q_lora_rank : query_heads * mla->qk_head_dim();
  }
  /// Columns of MlaWeights::qkv_a's product: queries, then the latent. Only with `mla`.
  std::int64_t qkv_a_columns() const { return q_a_columns() + mla->latent_dim(); }
};

}  // namespace helix
