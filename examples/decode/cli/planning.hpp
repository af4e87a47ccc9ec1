// SPDX-License-Identifier: Apache-2.0
// --topology auto: the topology that the planner would choose.
#pragma once

#include <cstdint>
#include <vector>

#include <helix/topology.hpp>

#include "cli/launch.hpp"
#include "generate/generation.hpp"
#include "model/model_config.hpp"

namespace helix::decode {

/// Memory of this machine, bytes.
std::int64_t host_memory();

/// The fastest Helix topology of as many ranks as `num_ranks` allows for the request's sequences at their
/// longest that fits into the ranks' memory. On GPUs the machine is the preset h200; on the CPU a
/// rank has launch.rank_memory, or where that is 0 its part of host_memory(), with assumed speeds. A pure
/// function of its arguments and of host_memory().
/// @throws Error(invalid_topology) if no topology is legal, Error(capacity) if none fits.
TopologySpec choose_topology(const ModelConfig& config, const GenerationRequest& request,
                             const LaunchOptions& launch, const std::vector<int>& num_ranks);

}  // namespace helix::decode
