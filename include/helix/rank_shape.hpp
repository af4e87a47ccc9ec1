// SPDX-License-Identifier: Apache-2.0
// RankShape: what one rank of a stage holds of a layer, worked out once.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include <helix/backend/communicator.hpp>
#include <helix/model_shape.hpp>
#include <helix/topology.hpp>

namespace helix {

/// One rank's sizes of a layer: its heads, widths and experts under a topology.
struct RankShape {
  /// The sizes of `stage_rank`. @throws Error(invalid_argument) unless it is a rank of the stage.
  RankShape(const Topology& topology, int stage_rank)
      : stage_rank(stage_rank),
        stage_size(topology.stage_size()),
        kvp(topology.kvp()),
        kvp_rank(topology.stage_coordinates(stage_rank).kvp_rank),
        hidden(topology.shape().hidden),
        query_heads(topology.query_heads(stage_rank).size()),
        kv_heads(topology.kv_heads(stage_rank).size()),
        combined_heads(topology.combined_heads(stage_rank).size()),
        head_dim(topology.shape().head_dim),
        value_dim(topology.shape().value_dim),
        mla(topology.shape().mla),
        ffn(topology.ffn(stage_rank).size()),
        shared_ffn(topology.shared_expert_ffn(stage_rank).size()),
        expert_ffn(topology.expert_ffn(stage_rank).size()),
        num_experts(topology.shape().num_experts()),
        top_k(topology.shape().moe ? topology.shape().moe->top_k : 0),
        experts(topology.experts(stage_rank)) {}

  int stage_rank;
  int stage_size;  ///< N.
  int kvp;
  int kvp_rank;
  std::int64_t hidden;          ///< M.
  std::int64_t query_heads;     ///< Hq/TPA, the heads it projects and attends with.
  std::int64_t kv_heads;        ///< Hkv/TPA, the heads it stores.
  std::int64_t combined_heads;  ///< Hq/N, the heads whose exact attention it ends with.
  std::int64_t head_dim;        ///< D.
  std::int64_t value_dim;       ///< Dv.
  std::optional<MlaShape> mla;  ///< The whole model's, as nothing of a latent is split.
  std::int64_t ffn;             ///< F/N.
  std::int64_t shared_ffn;      ///< F/N of the shared experts.
  std::int64_t expert_ffn;      ///< F/TPF of a routed expert.
  std::int64_t num_experts;     ///< E of the whole model.
  std::int64_t top_k;
  Range experts;  ///< Global ids of the routed experts it holds.

  /// Elements of a row of q, k and v as the fused projection of grouped-query attention gives it.
  std::int64_t qkv_columns() const { return query_heads * head_dim + kv_heads * (head_dim + value_dim); }
};

/// The KVP group of this rank, out of its stage's communicator. Collective over the stage.
template <SplittableComm Comm>
Comm split_kvp(Comm& stage, const Topology& topology) {
  const GroupSplit kvp = topology.split(RankGroup::kvp, stage.rank());
  return stage.split(kvp.color, kvp.key);
}

/// The groups that one rank of a job belongs to.
template <SplittableComm Comm>
struct JobComms {
  Comm pipeline;  ///< Ranks of its replica with its stage_rank, by stage.
  Comm stage;     ///< All N ranks of its stage, by stage_rank.
  Comm kvp;       ///< Its KVP group, by kvp_rank.
};

/// Splits a communicator of the whole world. Collective over the world.
template <SplittableComm Comm>
JobComms<Comm> split_world(Comm& world, const Topology& topology) {
  const auto part = [&](RankGroup group) {
    const GroupSplit at = topology.split(group, world.rank());
    return world.split(at.color, at.key);
  };
  Comm pipeline = part(RankGroup::pipeline);
  Comm stage = part(RankGroup::stage);
  Comm kvp = split_kvp(stage, topology);
  return {std::move(pipeline), std::move(stage), std::move(kvp)};
}

}  // namespace helix
