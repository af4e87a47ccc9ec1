// SPDX-License-Identifier: Apache-2.0
// Layout: the rules of each strategy, and the layouts that obey them.
#include <limits>
#include <sstream>

#include <helix/error.hpp>
#include <helix/limits.hpp>
#include <helix/plan/layout.hpp>

namespace helix::plan {
namespace {

/// Calls `report(parts...)` for each rule that the layout breaks; serves both the check and its messages. All
/// widths are at least 1.
template <class Report>
void check_baseline(const Layout& layout, const Model& model, Report&& report) {
  const int n = layout.stage_size();
  const int tpa = layout.tpa;
  const bool uses_kvp = layout.strategy == Strategy::medha;
  const bool uses_attn_dp = layout.strategy == Strategy::data_parallel_attention;
  if (!uses_kvp && layout.kvp != 1) report("KVP is ", layout.kvp, "; the strategy has none: use 1");
  if (!uses_attn_dp && layout.attn_dp != 1)
    report("attn_dp is ", layout.attn_dp, "; the strategy has none: use 1");
  if (layout.hop_b_slices > 1)
    report("hop_b_slices is ", layout.hop_b_slices, "; only helix overlaps: use 1");
  if (model.shape.num_query_heads % tpa != 0)
    report("num_query_heads ", model.shape.num_query_heads, " is not a multiple of TPA ", tpa);
  if (model.shape.num_kv_heads % tpa != 0 && tpa % model.shape.num_kv_heads != 0) {
    report("TPA ", tpa, " and num_kv_heads ", model.shape.num_kv_heads,
           ": neither is a multiple of the other");
  }
  const int width = layout.ffn_width();
  if (std::int64_t{layout.tpf} * layout.ep != width) {
    report("TPF ", layout.tpf, " * EP ", layout.ep, " differs from the ", width, " ranks of the FFN");
  }
  if (model.shape.ffn % width != 0)
    report("ffn ", model.shape.ffn, " is not a multiple of the ", width, " ranks that share it");
  if (!model.shape.moe) {
    if (layout.ep > 1) report("EP is ", layout.ep, " but the model has no routed experts; use EP 1");
  } else {
    const MoeShape& moe = *model.shape.moe;
    // Data-parallel attention keeps the shared experts on the ranks that attend to the token.
    const int shared_width = uses_attn_dp ? tpa : width;
    if (moe.num_experts % layout.ep != 0)
      report("num_experts ", moe.num_experts, " is not a multiple of EP ", layout.ep);
    if (moe.expert_ffn % layout.tpf != 0)
      report("expert_ffn ", moe.expert_ffn, " is not a multiple of TPF ", layout.tpf);
    if (moe.shared_ffn % shared_width != 0) {
      report("shared_ffn ", moe.shared_ffn, " is not a multiple of the ", shared_width,
             " ranks that share it");
    }
  }
  if (layout.strategy == Strategy::medha && layout.ep != 1)
    report("EP is ", layout.ep, "; the strategy splits experts by TPF: use 1");
  if (layout.pp > model.shape.num_layers)
    report("PP ", layout.pp, " exceeds num_layers ", model.shape.num_layers);
  if (n > std::numeric_limits<int>::max() / layout.pp / layout.dp) {
    report("N ", n, " * PP ", layout.pp, " * DP ", layout.dp, " is too many GPUs");
  }
}

/// Whether each width is in [1, kMaxRanks], without which products of widths would be meaningless, and
/// strategy and slices are known ones. Reports what is not.
template <class Report>
bool widths_are_sound(const Layout& layout, Report&& report) {
  bool is_sound = true;
  const auto check = [&](std::string_view name, int width) {
    if (width >= 1 && width <= kMaxRanks) return;
    report(name, " is ", width, "; it must be in [1, ", kMaxRanks, "]");
    is_sound = false;
  };
  check("KVP", layout.kvp);
  check("TPA", layout.tpa);
  check("attn_dp", layout.attn_dp);
  check("TPF", layout.tpf);
  check("EP", layout.ep);
  check("PP", layout.pp);
  check("DP", layout.dp);
  if (to_string(layout.strategy) == "unknown") {
    report("strategy is ", static_cast<int>(layout.strategy), "; it must name a strategy");
    is_sound = false;
  }
  if (layout.hop_b_slices < 0) {
    report("hop_b_slices is ", layout.hop_b_slices, "; it must be 0 (the fastest), 1 (off) or more");
    is_sound = false;
  }
  if (!is_sound) return false;
  const std::int64_t kvp_tpa = std::int64_t{layout.kvp} * layout.tpa;
  if (kvp_tpa > kMaxRanks || kvp_tpa * layout.attn_dp > kMaxRanks) {
    report("KVP ", layout.kvp, " * TPA ", layout.tpa, " * attn_dp ", layout.attn_dp, " exceeds ", kMaxRanks,
           " ranks a stage");
    return false;
  }
  return true;
}

}  // namespace

std::string_view to_string(Strategy strategy) {
  switch (strategy) {
    case Strategy::helix:
      return "helix";
    case Strategy::tensor_parallel:
      return "tensor_parallel";
    case Strategy::data_parallel_attention:
      return "data_parallel_attention";
    case Strategy::medha:
      return "medha";
  }
  return "unknown";
}

TopologySpec Layout::topology_spec() const {
  TopologySpec spec;
  spec.kvp = kvp;
  spec.tpa = tpa;
  spec.tpf = tpf;
  spec.ep = ep;
  spec.pp = pp;
  spec.dp = dp;
  spec.attn_dp = attn_dp;
  return spec;
}

std::string Layout::to_string() const {
  std::ostringstream out;
  out << plan::to_string(strategy) << " ";
  if (kvp > 1 || strategy == Strategy::helix) out << "KVP " << kvp << " x ";
  if (attn_dp > 1) out << "attn_dp " << attn_dp << " x ";
  out << "TPA " << tpa << ", TPF " << tpf << " x EP " << ep;
  if (pp > 1) out << ", PP " << pp;
  if (dp > 1) out << ", DP " << dp;
  if (strategy == Strategy::helix && kvp > 1) {
    if (hop_b_slices == 1) out << ", HOP-B off";
    if (hop_b_slices > 1) out << ", HOP-B " << hop_b_slices;
  }
  return out.str();
}

bool is_legal(const Layout& layout, const Model& model) {
  bool is_broken = false;
  const auto report = [&](const auto&...) { is_broken = true; };
  if (!widths_are_sound(layout, report)) return false;
  if (layout.strategy == Strategy::helix) {
    return Topology::violations(layout.topology_spec(), model.shape).empty();
  }
  check_baseline(layout, model, report);
  return !is_broken;
}

std::vector<std::string> violations(const Layout& layout, const Model& model) {
  std::vector<std::string> found;
  const auto report = [&](const auto&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    found.push_back(out.str());
  };
  if (!widths_are_sound(layout, report)) return found;
  if (layout.strategy == Strategy::helix) return Topology::violations(layout.topology_spec(), model.shape);
  check_baseline(layout, model, report);
  return found;
}

std::vector<Layout> legal_layouts(Strategy strategy, const Model& model, int stage_size,
                                  bool medha_may_duplicate_kv) {
  HELIX_EXPECTS(stage_size <= kMaxRanks, ErrorCode::invalid_argument, "legal_layouts: stage_size is ",
                stage_size, "; it must be at most ", kMaxRanks);
  std::vector<Layout> legal;
  for (int tpa = 1; tpa <= stage_size; ++tpa) {
    if (stage_size % tpa != 0) continue;
    Layout layout;
    layout.strategy = strategy;
    layout.tpa = tpa;
    const int others = stage_size / tpa;
    switch (strategy) {
      case Strategy::helix:
        layout.kvp = others;
        break;
      case Strategy::medha:
        if (others == 1) continue;  // tensor_parallel
        if (tpa > model.shape.num_kv_heads && !medha_may_duplicate_kv) continue;
        layout.kvp = others;
        break;
      case Strategy::tensor_parallel:
        if (others > 1) continue;
        break;
      case Strategy::data_parallel_attention:
        if (others == 1) continue;  // tensor_parallel
        layout.attn_dp = others;
        break;
    }
    layout.hop_b_slices = strategy == Strategy::helix && layout.kvp > 1 ? 0 : 1;
    const int width = layout.ffn_width();
    for (int ep = 1; ep <= width; ++ep) {
      if (width % ep != 0) continue;
      layout.ep = ep;
      layout.tpf = width / ep;
      if (is_legal(layout, model)) legal.push_back(layout);
    }
  }
  return legal;
}

}  // namespace helix::plan
