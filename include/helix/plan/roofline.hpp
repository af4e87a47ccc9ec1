// SPDX-License-Identifier: Apache-2.0
// Roofline of the paper's appendix A: what one GPU reads in one layer, and how long that takes.
#pragma once

#include <cstdint>

#include <helix/export.hpp>
#include <helix/plan/model.hpp>
#include <helix/plan/units.hpp>

namespace helix::plan {

/// Over how many ranks W_O is split. Appendix A counts it with W_Q over TPA; section 2.2 re-uses all
/// N = KVP * TPA ranks for it, and so does this library.
enum class OutputProjection : std::uint8_t { over_tpa, over_stage };

/// Widths of the ranks that share one layer.
struct RooflineWidths {
  std::int64_t tpa = 1;
  std::int64_t kvp = 1;
  std::int64_t tpf = 1;
  OutputProjection output_projection = OutputProjection::over_tpa;
};

/// Bytes of KV that a rank reads in one full-attention layer: B * ceil(K / TPA) * (D + Dv) * S / KVP
/// elements. In appendix A, with D = Dv = Hsz, this is B * 2 * ceil(K / TPA) * Hsz * S / KVP. MLA reads the
/// latent once, B * (kv_lora_rank + rope) * S / KVP, whatever TPA is.
/// @throws Error(invalid_argument) for widths below 1, a batch or context that is negative or NaN; what
/// Precision::check() throws.
HELIX_API Bytes kv_read_bytes(const Model& model, const Precision& precision, std::int64_t batch,
                              Tokens context, const RooflineWidths& widths);

/// Bytes of weights that a rank reads in one dense layer: H * (Q / TPA) * (D + Dv) + H * ceil(K / TPA) * (D +
/// Dv) + 3 * H * F / TPF elements; in appendix A, D = Dv = Hsz. Under over_stage W_O's part of the first
/// term, H * Q * Dv, is divided by N. TPF counts all ranks of the FFN. For MLA, which appendix A leaves out,
/// every rank reads the down projections; those up from the latents are split over TPA, and W_UV is counted
/// with W_O.
/// @throws Error(unsupported) for a model without dense layers, Error(invalid_argument) for widths below 1;
/// what Precision::check() throws.
HELIX_API Bytes weight_read_bytes(const Model& model, const Precision& precision,
                                  const RooflineWidths& widths);

/// Bytes of weights that a rank reads in one MoE layer. `tokens` tokens hit expected_expert_hits() experts,
/// spread evenly over the TPF ranks (of TPF x EP, whatever the grid). Every rank reads the router; the shared
/// experts are split over TPF.
/// @throws Error(unsupported) for a model without experts, Error(invalid_argument) for widths below 1,
/// negative or NaN tokens; what Precision::check() throws.
HELIX_API Bytes moe_weight_read_bytes(const Model& model, const Precision& precision, double tokens,
                                      const RooflineWidths& widths);

}  // namespace helix::plan
