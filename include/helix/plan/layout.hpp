// SPDX-License-Identifier: Apache-2.0
// Layout: how a model lies on GPUs, for Helix and for the strategies that it is compared with.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <helix/export.hpp>
#include <helix/plan/model.hpp>
#include <helix/topology.hpp>

namespace helix::plan {

/// What the ranks of one stage do.
enum class Strategy : std::uint8_t {
  helix,                    ///< KVP x TPA in attention, then TPF x EP: the paper's, and Topology's
  tensor_parallel,          ///< TPA = N; past Hkv (for MLA past 1) KV heads are stored and read several times
  data_parallel_attention,  ///< N = attention groups x TPA, each with its own sequences; FFN over TPF x EP
  medha                     ///< KVP x TPA in attention; everything else on the TPA ranks of KVP rank 0
};
/// Name of the strategy: "tensor_parallel".
HELIX_API std::string_view to_string(Strategy strategy);

/// Widths of one configuration. helix and medha: N = kvp * tpa; tensor_parallel: N = tpa;
/// data_parallel_attention: N = attn_dp * tpa. Widths that a strategy does not use are 1.
struct HELIX_API Layout {
  Strategy strategy = Strategy::helix;
  int kvp = 1;
  int tpa = 1;
  int attn_dp = 1;
  int tpf = 1;  ///< tpf * ep == N; medha: tpf == tpa, ep == 1
  int ep = 1;
  int pp = 1;            ///< Pipeline stages
  int dp = 1;            ///< Replicas of the whole pipeline
  int hop_b_slices = 0;  ///< Helix only. 0: the fastest number; 1: off

  int stage_size() const { return kvp * tpa * attn_dp; }  ///< N
  int num_gpus() const { return stage_size() * pp * dp; }
  /// Ranks that share the dense FFN, the output projection's rows after attention, and the vocabulary.
  int ffn_width() const { return strategy == Strategy::medha ? tpa : stage_size(); }
  /// The widths as a TopologySpec; strategy must be helix. The layout need not be legal.
  TopologySpec topology_spec() const;
  /// Name of the layout in tables and messages.
  std::string to_string() const;

  friend bool operator==(const Layout&, const Layout&) = default;
};

/// Whether the layout keeps the rules of its strategy; for helix see Topology::violations. No allocation for
/// the other strategies.
HELIX_API bool is_legal(const Layout& layout, const Model& model);

/// The rules that the layout breaks, one sentence each with its values; empty if legal.
HELIX_API std::vector<std::string> violations(const Layout& layout, const Model& model);

/// Every legal layout of `strategy` with `stage_size` ranks a stage, one stage and one replica. hop_b_slices
/// is 0 for helix with KVP > 1 and else 1. A medha layout that stores KV heads more than once (TPA > Hkv, for
/// MLA TPA > 1) is legal, but listed only with `medha_may_duplicate_kv`: its authors keep TPA within Hkv, and
/// the paper counts it as not applicable to MLA. Empty if stage_size < 1.
/// @throws Error(invalid_argument) if stage_size exceeds kMaxRanks.
HELIX_API std::vector<Layout> legal_layouts(Strategy strategy, const Model& model, int stage_size,
                                            bool medha_may_duplicate_kv = false);

}  // namespace helix::plan
