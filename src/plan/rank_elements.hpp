// SPDX-License-Identifier: Apache-2.0
// What one rank of a layout holds of a layer, in elements, and its share of a batch; memory and step time
// both count with it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include <helix/integers.hpp>
#include <helix/plan/layout.hpp>
#include <helix/plan/model.hpp>
#include <helix/plan/workload.hpp>
#include <helix/topology.hpp>

namespace helix::plan::detail {

/// Layers [of dense 0 or MoE 1][full 0 or windowed 1].
using LayerCounts = std::array<std::array<std::int64_t, 2>, 2>;

inline void count_layer(const Model& model, std::int64_t layer, LayerCounts& counts) {
  ++counts[model.shape.is_moe_layer(layer) ? 1 : 0][model.is_window_layer(layer) ? 1 : 0];
}

inline LayerCounts count_layers(const Model& model, Range layers) {
  LayerCounts counts{};
  for (std::int64_t layer = layers.begin; layer < layers.end; ++layer) count_layer(model, layer, counts);
  return counts;
}

/// Layers before each layer and before the end; the count of any range is the difference of two entries.
inline std::vector<LayerCounts> count_layers_before(const Model& model) {
  std::vector<LayerCounts> before(static_cast<std::size_t>(model.shape.num_layers) + 1);
  for (std::int64_t layer = 0; layer < model.shape.num_layers; ++layer) {
    const auto at = static_cast<std::size_t>(layer);
    before[at + 1] = before[at];
    count_layer(model, layer, before[at + 1]);
  }
  return before;
}

inline LayerCounts count_layers(const std::vector<LayerCounts>& before, Range layers) {
  LayerCounts counts = before[static_cast<std::size_t>(layers.end)];
  for (const std::size_t moe : {0u, 1u}) {
    for (const std::size_t windowed : {0u, 1u}) {
      counts[moe][windowed] -= before[static_cast<std::size_t>(layers.begin)][moe][windowed];
    }
  }
  return counts;
}

/// Weights of one layer on one rank, and widths of its activations. Doubles, because they enter products.
struct RankElements {
  double query_heads = 0;     ///< Query heads that the rank attends with.
  double combined_heads = 0;  ///< Heads whose exact attention it holds after the exchange.
  double kv_row = 0;          ///< Elements of a token's K and V, or latent, that attention reads.
  double kv_stored = 0;       ///< Elements that these take in the cache, whose V rows are D wide.
  double qkv = 0;             ///< All weights before attention.
  double qkv_width = 0;       ///< Width of the query as attention reads it, and of a token's K and V.
  double value_up = 0;        ///< MLA's W_UV
  double output = 0;
  double output_width = 0;  ///< Inputs of the output projection.
  double norms = 0;
  double ffn_width = 0;  ///< F of the dense FFN
  double shared_width = 0;
  double expert_width = 0;  ///< F of one routed expert.
  double experts = 0;       ///< Routed experts that the rank holds.
  double router = 0;
  double vocab = 0;  ///< Rows of the vocabulary.

  double dense_ffn(const Model& model) const {
    return 3 * static_cast<double>(model.shape.hidden) * ffn_width;
  }
  double moe_ffn(const Model& model) const {
    return 3 * static_cast<double>(model.shape.hidden) * (experts * expert_width + shared_width) + router;
  }
};

inline RankElements rank_elements(const Model& model, const Layout& layout) {
  RankElements rank;
  const auto hidden = static_cast<double>(model.shape.hidden);
  const int width = layout.ffn_width();
  rank.query_heads = static_cast<double>(model.shape.num_query_heads / layout.tpa);
  rank.combined_heads = layout.strategy == Strategy::helix ? rank.query_heads / layout.kvp : rank.query_heads;
  const auto kv_heads = static_cast<double>(std::max<std::int64_t>(1, model.shape.num_kv_heads / layout.tpa));
  const auto head_dim = static_cast<double>(model.shape.head_dim);
  const auto value_dim = static_cast<double>(model.shape.value_dim);
  rank.kv_row = model.shape.mla ? head_dim : kv_heads * (head_dim + value_dim);
  rank.kv_stored = model.shape.mla ? head_dim : kv_heads * 2 * head_dim;
  rank.qkv_width = rank.query_heads * head_dim + rank.kv_row;
  rank.norms = 2 * hidden;
  if (model.shape.mla) {
    const MlaShape& mla = *model.shape.mla;
    const auto q_rank = static_cast<double>(mla.q_lora_rank);
    const auto nope = static_cast<double>(mla.qk_nope_head_dim);
    const auto latent = static_cast<double>(mla.kv_lora_rank);
    const double query_width = rank.query_heads * static_cast<double>(mla.qk_head_dim());
    rank.qkv = q_rank > 0 ? hidden * q_rank + q_rank * query_width : hidden * query_width;
    rank.qkv += hidden * head_dim + rank.query_heads * nope * latent;
    rank.output_width = rank.combined_heads * static_cast<double>(mla.v_head_dim);
    rank.value_up = latent * rank.output_width;
  } else {
    rank.qkv = hidden * rank.qkv_width;
    rank.output_width = rank.combined_heads * value_dim;
  }
  rank.output = rank.output_width * hidden;
  rank.ffn_width = static_cast<double>(model.shape.ffn) / width;
  if (model.shape.moe) {
    const MoeShape& moe = *model.shape.moe;
    const int shared_width = layout.strategy == Strategy::data_parallel_attention ? layout.tpa : width;
    rank.shared_width = static_cast<double>(moe.shared_ffn) / shared_width;
    rank.expert_width = static_cast<double>(moe.expert_ffn) / layout.tpf;
    rank.experts = static_cast<double>(moe.num_experts) / layout.ep;
    rank.router = hidden * static_cast<double>(moe.num_experts);
  }
  rank.vocab = static_cast<double>(ceil_div<std::int64_t>(model.shape.vocab, width));
  return rank;
}

/// The part of a batch on the fullest rank.
struct RankBatch {
  std::int64_t replica = 0;        ///< Sequences of a replica.
  std::int64_t micro_batches = 1;  ///< Micro-batches that share a replica's pipeline.
  std::int64_t stage = 0;          ///< Sequences that a stage works on at a time.
  std::int64_t attention = 0;      ///< Sequences of a stage that one rank attends to.
  std::int64_t cached = 0;         ///< Sequences whose KV one rank holds.
};

inline RankBatch rank_batch(const Layout& layout, const Workload& workload) {
  RankBatch batch;
  batch.replica = ceil_div<std::int64_t>(workload.batch, layout.dp);
  batch.micro_batches = std::min<std::int64_t>(layout.pp, batch.replica);
  batch.stage = ceil_div(batch.replica, batch.micro_batches);
  batch.attention = ceil_div<std::int64_t>(batch.stage, layout.attn_dp);
  batch.cached = ceil_div<std::int64_t>(batch.replica, layout.attn_dp);
  return batch;
}

}  // namespace helix::plan::detail
