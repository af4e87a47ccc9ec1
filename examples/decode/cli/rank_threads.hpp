// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of this process, and their memory plan, for every Backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/job_comms.hpp>
#include <helix/topology.hpp>

#include "files/reason.hpp"
#include "generate/generate.hpp"
#include "model/step_workspace.hpp"

namespace helix::decode {

/// Rethrows the failure to report, if any rank failed: the first one that is not just the consequence of
/// another rank's failure. Its message names the rank, unless others say the same.
void throw_root_failure(const std::vector<std::exception_ptr>& failures);

/// Calls body(rank) for each of `num_ranks` ranks, rank 0 on the calling thread and the others on threads of
/// their own, and returns when all calls have returned. No call begins before all threads have started.
/// @throws Error(capacity) naming the rank whose thread cannot be started; body is then never called.
void run_on_threads(std::size_t num_ranks, const std::function<void(std::size_t)>& body);

/// Runs all ranks of `topo`: rank r on a thread of its own, with world[r] and make_backend(r, comms). Rank 0
/// runs on the calling thread.
/// @throws the failure of the rank that failed first, as throw_root_failure() does, and the errors of
/// run_on_threads().
template <class Comm, class MakeBackend>
GenerationResult run_rank_threads(std::vector<Comm> world, MakeBackend make_backend,
                                  const Checkpoint& checkpoint, const ModelConfig& config,
                                  const Topology& topo, const GenerationRequest& request, const RootIo& io) {
  std::vector<std::exception_ptr> failures(world.size());
  GenerationResult result;
  run_on_threads(world.size(), [&](std::size_t rank) {
    try {
      JobComms<Comm> comms = split_world(world[rank], topo);
      auto backend = make_backend(static_cast<int>(rank), comms);
      GenerationResult mine =
          generate(backend, world[rank], comms.pipeline, topo, checkpoint, config, request, io);
      if (rank == 0) result = std::move(mine);
    } catch (const std::exception& error) {
      failures[rank] = std::current_exception();
      world[rank].abort(reason_of(error));
    }
  });
  throw_root_failure(failures);
  return result;
}

/// The planned memory of each rank, by world rank. make_backend(stage, kvp) gets handles of groups that never
/// communicate. Replicas have equal weights, and replicas without sequences have equal plans.
/// @throws Error(capacity) if the bytes of a rank's pages overflow.
template <class Comm, class MakeBackend>
std::vector<RankMemory> plan_ranks(MakeBackend make_backend, const Checkpoint& checkpoint,
                                   const ModelConfig& config, const Topology& topo,
                                   const GenerationRequest& request) {
  const auto stages = Comm::create_group(topo.stage_size());
  const auto kvps = Comm::create_group(topo.kvp());
  const auto replica_size = static_cast<std::size_t>(topo.pp() * topo.stage_size());
  std::vector<RankMemory> plan;
  for (int world_rank = 0; world_rank < topo.world_size(); ++world_rank) {
    const RankCoordinates at = topo.coordinates(world_rank);
    const Range sequences = replica_sequences(topo, request, at.replica);
    if (at.replica > 0 && replica_sequences(topo, request, at.replica - 1).size() == 0) {
      plan.push_back(plan[plan.size() - replica_size]);
      continue;
    }
    auto backend = make_backend(stages[static_cast<std::size_t>(at.stage_rank)],
                                kvps[static_cast<std::size_t>(at.kvp_rank)]);
    plan_cache(request, topo, at.stage, at.replica);  // throws if the cache's constructor would
    RankMemory memory;
    if (at.replica > 0) {
      const RankMemory& same = plan[plan.size() - replica_size];
      memory.weights_bytes = same.weights_bytes;
      memory.weights_in_place_bytes = same.weights_in_place_bytes;
    } else {
      const WeightPlan weights =
          plan_weights(config, checkpoint, topo, world_rank, kWeightHome<decltype(backend)>,
                       latent_weights(plan_mla_prefill(request, topo)));
      memory.weights_in_place_bytes = weights.in_place_bytes();
      memory.weights_bytes = weights.allocated_bytes() + weights.in_place_bytes();
    }
    if (request.serving) memory.kv_bytes = planned_pool_bytes(request, topo, at);
    for (std::int64_t sequence = sequences.begin; sequence < sequences.end; ++sequence) {
      memory.kv_bytes = saturating_sum(memory.kv_bytes, planned_kv_bytes(request, topo, at, sequence));
    }
    HELIX_EXPECTS(memory.kv_bytes < kSaturated, ErrorCode::capacity, "the KV cache of rank ", world_rank,
                  " exceeds 2^63 bytes: use fewer or shorter sequences");
    const auto workspace = StepWorkspace<decltype(backend)>::plan(
        backend, topo, topo.rank_shape(at.stage_rank), at.stage, plan_limits(request, topo, at.replica));
    memory.workspace_bytes = static_cast<std::int64_t>(workspace.total());
    plan.push_back(memory);
  }
  return plan;
}

}  // namespace helix::decode
