// SPDX-License-Identifier: Apache-2.0
// --topology auto: asks the planner for a topology.
#pragma once

#include <vector>

#include <helix/topology.hpp>

#include "cli/launch.hpp"
#include "generate/generation.hpp"
#include "model/model_config.hpp"

namespace helix::decode {

/// Chooses the fastest Helix topology, with a number of ranks that `num_ranks` allows, in which the request's
/// sequences at their longest fit into the ranks' memory. On GPUs the machine is the preset h200. On the CPU
/// a rank has launch.rank_memory, or its share of host_memory() if that is 0, and speeds are assumed. A pure
/// function of its arguments and host_memory().
/// @throws Error(invalid_topology) naming the nearest number of ranks that has a legal topology if none of
/// `num_ranks` has one, Error(capacity) if none fits.
TopologySpec choose_topology(const ModelConfig& config, const GenerationRequest& request,
                             const LaunchOptions& launch, const std::vector<int>& num_ranks);

}  // namespace helix::decode
