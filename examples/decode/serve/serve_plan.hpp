// SPDX-License-Identifier: Apache-2.0
// What a serving job's scheduler is built for, and what its client is told of it.
#pragma once

#include <string>

#include <helix/topology.hpp>

#include "generate/generation.hpp"
#include "model/model_config.hpp"
#include "serve/events.hpp"
#include "serve/scheduler.hpp"

namespace helix::decode {

/// The scheduler whose ledgers are those of the ranks' caches, see plan_cache().
SchedulerSpec plan_scheduler(const GenerationRequest& request, const ModelConfig& config,
                             const Topology& topo);

ServeAbilities serve_abilities(const GenerationRequest& request, const ModelConfig& config,
                               const Topology& topo, const std::string& activation, const RankMemory& memory);

}  // namespace helix::decode
