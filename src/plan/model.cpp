// SPDX-License-Identifier: Apache-2.0
// Model: its checks and its totals.
#include <cmath>
#include <iterator>
#include <string>
#include <string_view>

#include <helix/error.hpp>
#include <helix/kv_format.hpp>
#include <helix/limits.hpp>
#include <helix/plan/model.hpp>
#include <helix/topology.hpp>

namespace helix::plan {
namespace {

// More than any model by orders of magnitude, yet sums of products stay exact in a double.
constexpr double kMaxParameters = 1e15;

void check_size(std::string_view name, std::int64_t value, std::int64_t smallest, std::int64_t largest) {
  HELIX_EXPECTS(value >= smallest && value <= largest, ErrorCode::invalid_argument, "the model's ", name,
                " is ", value, "; it must be in [", smallest, ", ", largest, "]");
}

double attention_parameters(const Model& model) {
  const auto hidden = static_cast<double>(model.shape.hidden);
  const auto heads = static_cast<double>(model.shape.num_query_heads);
  if (!model.shape.mla) {
    const auto kv_row = static_cast<double>(model.shape.kv_elements());
    return hidden * (heads * static_cast<double>(model.shape.head_dim + model.shape.value_dim) + kv_row);
  }
  const MlaShape& mla = *model.shape.mla;
  const double query_width = heads * static_cast<double>(mla.qk_head_dim());
  const auto rank = static_cast<double>(mla.q_lora_rank);
  const double query = rank > 0 ? hidden * rank + rank * query_width : hidden * query_width;
  const double latent = hidden * static_cast<double>(mla.latent_dim());
  const double up = static_cast<double>(mla.kv_lora_rank) * heads *
                    static_cast<double>(mla.qk_nope_head_dim + mla.v_head_dim);
  return query + latent + up + heads * static_cast<double>(mla.v_head_dim) * hidden;
}

/// Elements of the norms of one layer.
std::int64_t norm_parameters(const Model& model) {
  std::int64_t norms = 2 * model.shape.hidden + (model.has_qk_norm ? 2 * model.shape.head_dim : 0);
  if (model.shape.mla) norms += model.shape.mla->q_lora_rank + model.shape.mla->kv_lora_rank;
  return norms;
}

/// All parameters of the model. A double, which absurd sizes do not overflow.
double total_parameters(const Model& model) {
  const auto layers = static_cast<double>(model.shape.num_layers);
  const auto hidden = static_cast<double>(model.shape.hidden);
  double total = layers * attention_parameters(model) + 2 * hidden * static_cast<double>(model.shape.vocab);
  total += layers * 3 * hidden * static_cast<double>(model.shape.ffn);
  if (model.shape.moe) {
    const MoeShape& moe = *model.shape.moe;
    total += layers * 3 * hidden *
             (static_cast<double>(moe.num_experts) * static_cast<double>(moe.expert_ffn) +
              static_cast<double>(moe.shared_ffn));
  }
  return total;
}

}  // namespace

double expected_expert_hits(const MoeShape& moe, double tokens) {
  HELIX_EXPECTS(moe.num_experts >= 1 && moe.top_k >= 0 && moe.top_k <= moe.num_experts,
                ErrorCode::invalid_argument, "expected_expert_hits: top_k is ", moe.top_k, " of ",
                moe.num_experts, " experts; there must be one or more, and top_k in [0, num_experts]");
  HELIX_EXPECTS(tokens >= 0, ErrorCode::invalid_argument, "expected_expert_hits: ", tokens,
                " tokens; there must be 0 or more");
  const auto count = static_cast<double>(moe.num_experts);
  return count * (1 - std::pow(1 - static_cast<double>(moe.top_k) / count, tokens));
}

bool Model::is_window_layer(std::int64_t layer) const {
  if (window == 0) return false;
  if (!window_layers.empty()) {
    HELIX_EXPECTS(layer >= 0 && layer < std::ssize(window_layers), ErrorCode::invalid_argument,
                  "is_window_layer: layer ", layer, "; window_layers has ", window_layers.size());
    return window_layers[static_cast<std::size_t>(layer)];
  }
  return full_attention_stride == 0 || (layer + 1) % full_attention_stride != 0;
}

void Model::check() const {
  std::string wrong;
  for (const std::string& violation : detail::shape_violations(shape))
    wrong += (wrong.empty() ? "" : "; ") + violation;
  HELIX_EXPECTS(wrong.empty(), ErrorCode::invalid_argument, wrong);
  // A shape may leave these out, but a step's time needs them.
  check_size("num_layers", shape.num_layers, 1, kMaxCount);
  if (shape.mla) {
    check_size("qk_nope_head_dim", shape.mla->qk_nope_head_dim, 1, kMaxWidth);
    check_size("v_head_dim", shape.mla->v_head_dim, 1, kMaxWidth);
  }
  if (shape.moe) {
    check_size("num_experts", shape.moe->num_experts, 1, kMaxCount);
    check_size("first_dense_layers", shape.moe->first_dense_layers, 0, shape.num_layers);
  }
  check_size("window", window, 0, kMaxTokens);
  check_size("full_attention_stride", full_attention_stride, 0, kMaxCount);
  HELIX_EXPECTS(window_layers.empty() || std::ssize(window_layers) == shape.num_layers,
                ErrorCode::invalid_argument, "the model's window_layers has ", window_layers.size(),
                " layers; num_layers is ", shape.num_layers);
  const bool has_dense_layers = !shape.moe || shape.moe->first_dense_layers > 0 ||
                                (shape.moe->layer_stride > 1 && shape.num_layers > 1);
  HELIX_EXPECTS(shape.ffn > 0 || !has_dense_layers, ErrorCode::invalid_argument,
                "the model's ffn is 0 but it has dense layers");
  const double total = total_parameters(*this);
  HELIX_EXPECTS(total <= kMaxParameters, ErrorCode::invalid_argument, "the model's sizes come to ", total,
                " parameters; at most ", kMaxParameters, " are supported: check its sizes");
}

void Precision::check() const {
  const auto check_bits = [](std::string_view name, double bits) {
    HELIX_EXPECTS(bits > 0 && bits <= 64, ErrorCode::invalid_argument, name, " is ", bits,
                  "; it must be in (0, 64]");
  };
  check_bits("weight_bits", weight_bits);
  check_bits("kv_bits", kv_bits);
  check_bits("activation_bits", activation_bits);
}

double kv_element_bits(const ModelShape& shape, DType dtype) {
  if (!shape.is_mla()) return 8.0 * static_cast<double>(size_bytes(dtype));
  return 8.0 * static_cast<double>(latent_row_bytes(dtype, shape.head_dim, shape.value_dim)) /
         static_cast<double>(shape.head_dim);
}

ParameterCounts count_parameters(const Model& model) {
  model.check();
  std::int64_t moe_layers = 0;
  for (std::int64_t layer = 0; layer < model.shape.num_layers; ++layer)
    moe_layers += model.shape.is_moe_layer(layer);
  ParameterCounts counts;
  counts.embedding = model.shape.vocab * model.shape.hidden;
  counts.lm_head = model.tie_word_embeddings ? 0 : counts.embedding;
  counts.attention = model.shape.num_layers * std::llround(attention_parameters(model));
  counts.dense_ffn = (model.shape.num_layers - moe_layers) * 3 * model.shape.hidden * model.shape.ffn;
  counts.norms = model.shape.num_layers * norm_parameters(model) + model.shape.hidden;
  if (model.shape.moe) {
    const MoeShape& moe = *model.shape.moe;
    const std::int64_t expert = 3 * model.shape.hidden * moe.expert_ffn;
    counts.routed_experts = moe_layers * moe.num_experts * expert;
    counts.routed_experts_active = moe_layers * moe.top_k * expert;
    counts.shared_experts = moe_layers * 3 * model.shape.hidden * moe.shared_ffn;
    counts.router = moe_layers * model.shape.hidden * moe.num_experts;
  }
  return counts;
}

Bytes kv_cache_bytes(const Model& model, const Precision& precision, Tokens context) {
  precision.check();
  HELIX_EXPECTS(context >= Tokens{}, ErrorCode::invalid_argument, "kv_cache_bytes: the context is ",
                in_tokens(context), " tokens; it must be 0 or more");
  return packed_bytes(
      in_tokens(context) * static_cast<double>(model.shape.num_layers * model.shape.kv_elements()),
      precision.kv_bits);
}

}  // namespace helix::plan
