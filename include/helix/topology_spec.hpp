// SPDX-License-Identifier: Apache-2.0
// TopologySpec: the widths that a user chooses.
#pragma once

namespace helix {

/// Widths of the attention grid, the FFN grid and the outer dimensions. Both grids have the same N = KVP *
/// TPA = TPF * EP ranks of a stage.
struct TopologySpec {
  int kvp = 1;
  int tpa = 1;
  int tpf = 0;  ///< 0: N / ep
  int ep = 1;
  int pp = 1;       ///< Pipeline stages
  int dp = 1;       ///< Data-parallel replicas of the whole pipeline
  int attn_dp = 1;  ///< Data-parallel attention inside a stage; must be 1 until it is built
  /// Legalises TPA > Hkv with TPA % Hkv == 0 (each KV head stored TPA/Hkv times).
  bool allow_kv_duplication = false;
  /// Legalises FFN sizes that the group does not divide (parts differ by one).
  bool allow_uneven_ffn = false;
};

}  // namespace helix
