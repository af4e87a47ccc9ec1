// SPDX-License-Identifier: Apache-2.0
// Memory of a rank.
#include <algorithm>
#include <cmath>

#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/limits.hpp>
#include <helix/plan/memory.hpp>
#include <helix/plan/step_time.hpp>

#include "plan/rank_elements.hpp"

namespace helix::plan {

namespace {

constexpr std::int64_t kMaxRowBytes = std::int64_t{1} << 24;

std::int64_t checked_bytes(const char* what, std::int64_t bytes) {
  HELIX_EXPECTS(bytes < kSaturated, ErrorCode::capacity, what,
                " of a rank exceeds 2^63 bytes; use fewer or shorter sequences or smaller pages");
  return bytes;
}

}  // namespace

std::int64_t kv_row_elements(const Topology& topology, int stage_rank) {
  const ModelShape& shape = topology.shape();
  return shape.is_mla() ? shape.head_dim : 2 * topology.kv_heads(stage_rank).size() * shape.head_dim;
}

std::int64_t kv_page_bytes(const Topology& topology, int stage_rank, const KvPages& pages) {
  HELIX_EXPECTS(pages.element_bits >= 1 && pages.num_layers >= 1 && pages.page_tokens >= 1,
                ErrorCode::invalid_argument, "kv_page_bytes: element_bits is ", pages.element_bits,
                ", num_layers ", pages.num_layers, ", page_tokens ", pages.page_tokens,
                "; each must be at least 1");
  HELIX_EXPECTS(
      pages.element_bits <= 64 && pages.page_tokens <= kMaxPageTokens && pages.num_layers <= kMaxCount,
      ErrorCode::invalid_argument, "kv_page_bytes: element_bits is ", pages.element_bits, ", page_tokens ",
      pages.page_tokens, ", num_layers ", pages.num_layers, "; at most 64, ", kMaxPageTokens, " and ",
      kMaxCount, " are supported");
  HELIX_EXPECTS(pages.row_bytes >= 0 && pages.row_bytes <= kMaxRowBytes, ErrorCode::invalid_argument,
                "kv_page_bytes: row_bytes is ", pages.row_bytes, "; it must be in [0, ", kMaxRowBytes, "]");
  const std::int64_t row_bits =
      pages.row_bytes > 0 ? 8 * pages.row_bytes : kv_row_elements(topology, stage_rank) * pages.element_bits;
  const std::int64_t bytes = ceil_div(row_bits * pages.page_tokens, std::int64_t{8});
  return checked_bytes("a KV page", saturating_product(bytes, pages.num_layers));
}

std::int64_t kv_page_bytes_used(const Topology& topology, int stage_rank, const KvPages& pages,
                                std::span<const std::int64_t> lengths) {
  const KvLayout layout(topology.kvp(), pages.chunk);
  const int kvp_rank = topology.stage_coordinates(stage_rank).kvp_rank;
  const std::int64_t page_bytes = kv_page_bytes(topology, stage_rank, pages);
  std::int64_t used = 0;
  for (const std::int64_t length : lengths) {
    HELIX_EXPECTS(length >= 0 && length <= kMaxTokens, ErrorCode::invalid_argument, "a sequence of ", length,
                  " tokens; at most ", kMaxTokens, " are supported");
    used = saturating_sum(used, layout.pages(length, kvp_rank, pages.page_tokens));
  }
  return checked_bytes("the KV cache", saturating_product(used, page_bytes));
}

namespace {

/// `count` returns how many layers of each kind a range holds.
template <class CountLayers>
RankMemoryPlan plan_memory_by(CountLayers&& count, const Model& model, const Precision& precision,
                              const Layout& layout, const Workload& workload) {
  precision.check();
  workload.check();
  for (const int width :
       {layout.kvp, layout.tpa, layout.attn_dp, layout.tpf, layout.ep, layout.pp, layout.dp}) {
    HELIX_EXPECTS(width >= 1 && width <= kMaxRanks, ErrorCode::invalid_argument, "plan_memory: KVP is ",
                  layout.kvp, ", TPA ", layout.tpa, ", attn_dp ", layout.attn_dp, ", TPF ", layout.tpf,
                  ", EP ", layout.ep, ", PP ", layout.pp, ", DP ", layout.dp, "; each must be in [1, ",
                  kMaxRanks, "]");
  }
  const std::int64_t stage_size = std::int64_t{layout.kvp} * layout.tpa * layout.attn_dp;
  HELIX_EXPECTS(stage_size <= kMaxRanks, ErrorCode::invalid_argument, "plan_memory: KVP * TPA * attn_dp is ",
                stage_size, "; it must be at most ", kMaxRanks);
  const detail::RankElements rank = detail::rank_elements(model, layout);
  const detail::RankBatch batch = detail::rank_batch(layout, workload);
  const auto hidden = static_cast<double>(model.shape.hidden);

  double most_weights = 0;
  std::int64_t most_layers = 0;
  for (int stage = 0; stage < layout.pp; ++stage) {
    const Range layers = split_evenly(model.shape.num_layers, layout.pp, stage);
    const detail::LayerCounts counts = count(layers);
    const auto dense = static_cast<double>(counts[0][0] + counts[0][1]);
    const auto moe = static_cast<double>(counts[1][0] + counts[1][1]);
    double weights = (dense + moe) * (rank.qkv + rank.value_up + rank.output + rank.norms) +
                     dense * rank.dense_ffn(model) + moe * rank.moe_ffn(model);
    const bool is_first = stage == 0;
    const bool is_last = stage == layout.pp - 1;
    const int tables = is_first && is_last && !model.tie_word_embeddings ? 2 : (is_first || is_last ? 1 : 0);
    weights += tables * rank.vocab * hidden;
    most_weights = std::max(most_weights, weights);
    most_layers = std::max(most_layers, layers.size());
  }

  RankMemoryPlan plan;
  plan.weights = packed_bytes(most_weights, precision.weight_bits);

  const KvLayout kv_layout(layout.kvp, workload.chunk);
  // Rank 0 owns the first chunk of each period, so no rank holds more.
  const std::int64_t pages = kv_layout.pages(
      static_cast<std::int64_t>(std::ceil(in_tokens(workload.context))), 0, workload.page_tokens);
  const Bytes page =
      packed_bytes(rank.kv_stored * static_cast<double>(workload.page_tokens), precision.kv_bits);
  plan.kv = page * pages * batch.cached * most_layers;

  const auto tokens = static_cast<double>(batch.attention * workload.step_tokens);
  const auto stage_tokens = static_cast<double>(batch.stage * workload.step_tokens);
  const auto value_dim = static_cast<double>(model.shape.value_dim);
  // Hidden, normed hidden, query and KV; the partial outputs, packed and received; FFN intermediates.
  double activations = tokens * (2 * hidden + rank.qkv_width) + 3 * tokens * rank.query_heads * value_dim +
                       stage_tokens * (hidden + 2 * rank.ffn_width + 2 * rank.shared_width);
  if (model.shape.moe) {
    activations += stage_tokens * static_cast<double>(model.shape.moe->top_k) *
                   (hidden + 2 * rank.expert_width);  // at most this many choices can land on one rank
  }
  constexpr double kLogitBits = 32;
  plan.workspace = packed_bytes(activations, precision.activation_bits) +
                   packed_bytes(stage_tokens * rank.vocab, kLogitBits);
  return plan;
}

}  // namespace

RankMemoryPlan plan_memory(const Model& model, const Precision& precision, const Layout& layout,
                           const Workload& workload) {
  return plan_memory_by([&](Range layers) { return detail::count_layers(model, layers); }, model, precision,
                        layout, workload);
}

RankMemoryPlan StepModel::memory(const Layout& layout, const Workload& workload) const {
  return plan_memory_by([&](Range layers) { return detail::count_layers(layers_before_, layers); }, model_,
                        precision_, layout, workload);
}

}  // namespace helix::plan
