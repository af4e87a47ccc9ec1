// SPDX-License-Identifier: Apache-2.0
// The formulas of the paper's appendix A.
#include <algorithm>

#include <helix/error.hpp>
#include <helix/plan/roofline.hpp>

namespace helix::plan {
namespace {

void check(const RooflineWidths& widths) {
  HELIX_EXPECTS(widths.tpa >= 1 && widths.kvp >= 1 && widths.tpf >= 1, ErrorCode::invalid_argument,
                "roofline: TPA is ", widths.tpa, ", KVP ", widths.kvp, ", TPF ", widths.tpf,
                "; each must be at least 1");
}

double ceil_div(std::int64_t a, std::int64_t b) {
  return static_cast<double>((a + b - 1) / b);
}

}  // namespace

Bytes kv_read_bytes(const Model& model, const Precision& precision, std::int64_t batch, Tokens context,
                    const RooflineWidths& widths) {
  check(widths);
  const double row = model.latent ? static_cast<double>(model.head_dim)
                                  : ceil_div(model.num_kv_heads, widths.tpa) *
                                        static_cast<double>(model.head_dim + model.value_dim);
  const double elements = static_cast<double>(batch) * row * in_tokens(context);
  return packed_bytes(elements, precision.kv_bits) / widths.kvp;
}

Bytes weight_read_bytes(const Model& model, const Precision& precision, const RooflineWidths& widths) {
  check(widths);
  HELIX_EXPECTS(!model.latent && model.ffn > 0, ErrorCode::unsupported,
                "roofline: appendix A counts the weights of dense grouped-query layers; ", model.name,
                " has others: use StepModel");
  const auto hidden = static_cast<double>(model.hidden);
  const double query = hidden * static_cast<double>(model.num_query_heads) *
                       static_cast<double>(model.head_dim) / static_cast<double>(widths.tpa);
  const double output = widths.output_projection == OutputProjection::over_tpa
                            ? query
                            : query / static_cast<double>(widths.kvp);
  const double kv =
      2 * hidden * ceil_div(model.num_kv_heads, widths.tpa) * static_cast<double>(model.head_dim);
  const double ffn = 3 * hidden * static_cast<double>(model.ffn) / static_cast<double>(widths.tpf);
  return packed_bytes(query + output + kv + ffn, precision.weight_bits);
}

}  // namespace helix::plan
