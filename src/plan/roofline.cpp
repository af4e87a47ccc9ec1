// SPDX-License-Identifier: Apache-2.0
// The formulas of the paper's appendix A.

#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/plan/roofline.hpp>

namespace helix::plan {
namespace {

void check(const Precision& precision, const RooflineWidths& widths) {
  precision.check();
  HELIX_EXPECTS(widths.tpa >= 1 && widths.kvp >= 1 && widths.tpf >= 1, ErrorCode::invalid_argument,
                "roofline: TPA is ", widths.tpa, ", KVP ", widths.kvp, ", TPF ", widths.tpf,
                "; each must be at least 1");
}

/// KV heads that a rank stores and reads.
double kv_heads(const Model& model, const RooflineWidths& widths) {
  return static_cast<double>(ceil_div(model.shape.num_kv_heads, widths.tpa));
}

/// Attention weights of one layer on one rank.
double attention_elements(const Model& model, const RooflineWidths& widths) {
  const auto hidden = static_cast<double>(model.shape.hidden);
  const auto tpa = static_cast<double>(widths.tpa);
  const double heads = static_cast<double>(model.shape.num_query_heads) / tpa;
  const double output_heads = widths.output_projection == OutputProjection::over_tpa
                                  ? heads
                                  : heads / static_cast<double>(widths.kvp);
  if (!model.shape.mla) {
    const auto head_dim = static_cast<double>(model.shape.head_dim);
    const auto value_dim = static_cast<double>(model.shape.value_dim);
    return hidden *
           (heads * head_dim + output_heads * value_dim + kv_heads(model, widths) * (head_dim + value_dim));
  }
  const MlaShape& mla = *model.shape.mla;
  const auto q_rank = static_cast<double>(mla.q_lora_rank);
  const auto latent = static_cast<double>(mla.kv_lora_rank);
  const auto v_dim = static_cast<double>(mla.v_head_dim);
  const double query = heads * static_cast<double>(mla.qk_head_dim());
  return (q_rank > 0 ? hidden * q_rank + q_rank * query : hidden * query) +
         hidden * static_cast<double>(model.shape.head_dim) +
         heads * static_cast<double>(mla.qk_nope_head_dim) * latent +
         output_heads * v_dim * (latent + hidden);
}

}  // namespace

Bytes kv_read_bytes(const Model& model, const Precision& precision, std::int64_t batch, Tokens context,
                    const RooflineWidths& widths) {
  check(precision, widths);
  HELIX_EXPECTS(batch >= 0, ErrorCode::invalid_argument, "roofline: the batch is ", batch,
                "; it must be 0 or more");
  HELIX_EXPECTS(context >= Tokens{}, ErrorCode::invalid_argument, "roofline: the context is ",
                in_tokens(context), " tokens; it must be 0 or more");
  const double row = model.shape.mla ? static_cast<double>(model.shape.head_dim)
                                     : kv_heads(model, widths) *
                                           static_cast<double>(model.shape.head_dim + model.shape.value_dim);
  const double elements = static_cast<double>(batch) * row * in_tokens(context);
  return packed_bytes(elements, precision.kv_bits) / widths.kvp;
}

Bytes weight_read_bytes(const Model& model, const Precision& precision, const RooflineWidths& widths) {
  check(precision, widths);
  HELIX_EXPECTS(model.shape.ffn > 0, ErrorCode::unsupported, "roofline: ", model.name,
                " has no dense layers: use moe_weight_read_bytes()");
  const double ffn = 3 * static_cast<double>(model.shape.hidden) * static_cast<double>(model.shape.ffn) /
                     static_cast<double>(widths.tpf);
  return packed_bytes(attention_elements(model, widths) + ffn, precision.weight_bits);
}

Bytes moe_weight_read_bytes(const Model& model, const Precision& precision, double tokens,
                            const RooflineWidths& widths) {
  check(precision, widths);
  HELIX_EXPECTS(model.shape.moe, ErrorCode::unsupported, "roofline: ", model.name,
                " has no experts: use weight_read_bytes()");
  HELIX_EXPECTS(tokens >= 0, ErrorCode::invalid_argument, "roofline: ", tokens,
                " tokens; there must be 0 or more");
  const MoeShape& moe = *model.shape.moe;
  const auto hidden = static_cast<double>(model.shape.hidden);
  const double router = hidden * static_cast<double>(moe.num_experts);
  const double experts = 3 * hidden *
                         (expected_expert_hits(moe, tokens) * static_cast<double>(moe.expert_ffn) +
                          static_cast<double>(moe.shared_ffn)) /
                         static_cast<double>(widths.tpf);
  return packed_bytes(attention_elements(model, widths) + router + experts, precision.weight_bits);
}

}  // namespace helix::plan
