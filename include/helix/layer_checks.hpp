// SPDX-License-Identifier: Apache-2.0
// What decode_layer checks before the first collective: values that all ranks share (invariant 9), and this
// rank's own weights, addresses and workspace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <variant>

#include <helix/backend/layer.hpp>
#include <helix/error.hpp>
#include <helix/hop_b.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/layer_config.hpp>
#include <helix/layer_weights.hpp>
#include <helix/limits.hpp>
#include <helix/rank_shape.hpp>

namespace helix::detail {

/// Throws Error(invalid_argument), with `hint`, unless the weight is [rows, cols], of a type that backends
/// multiply, and has an address. A slice without elements may have none.
inline void expect_shape(std::string_view name, const WeightView& weight, std::int64_t rows,
                         std::int64_t cols, std::string_view hint = "") {
  HELIX_EXPECTS(weight.rows == rows && weight.cols == cols && (!weight.empty() || rows * cols == 0),
                ErrorCode::invalid_argument, "decode_layer: ", name, " is ", weight.empty() ? "empty, " : "",
                "[", weight.rows, ", ", weight.cols, "]; this rank needs [", rows, ", ", cols, "]", hint);
  check_weight_data("decode_layer", name, weight);
}

/// Throws Error(invalid_argument) unless the weight is [1, cols] or left out. One that is left out has no
/// shape either, so that a tensor that could not be loaded is not taken for it.
inline void expect_shape_if_given(std::string_view name, const WeightView& weight, std::int64_t cols) {
  HELIX_EXPECTS(!weight.empty() || weight.rows == 0 || weight.cols == 0, ErrorCode::invalid_argument,
                "decode_layer: ", name, " is [", weight.rows, ", ", weight.cols,
                "] without data; point it to them, or give {} for none");
  if (!weight.empty()) expect_shape(name, weight, 1, cols);
}

/// Throws Error(invalid_argument) unless the bias is [1, cols], on stage_rank 0 alone, or left out. It is
/// added before an all-reduce over N, which would sum it N times.
inline void expect_once(std::string_view name, const WeightView& bias, std::int64_t cols, int stage_rank) {
  expect_shape_if_given(name, bias, cols);
  HELIX_EXPECTS(bias.empty() || stage_rank == 0, ErrorCode::invalid_argument, "decode_layer: stage_rank ",
                stage_rank, " holds ", name, "; only stage_rank 0 may, or the all-reduce adds it N times");
}

/// The usual mistake where the output projection has another shape (invariant 1).
inline constexpr std::string_view kOutputHint =
    " (the columns of Topology::combined_heads, not of stage_rank)";

/// Throws Error(invalid_argument) unless the weights of grouped-query attention fit this rank.
inline void check_attention(const RankShape& shape, const LayerConfig& config, const GqaWeights& weights) {
  const std::int64_t qkv_rows = shape.qkv_columns();
  expect_shape("qkv", weights.qkv, qkv_rows, shape.hidden);
  expect_shape_if_given("qkv_bias", weights.qkv_bias, qkv_rows);
  expect_shape_if_given("q_norm", weights.q_norm, shape.head_dim);
  expect_shape_if_given("k_norm", weights.k_norm, shape.head_dim);
  expect_shape("the output projection", weights.o, shape.hidden, shape.combined_heads * shape.value_dim,
               kOutputHint);
  expect_once("o_bias", weights.o_bias, shape.hidden, shape.stage_rank);
  check_rope("decode_layer", config.rope, shape.head_dim);
}

/// Throws Error(invalid_argument) unless the weights of latent attention and its config fit this rank.
inline void check_attention(const RankShape& shape, const LayerConfig& config, const MlaWeights& weights) {
  const MlaShape& mla = *shape.mla;
  const std::int64_t heads = shape.query_heads;
  const std::int64_t combined = shape.combined_heads;
  const std::int64_t latent = mla.kv_lora_rank;
  const std::int64_t rope = mla.qk_rope_head_dim;
  HELIX_EXPECTS(mla.qk_nope_head_dim >= 1 && rope >= 0 && mla.v_head_dim >= 1 && mla.q_lora_rank >= 0 &&
                    latent == shape.value_dim && latent + rope == shape.head_dim,
                ErrorCode::invalid_argument, "decode_layer: MLA has ", mla.qk_nope_head_dim, " nope, ", rope,
                " rope and ", mla.v_head_dim, " value dims and a latent of ", latent,
                "; latent and rope make the ", shape.head_dim, "-wide rows of the cache");
  check_rope("decode_layer", config.rope, rope);
  check_epsilon("decode_layer", "latent_norm_epsilon", config.latent_norm_epsilon);
  const bool has_query_lora = mla.q_lora_rank > 0;
  expect_shape("qkv_a", weights.qkv_a, shape.qkv_a_columns(), shape.hidden,
               has_query_lora ? " (the rows of W_DQ, then of W_DKV)" : " (the rows of W_Q, then of W_DKV)");
  expect_shape_if_given("qkv_a_bias", weights.qkv_a_bias, shape.qkv_a_columns());
  if (has_query_lora) {
    expect_shape("q_a_norm", weights.q_a_norm, 1, mla.q_lora_rank);
    expect_shape("q_b", weights.q_b, heads * mla.qk_head_dim(), mla.q_lora_rank);
  } else {
    HELIX_EXPECTS(weights.q_a_norm.empty() && weights.q_b.empty(), ErrorCode::invalid_argument,
                  "decode_layer: q_lora_rank is 0, but the layer holds q_a_norm [", weights.q_a_norm.rows,
                  ", ", weights.q_a_norm.cols, "] and q_b [", weights.q_b.rows, ", ", weights.q_b.cols,
                  "]; leave both empty, or set MlaShape::q_lora_rank");
  }
  expect_shape("kv_a_norm", weights.kv_a_norm, 1, latent);
  expect_shape("w_uk", weights.w_uk, heads * latent, mla.qk_nope_head_dim);
  expect_shape("w_uv", weights.w_uv, combined * mla.v_head_dim, latent);
  expect_shape("the output projection", weights.o, shape.hidden, combined * mla.v_head_dim, kOutputHint);
  expect_once("o_bias", weights.o_bias, shape.hidden, shape.stage_rank);
  HELIX_EXPECTS(weights.expand_k.empty() == weights.expand_v.empty(), ErrorCode::invalid_argument,
                "decode_layer: of expand_k and expand_v one alone is empty; give both or neither");
  if (!weights.expand_k.empty()) {
    expect_shape("expand_k", weights.expand_k, heads * mla.qk_nope_head_dim, latent);
    expect_shape("expand_v", weights.expand_v, heads * mla.v_head_dim, latent);
  }
  HELIX_EXPECTS(config.mla_prefill.max_tokens >= 0 && config.mla_prefill.max_tokens <= kMaxPageTokens,
                ErrorCode::invalid_argument, "decode_layer: mla_prefill.max_tokens is ",
                config.mla_prefill.max_tokens, "; it must be in [0, ", kMaxPageTokens, "]");
}

/// Throws Error(invalid_argument) unless the weights are a slice of `part` of the FFN's columns.
inline void check_dense(std::string_view name, const DenseFfnWeights& weights, std::int64_t part,
                        std::int64_t hidden, int stage_rank) {
  expect_shape(name, weights.gate_up, 2 * part, hidden, " (gate_up)");
  expect_shape_if_given("gate_up_bias", weights.gate_up_bias, 2 * part);
  expect_shape(name, weights.down, hidden, part, " (down)");
  expect_once("down_bias", weights.down_bias, hidden, stage_rank);
}

/// Throws Error(invalid_argument) unless the weights are this rank's slice of a dense FFN.
inline void check_ffn(const RankShape& shape, const LayerConfig&, const DenseFfnWeights& weights) {
  check_dense("the FFN", weights, shape.ffn, shape.hidden, shape.stage_rank);
}

/// Throws Error(invalid_argument) unless the weights are this rank's experts and the router fits them.
inline void check_ffn(const RankShape& shape, const LayerConfig& config, const MoeWeights& weights) {
  const RouterConfig& router = config.router;
  HELIX_EXPECTS(shape.num_experts > 0, ErrorCode::invalid_argument,
                "decode_layer: the layer holds experts but the model's num_experts is 0");
  HELIX_EXPECTS(router.num_groups >= 1 && shape.num_experts % router.num_groups == 0 &&
                    router.groups_kept >= 1 && router.groups_kept <= router.num_groups,
                ErrorCode::invalid_argument, "decode_layer: the router keeps ", router.groups_kept, " of ",
                router.num_groups, " groups of ", shape.num_experts,
                " experts; groups must divide the experts, and between 1 and all be kept");
  HELIX_EXPECTS((router.scoring == RouterScoring::softmax || router.scoring == RouterScoring::sigmoid) &&
                    is_finite(router.scale),
                ErrorCode::invalid_argument, "decode_layer: router.scoring is ",
                static_cast<int>(router.scoring),
                ", which must be softmax (0) or sigmoid (1), and router.scale ", router.scale,
                ", which must be finite");
  const std::int64_t eligible = router.groups_kept * (shape.num_experts / router.num_groups);
  HELIX_EXPECTS(shape.top_k >= 1 && shape.top_k <= eligible, ErrorCode::invalid_argument,
                "decode_layer: top_k is ", shape.top_k, "; it must be in [1, ", eligible,
                "], the experts of the kept groups");
  expect_shape("the router", weights.router, shape.num_experts, shape.hidden);
  const std::int64_t local = shape.experts.size();
  HELIX_EXPECTS(static_cast<std::int64_t>(weights.experts.size()) == local, ErrorCode::invalid_argument,
                "decode_layer: the layer holds ", weights.experts.size(), " experts; this rank has ", local);
  const std::int64_t part = shape.expert_ffn;
  for (const ExpertWeights& expert : weights.experts) {
    expect_shape("a routed expert", expert.gate_up, 2 * part, shape.hidden, " (gate_up)");
    expect_shape("a routed expert", expert.down, shape.hidden, part, " (down)");
  }
  const std::int64_t shared = shape.shared_ffn;
  if (shared > 0 || !weights.shared.down.empty())
    check_dense("the shared expert", weights.shared, shared, shape.hidden, shape.stage_rank);
}

/// Throws Error(invalid_argument) unless all weights of the layer, and its config, fit this rank.
inline void check_layer_weights(const RankShape& shape, const LayerConfig& config,
                                const LayerWeights& weights) {
  check_scores("decode_layer", "softmax_scale", config.softmax_scale, config.window, config.soft_cap);
  check_epsilon("decode_layer", "norm_epsilon", config.norm_epsilon);
  HELIX_EXPECTS(std::holds_alternative<MlaWeights>(weights.attention) == shape.mla.has_value(),
                ErrorCode::invalid_argument, "decode_layer: the shape is ", shape.mla ? "MLA" : "not MLA",
                " but the layer holds the other kind of attention weights");
  expect_shape("input_norm", weights.input_norm, 1, shape.hidden);
  expect_shape("post_attention_norm", weights.post_attention_norm, 1, shape.hidden);
  std::visit([&](const auto& attention) { check_attention(shape, config, attention); }, weights.attention);
  std::visit([&](const auto& ffn) { check_ffn(shape, config, ffn); }, weights.ffn);
}

/// Throws Error(invalid_argument) unless the communicators are those of the rank that the shape is of.
template <class Comms>
void check_layer_groups(const Comms& comms, const RankShape& shape) {
  given_comm("decode_layer", "stage", comms.stage);
  given_comm("decode_layer", "kvp", comms.kvp);
  HELIX_EXPECTS(comms.stage->size() == shape.stage_size && comms.stage->rank() == shape.stage_rank,
                ErrorCode::invalid_argument, "decode_layer: the shape is of stage_rank ", shape.stage_rank,
                " of ", shape.stage_size, "; the backend is rank ", comms.stage->rank(), " of ",
                comms.stage->size());
  HELIX_EXPECTS(comms.kvp->size() == shape.kvp && comms.kvp->rank() == shape.kvp_rank,
                ErrorCode::invalid_argument, "decode_layer: the KVP communicator has rank ",
                comms.kvp->rank(), " of ", comms.kvp->size(), "; the shape is KVP rank ", shape.kvp_rank,
                " of ", shape.kvp, ": make it with split_kvp()");
}

/// Throws Error(invalid_argument) unless heads divide as Topology::rank_shape() divides them and no width is
/// negative.
inline void check_rank_shape(const RankShape& shape) {
  HELIX_EXPECTS(shape.kv_heads >= 1 && shape.query_heads >= 1 && shape.query_heads % shape.kv_heads == 0 &&
                    shape.combined_heads * shape.kvp == shape.query_heads,
                ErrorCode::invalid_argument, "decode_layer: the shape has ", shape.query_heads,
                " query heads of ", shape.kv_heads, " KV heads and combines ", shape.combined_heads,
                " over KVP ", shape.kvp,
                "; KV heads must divide the query heads, and these be KVP times those combined: take "
                "Topology::rank_shape()");
  HELIX_EXPECTS(shape.hidden >= 0 && shape.ffn >= 0 && shape.shared_ffn >= 0 && shape.expert_ffn >= 0,
                ErrorCode::invalid_argument, "decode_layer: the shape's hidden is ", shape.hidden, ", ffn ",
                shape.ffn, ", shared_ffn ", shape.shared_ffn, ", expert_ffn ", shape.expert_ffn,
                "; none may be below 0");
}

/// Throws Error(invalid_argument) if `x` and `y`, which a layer writes, overlap.
inline void check_apart(std::string_view name, std::span<const std::byte> x, std::string_view of,
                        std::span<const std::byte> y) {
  const std::less<const std::byte*> before;
  HELIX_EXPECTS(x.empty() || y.empty() || !before(x.data(), y.data() + y.size()) ||
                    !before(y.data(), x.data() + x.size()),
                ErrorCode::invalid_argument, "decode_layer: ", name, " at ",
                static_cast<const void*>(x.data()), " and ", of, " at ", static_cast<const void*>(y.data()),
                " overlap; a layer writes both: keep them apart");
}

/// Throws Error(invalid_argument) unless the tensors of a call and its workspace are given, of the right
/// shape, and apart.
template <class T, class Options>
void check_layer_tensors(const RankShape& shape, const Batch& batch, const TensorView<T, 2>& hidden,
                         const Options& options) {
  const auto expect_rows = [&](std::string_view name, const TensorView<T, 2>& x) {
    HELIX_EXPECTS(x.extent(0) == batch.num_tokens() && x.extent(1) == shape.hidden && x.is_contiguous(),
                  ErrorCode::invalid_argument, "decode_layer: ", name, " is [", x.extent(0), ", ",
                  x.extent(1), "] with strides [", x.stride(0), ", ", x.stride(1),
                  "]; the batch and the model need a dense [", batch.num_tokens(), ", ", shape.hidden, "]");
  };
  const bool has_normed = options.normed.data() != nullptr;
  expect_rows("hidden", hidden);
  if (has_normed || options.normed.size() > 0) {
    expect_rows("normed", options.normed);
    check_given("decode_layer", "normed", options.normed.data(), batch.num_tokens());
  }
  check_given("decode_layer", "hidden", hidden.data(), batch.num_tokens());
  check_workspace("decode_layer", options.workspace, kWorkspaceAlignment);
  const auto bytes_of = [](const TensorView<T, 2>& x) {
    return std::as_bytes(std::span(x.data(), static_cast<std::size_t>(x.size())));
  };
  check_apart("hidden", bytes_of(hidden), "the workspace", options.workspace);
  if (has_normed) {
    check_apart("normed", bytes_of(options.normed), "hidden", bytes_of(hidden));
    check_apart("normed", bytes_of(options.normed), "the workspace", options.workspace);
  }
  HELIX_EXPECTS(options.next_norm.empty() || has_normed || batch.num_tokens() == 0,
                ErrorCode::invalid_argument,
                "decode_layer: options.next_norm is given without options.normed, where what it norms goes; "
                "give normed too, or leave both out");
  expect_shape_if_given("next_norm", options.next_norm, shape.hidden);
}

/// Throws Error(invalid_argument) unless the cache holds this rank's heads and its share of the tokens.
inline void check_layer_cache(const RankShape& shape, const KvView& kv) {
  check_kv_view("decode_layer", kv);
  const KvFormat& format = kv.format;
  HELIX_EXPECTS(format.head_dim == shape.head_dim && format.value_dim == shape.value_dim &&
                    format.is_latent == shape.mla.has_value() && format.num_heads == shape.kv_heads &&
                    kv.layout.kvp() == shape.kvp && kv.kvp_rank == shape.kvp_rank,
                ErrorCode::invalid_argument, "decode_layer: the cache has ", format.num_heads,
                format.is_latent ? " latent heads of " : " heads of ", format.head_dim, "/", format.value_dim,
                " as KVP rank ", kv.kvp_rank, " of ", kv.layout.kvp(), "; this rank of the topology stores ",
                shape.kv_heads, shape.mla ? " latent heads of " : " heads of ", shape.head_dim, "/",
                shape.value_dim, " as KVP rank ", shape.kvp_rank, " of ", shape.kvp);
}

/// Throws Error(invalid_argument) unless HOP-B and the exchange were built for this step.
template <class Options>
void check_layer_exchange(const RankShape& shape, const Batch& batch, const Options& options) {
  HELIX_EXPECTS(options.hop_b_slices >= 0 && options.hop_b_slices <= options.hop_b->max_slices(),
                ErrorCode::invalid_argument, "decode_layer: hop_b_slices is ", options.hop_b_slices,
                "; HopB was built for up to ", options.hop_b->max_slices());
  HELIX_EXPECTS(options.exchange->kvp() == shape.kvp, ErrorCode::invalid_argument,
                "decode_layer: the exchange was built for KVP ", options.exchange->kvp(),
                ", the shape is KVP ", shape.kvp, "; build it with this backend");
  const KvpAllToAllSpec& exchange = options.exchange->spec();
  HELIX_EXPECTS(batch.num_tokens() <= exchange.max_tokens && exchange.num_query_heads == shape.query_heads &&
                    exchange.value_dim == shape.value_dim,
                ErrorCode::invalid_argument, "decode_layer: the exchange was built for ", exchange.max_tokens,
                " tokens of ", exchange.num_query_heads, " heads of ", exchange.value_dim, "; this step has ",
                batch.num_tokens(), " tokens of ", shape.query_heads, " heads of ", shape.value_dim);
  HELIX_EXPECTS(shape.kvp == 1 || exchange.group == shape.tpa_rank(), ErrorCode::invalid_argument,
                "decode_layer: the exchange was built for KVP group ", exchange.group,
                ", this rank has TPA rank ", shape.tpa_rank(),
                "; set KvpAllToAllSpec::group to it, or build the spec by of_layers()");
  HELIX_EXPECTS(shape.kvp == 1 || options.hop_b->max_slices() <= exchange.max_slices,
                ErrorCode::invalid_argument, "decode_layer: HopB was built for up to ",
                options.hop_b->max_slices(), " slices and the exchange for ", exchange.max_slices,
                "; give KvpAllToAllSpec::max_slices as many");
}

/// All checks of a layer. Those of weights, addresses and the workspace may fail on one rank alone:
/// decode_layer() says what its caller then does.
template <LayerBackend B, class Options>
void check_layer(B& backend, const RankShape& shape, const LayerConfig& config, const LayerWeights& weights,
                 const KvView& kv, const Batch& batch, TensorView<typename B::Activation, 2> hidden,
                 const Options& options) {
  check_layer_groups(backend.comms(), shape);
  check_rank_shape(shape);
  check_batch("decode_layer", batch);
  HELIX_EXPECTS(options.exchange != nullptr && options.hop_b != nullptr, ErrorCode::invalid_argument,
                "decode_layer: options.exchange and options.hop_b must be set; build one of each a rank and "
                "share them");
  check_layer_tensors(shape, batch, hidden, options);
  HELIX_EXPECTS(batch.first_token() == 0, ErrorCode::invalid_argument,
                "decode_layer: the batch starts at token ", batch.first_token(),
                "; pass a whole step, not a slice");
  check_layer_cache(shape, kv);
  check_layer_exchange(shape, batch, options);
  check_layer_weights(shape, config, weights);
}

}  // namespace helix::detail
