// SPDX-License-Identifier: Apache-2.0
// What the scheduler of a serving job is built for, and what its client is told about the job.
#pragma once

#include <string>

#include <helix/topology.hpp>

#include "generate/generation.hpp"
#include "model/model_config.hpp"
#include "serve/events.hpp"
#include "serve/scheduler.hpp"

namespace helix::decode {

/// The scheduler's specification; its ledgers match the ranks' caches, see plan_cache().
SchedulerSpec plan_scheduler(const GenerationRequest& request, const ModelConfig& config,
                             const Topology& topo);

ServeAbilities serve_abilities(const GenerationRequest& request, const ModelConfig& config,
                               const Topology& topo, const std::string& activation, const RankMemory& memory);

}  // namespace helix::decode
