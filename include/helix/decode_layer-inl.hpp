// SPDX-License-Identifier: Apache-2.0
// The shapes that decode_layer expects of one rank's weights.
#pragma once

#include <cstdint>
#include <string_view>
#include <variant>

#include <helix/decode_layer.hpp>
#include <helix/error.hpp>
#include <helix/layer_weights.hpp>
#include <helix/topology.hpp>

namespace helix::detail {

/// A slice without elements may have no address.
inline void expect_shape(std::string_view name, const WeightView& weight, std::int64_t rows,
                         std::int64_t cols, std::string_view hint = "") {
  HELIX_EXPECTS(weight.rows == rows && weight.cols == cols && (!weight.empty() || rows * cols == 0),
                ErrorCode::invalid_argument, "decode_layer: ", name, " is ", weight.empty() ? "empty, " : "",
                "[", weight.rows, ", ", weight.cols, "]; this rank needs [", rows, ", ", cols, "]", hint);
  HELIX_EXPECTS(weight.dtype != DType::fp8_e4m3, ErrorCode::invalid_argument, "decode_layer: ", name, " is ",
                to_string(weight.dtype), "; weights are f32, f16 or bf16: convert them when loading");
}

inline void expect_shape_if_given(std::string_view name, const WeightView& weight, std::int64_t cols) {
  if (!weight.empty()) expect_shape(name, weight, 1, cols);
}

/// Biases that follow an all-reduce over N would be summed N times.
inline void expect_once(std::string_view name, const WeightView& bias, std::int64_t cols, int stage_rank) {
  expect_shape_if_given(name, bias, cols);
  HELIX_EXPECTS(bias.empty() || stage_rank == 0, ErrorCode::invalid_argument, "decode_layer: stage_rank ",
                stage_rank, " holds ", name, "; only stage_rank 0 may, or the all-reduce adds it N times");
}

inline constexpr std::string_view kOutputHint =
    " (the columns of Topology::combined_heads, not of stage_rank)";

inline void check_attention(const Topology& topo, int stage_rank, const LayerConfig& config,
                            const GqaWeights& weights) {
  const ModelShape& shape = topo.shape();
  const std::int64_t qkv_rows = topo.query_heads(stage_rank).size() * shape.head_dim +
                                topo.kv_heads(stage_rank).size() * (shape.head_dim + shape.value_dim);
  expect_shape("qkv", weights.qkv, qkv_rows, shape.hidden);
  expect_shape_if_given("qkv_bias", weights.qkv_bias, qkv_rows);
  expect_shape_if_given("q_norm", weights.q_norm, shape.head_dim);
  expect_shape_if_given("k_norm", weights.k_norm, shape.head_dim);
  expect_shape("the output projection", weights.o, shape.hidden,
               topo.combined_heads(stage_rank).size() * shape.value_dim, kOutputHint);
  expect_once("o_bias", weights.o_bias, shape.hidden, stage_rank);
  const std::int64_t rotary = config.rope.rotary_dim;
  HELIX_EXPECTS(rotary >= 0 && rotary % 2 == 0 && rotary <= shape.head_dim, ErrorCode::invalid_argument,
                "decode_layer: rotary_dim is ", rotary, "; it must be even and in [0, ", shape.head_dim, "]");
}

inline void check_attention(const Topology& topo, int stage_rank, const LayerConfig& config,
                            const MlaWeights& weights) {
  const ModelShape& shape = topo.shape();
  const MlaDims& mla = config.mla;
  const std::int64_t heads = shape.num_query_heads;
  const std::int64_t combined = topo.combined_heads(stage_rank).size();
  const std::int64_t latent = shape.value_dim;
  HELIX_EXPECTS(mla.nope >= 1 && mla.rope >= 0 && mla.value >= 1 && latent + mla.rope == shape.head_dim,
                ErrorCode::invalid_argument, "decode_layer: MLA has ", mla.nope, " nope, ", mla.rope,
                " rope and ", mla.value, " value dims and a latent of ", latent,
                "; latent and rope make the ", shape.head_dim, "-wide rows of the cache");
  const std::int64_t rotary = config.rope.rotary_dim;
  HELIX_EXPECTS(rotary >= 0 && rotary % 2 == 0 && rotary <= mla.rope, ErrorCode::invalid_argument,
                "decode_layer: rotary_dim is ", rotary, "; it must be even and in [0, ", mla.rope, "]");
  if (weights.q_a.empty()) {
    expect_shape("q_b", weights.q_b, heads * (mla.nope + mla.rope), shape.hidden);
  } else {
    expect_shape("q_a", weights.q_a, mla.q_lora, shape.hidden);
    expect_shape("q_a_norm", weights.q_a_norm, 1, mla.q_lora);
    expect_shape("q_b", weights.q_b, heads * (mla.nope + mla.rope), mla.q_lora);
  }
  expect_shape("kv_a", weights.kv_a, latent + mla.rope, shape.hidden);
  expect_shape("kv_a_norm", weights.kv_a_norm, 1, latent);
  expect_shape("w_uk", weights.w_uk, heads * latent, mla.nope);
  expect_shape("w_uv", weights.w_uv, combined * mla.value, latent);
  expect_shape("the output projection", weights.o, shape.hidden, combined * mla.value, kOutputHint);
}

inline void check_dense(std::string_view name, const DenseFfnWeights& weights, std::int64_t part,
                        std::int64_t hidden, int stage_rank) {
  expect_shape(name, weights.gate_up, 2 * part, hidden, " (gate_up)");
  expect_shape_if_given("gate_up_bias", weights.gate_up_bias, 2 * part);
  expect_shape(name, weights.down, hidden, part, " (down)");
  expect_once("down_bias", weights.down_bias, hidden, stage_rank);
}

inline void check_ffn(const Topology& topo, int stage_rank, const LayerConfig&,
                      const DenseFfnWeights& weights) {
  check_dense("the FFN", weights, topo.ffn(stage_rank).size(), topo.shape().hidden, stage_rank);
}

inline void check_ffn(const Topology& topo, int stage_rank, const LayerConfig& config,
                      const MoeWeights& weights) {
  const ModelShape& shape = topo.shape();
  const RouterConfig& router = config.router;
  HELIX_EXPECTS(shape.num_experts > 0, ErrorCode::invalid_argument,
                "decode_layer: the layer holds experts but the model's num_experts is 0");
  HELIX_EXPECTS(router.num_groups >= 1 && shape.num_experts % router.num_groups == 0 &&
                    router.groups_kept >= 1 && router.groups_kept <= router.num_groups,
                ErrorCode::invalid_argument, "decode_layer: the router keeps ", router.groups_kept, " of ",
                router.num_groups, " groups of ", shape.num_experts,
                " experts; groups must divide the experts, and between 1 and all be kept");
  const std::int64_t eligible = router.groups_kept * (shape.num_experts / router.num_groups);
  HELIX_EXPECTS(router.top_k >= 1 && router.top_k <= eligible, ErrorCode::invalid_argument,
                "decode_layer: top_k is ", router.top_k, "; it must be in [1, ", eligible,
                "], the experts of the kept groups");
  expect_shape("the router", weights.router, shape.num_experts, shape.hidden);
  const std::int64_t local = topo.experts(stage_rank).size();
  HELIX_EXPECTS(static_cast<std::int64_t>(weights.experts.size()) == local, ErrorCode::invalid_argument,
                "decode_layer: the layer holds ", weights.experts.size(), " experts; this rank has ", local);
  const std::int64_t part = topo.expert_ffn(stage_rank).size();
  for (const ExpertWeights& expert : weights.experts) {
    expect_shape("a routed expert", expert.gate_up, 2 * part, shape.hidden, " (gate_up)");
    expect_shape("a routed expert", expert.down, shape.hidden, part, " (down)");
  }
  const std::int64_t shared = topo.shared_expert_ffn(stage_rank).size();
  if (shared > 0 || !weights.shared.down.empty())
    check_dense("the shared expert", weights.shared, shared, shape.hidden, stage_rank);
}

inline void check_layer_weights(const Topology& topo, int stage_rank, const LayerConfig& config,
                                const LayerWeights& weights) {
  const ModelShape& shape = topo.shape();
  HELIX_EXPECTS(config.softmax_scale > 0.0f && config.window >= 0 && config.soft_cap >= 0.0f,
                ErrorCode::invalid_argument, "decode_layer: softmax_scale is ", config.softmax_scale,
                " (> 0), window ", config.window, " (>= 0), soft_cap ", config.soft_cap, " (>= 0)");
  HELIX_EXPECTS(std::holds_alternative<MlaWeights>(weights.attention) == shape.is_mla,
                ErrorCode::invalid_argument, "decode_layer: the shape says is_mla = ", shape.is_mla,
                " but the layer holds the other kind of attention weights");
  expect_shape("input_norm", weights.input_norm, 1, shape.hidden);
  expect_shape("post_attention_norm", weights.post_attention_norm, 1, shape.hidden);
  std::visit([&](const auto& attention) { check_attention(topo, stage_rank, config, attention); },
             weights.attention);
  std::visit([&](const auto& ffn) { check_ffn(topo, stage_rank, config, ffn); }, weights.ffn);
}

}  // namespace helix::detail
