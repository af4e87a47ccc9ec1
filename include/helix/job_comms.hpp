// SPDX-License-Identifier: Apache-2.0
// The groups that a rank of a job belongs to, split from one communicator as the topology says.
#pragma once

#include <utility>

#include <helix/backend/communicator.hpp>
#include <helix/error.hpp>
#include <helix/topology.hpp>

namespace helix {

/// Splits the KVP group of this rank from its stage's communicator. Collective over the stage.
/// @throws Error(invalid_argument), on all ranks and before anything is split, unless the communicator has
/// topology.stage_size() ranks.
template <SplittableComm Comm>
Comm split_kvp(Comm& stage, const Topology& topology) {
  HELIX_EXPECTS(stage.size() == topology.stage_size(), ErrorCode::invalid_argument,
                "split_kvp: the communicator has ", stage.size(), " ranks; a stage of the topology has ",
                topology.stage_size(), " (KVP * TPA): pass the stage's communicator");
  const GroupSplit kvp = topology.split(RankGroup::kvp, stage.rank());
  return stage.split(kvp.color, kvp.key);
}

/// The groups that one rank of a job belongs to.
template <SplittableComm Comm>
struct JobComms {
  Comm pipeline;  ///< Ranks of this rank's replica with its stage_rank, by stage.
  Comm stage;     ///< All N ranks of this rank's stage, by stage_rank.
  Comm kvp;       ///< This rank's KVP group, by kvp_rank.
};

/// Splits a communicator of the whole job into this rank's groups. Collective over the job.
/// @throws Error(invalid_argument), on all ranks and before anything is split, unless the communicator has
/// topology.world_size() ranks.
template <SplittableComm Comm>
JobComms<Comm> split_world(Comm& world, const Topology& topology) {
  HELIX_EXPECTS(world.size() == topology.world_size(), ErrorCode::invalid_argument,
                "split_world: the communicator has ", world.size(), " ranks; the topology has ",
                topology.world_size(), " (DP * PP * KVP * TPA): pass the communicator of the whole job");
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
