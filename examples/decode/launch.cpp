// SPDX-License-Identifier: Apache-2.0
// Rank threads of one process, and the memory plan that needs none.
#include "launch.hpp"

#include <algorithm>
#include <cstdlib>
#include <thread>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>

#include "generate.hpp"

namespace helix::decode {

using LocalBackend = cpu::Backend<cpu::LocalComm>;

namespace {

/// The failure to report of several ranks': the first that is not the echo of another rank's.
std::exception_ptr root_failure(const std::vector<std::exception_ptr>& failures) {
  std::exception_ptr echo;
  for (const std::exception_ptr& failure : failures) {
    if (!failure) continue;
    try {
      std::rethrow_exception(failure);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::peer_failed) return failure;
      if (!echo) echo = failure;
    } catch (...) {
      return failure;
    }
  }
  return echo;
}

}  // namespace

bool is_mpi_process() {
  return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr || std::getenv("PMI_SIZE") != nullptr;
}

int threads_per_rank(const LaunchOptions& options, const Topology& topo) {
  if (options.num_threads > 0) return options.num_threads;
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return std::max(1, cores / topo.world_size());
}

GenerationResult run_local(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                           const GenerationRequest& request, const LaunchOptions& options) {
  check_request(request, config, topo);
  const int world_size = topo.world_size();
  const int threads = threads_per_rank(options, topo);
  std::vector<cpu::LocalComm> world = cpu::LocalComm::create_group(world_size, options.timeout);
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(world_size));
  GenerationResult result;

  const auto run_rank = [&](std::size_t rank) {
    try {
      auto comms = WorldComms<cpu::LocalComm>::split(world[rank], topo);
      LocalBackend backend(comms.stage, comms.kvp, threads);
      GenerationResult mine =
          generate(backend, comms, topo, checkpoint, config, request, options.show_progress);
      if (rank == 0) result = std::move(mine);
    } catch (const std::exception& error) {
      failures[rank] = std::current_exception();
      world[rank].abort(error.what());
    }
  };
  std::vector<std::jthread> ranks;
  for (std::size_t rank = 1; rank < failures.size(); ++rank) ranks.emplace_back(run_rank, rank);
  run_rank(0);
  ranks.clear();  // joins
  if (const std::exception_ptr failure = root_failure(failures)) std::rethrow_exception(failure);
  return result;
}

std::vector<RankMemory> plan_memory(const Checkpoint& checkpoint, const ModelConfig& config,
                                    const Topology& topo, const GenerationRequest& request,
                                    const LaunchOptions& options) {
  check_request(request, config, topo);
  std::vector<RankMemory> plan;
  for (int world_rank = 0; world_rank < topo.world_size(); ++world_rank) {
    const RankCoordinates at = topo.coordinates(world_rank);
    // A handle to a group that never communicates stands for the rank.
    const auto stage =
        cpu::LocalComm::create_group(topo.stage_size())[static_cast<std::size_t>(at.stage_rank)];
    const auto kvp = cpu::LocalComm::create_group(topo.kvp())[static_cast<std::size_t>(at.kvp_rank)];
    LocalBackend backend(stage, kvp, threads_per_rank(options, topo));
    const Range sequences = replica_sequences(topo, request, at.replica);
    RankMemory& memory = plan.emplace_back();
    memory.weights_bytes = plan_weight_bytes(config, checkpoint, topo, world_rank);
    for (std::int64_t sequence = sequences.begin; sequence < sequences.end; ++sequence) {
      memory.kv_bytes += planned_kv_bytes(request, topo, at, sequence);
    }
    memory.workspace_bytes =
        static_cast<std::int64_t>(StepWorkspace<LocalBackend>::plan(backend, topo, at.stage, config,
                                                                    plan_limits(request, topo, at.replica))
                                      .total());
  }
  return plan;
}

}  // namespace helix::decode
