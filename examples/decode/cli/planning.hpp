// SPDX-License-Identifier: Apache-2.0
// --topology auto: the topology that the planner would choose.
#pragma once

#include <vector>

#include <helix/topology.hpp>

#include "cli/launch.hpp"
#include "generate/generation.hpp"
#include "model/model_config.hpp"

namespace helix::decode {

/// The fastest Helix topology of as many ranks as `num_ranks` allows for the request's sequences at their
/// longest that fits into the ranks' memory. On GPUs the machine is the preset h200; on the CPU this
/// machine's memory shared by the ranks, with assumed speeds. A pure function of its arguments and the
/// machine: ranks on equal machines agree.
/// @throws Error(invalid_topology) if no topology is legal, Error(capacity) if none fits.
TopologySpec choose_topology(const ModelConfig& config, const GenerationRequest& request,
                             const LaunchOptions& launch, const std::vector<int>& num_ranks);

}  // namespace helix::decode
