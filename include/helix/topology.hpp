// SPDX-License-Identifier: Apache-2.0
// Topology: one pool of ranks seen as KVP x TPA during attention and TPF x EP during the FFN; all groups and
// ranges.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <helix/model_shape.hpp>
#include <helix/range.hpp>
#include <helix/rank_shape.hpp>
#include <helix/topology_spec.hpp>

namespace helix {

/// Where one rank stands. Every name says which group it counts in.
struct RankCoordinates {
  int world_rank = 0;
  int replica = 0;
  int stage = 0;
  int stage_rank = 0;  ///< = kvp_rank * TPA + tpa_rank = ep_rank * TPF + tpf_rank
  int kvp_rank = 0;
  int tpa_rank = 0;
  int tpf_rank = 0;
  int ep_rank = 0;
  int head_shard = 0;  ///< = tpa_rank * KVP + kvp_rank: index of this rank's columns of W_o (invariant 1)

  friend bool operator==(const RankCoordinates&, const RankCoordinates&) = default;
};

/// The kinds of groups that ranks form, each ordered by the coordinate that differs inside it.
enum class RankGroup : std::uint8_t {
  stage,     ///< All N ranks of a stage and replica, by stage_rank
  kvp,       ///< Ranks of a stage with one tpa_rank, by kvp_rank
  tpa,       ///< Ranks of a stage with one kvp_rank, by tpa_rank
  tpf,       ///< Ranks of a stage with one ep_rank, by tpf_rank
  ep,        ///< Ranks of a stage with one tpf_rank, by ep_rank
  pipeline,  ///< Ranks of a replica with one stage_rank, by stage
  replica,   ///< All PP * N ranks of a replica, by world_rank
  data       ///< Ranks with one stage and stage_rank, by replica
};

/// Arguments of SplittableComm::split: ranks of one color form a group, ordered by key.
struct GroupSplit {
  int color = 0;
  int key = 0;
};

/// The one owner of the mapping from ranks to groups, heads, weight rows, experts and vocabulary. Immutable.
///
/// world_rank = (replica * PP + stage) * N + stage_rank. Groups are local to a stage and replica. Functions
/// take a stage_rank where the answer does not depend on the outer dimensions, a world_rank where it does.
/// Each of them throws Error(invalid_argument) for a rank or a stage outside of its range.
class Topology {
 public:
  /// Makes the topology of a model.
  /// @throws Error(invalid_topology) with every violated rule, its values, and the nearest legal topologies.
  Topology(const TopologySpec& spec, const ModelShape& shape);

  /// Makes the topology of a model, and also requires `world_size` == DP * PP * N.
  /// @throws Error(invalid_topology) as the other constructor.
  Topology(const TopologySpec& spec, const ModelShape& shape, int world_size);

  const TopologySpec& spec() const { return spec_; }  ///< The spec, with tpf filled in
  const ModelShape& shape() const { return shape_; }
  int kvp() const { return spec_.kvp; }
  int tpa() const { return spec_.tpa; }
  int tpf() const { return spec_.tpf; }
  int ep() const { return spec_.ep; }
  int pp() const { return spec_.pp; }
  int dp() const { return spec_.dp; }
  int stage_size() const { return spec_.kvp * spec_.tpa; }  ///< N
  int world_size() const { return stage_size() * spec_.pp * spec_.dp; }

  /// Coordinates of one rank. @throws Error(invalid_argument) unless 0 <= world_rank < world_size().
  RankCoordinates coordinates(int world_rank) const;
  /// Coordinates of a rank within its stage; stage 0 of replica 0 stands for all.
  /// @throws Error(invalid_argument) if stage_rank is out of range.
  RankCoordinates stage_coordinates(int stage_rank) const {
    return coordinates(check_stage_rank(stage_rank));
  }

  /// Arguments with which every rank calls split(color, key) of a communicator of all ranks, to form the
  /// groups of this kind. The colours also serve a communicator of one stage, for the groups inside it.
  GroupSplit split(RankGroup group, int world_rank) const;
  /// World ranks of the group of this kind that `world_rank` belongs to, in group-rank order.
  std::vector<int> group(RankGroup group, int world_rank) const;

  /// Query heads that the rank projects and attends with before the exchange: the Hq/TPA of its tpa_rank.
  Range query_heads(int stage_rank) const;
  /// Query heads whose exact attention the rank holds after the exchange (invariant 1): Hq/N, TPA-major.
  Range combined_heads(int stage_rank) const;
  /// KV heads that the rank stores; under allow_kv_duplication the one head that its queries read.
  Range kv_heads(int stage_rank) const;
  /// Columns of W_o (rows of its transpose): combined_heads times `value_dim` values a head (after W_UV, if
  /// any).
  Range output_projection_columns(int stage_rank, std::int64_t value_dim) const;
  Range ffn(int stage_rank) const;                ///< Slice of F, split over N.
  Range shared_expert_ffn(int stage_rank) const;  ///< Slice of the shared experts' F, split over N.
  Range expert_ffn(int stage_rank) const;         ///< Slice of a routed expert's F, split over TPF.
  Range experts(int stage_rank) const;            ///< Routed experts, split over EP.
  Range vocab(int stage_rank) const;              ///< Vocabulary ids, split over N; parts may be uneven.
  Range layers(int stage) const;                  ///< Layers of a stage, split over PP.

  /// All sizes of the rank that a layer reads.
  RankShape rank_shape(int stage_rank) const;

  /// Copies of each KV head in a stage: 1, or TPA/Hkv under allow_kv_duplication.
  int kv_copies() const;

  /// The whole grid as text: one line a rank with coordinates, heads, KV heads, experts, vocabulary.
  std::string to_string() const;

  /// Every legal topology of exactly `stage_size` ranks for `shape`, in increasing TPA, then EP. Outer widths
  /// are 1.
  static std::vector<TopologySpec> legal_topologies(const ModelShape& shape, int stage_size);

  /// The rules that `spec` violates, one sentence each with its values; empty if legal.
  static std::vector<std::string> violations(const TopologySpec& spec, const ModelShape& shape);

 private:
  int check_stage_rank(int stage_rank) const;

  TopologySpec spec_;
  ModelShape shape_;
};

}  // namespace helix

#include <helix/topology-inl.hpp>
