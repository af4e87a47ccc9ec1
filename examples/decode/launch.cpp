// SPDX-License-Identifier: Apache-2.0
// Rank threads of one process, and the memory plan that needs none.
#include "launch.hpp"

#include <algorithm>
#include <cstdlib>
#include <thread>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>

#include "rank_threads.hpp"

namespace helix::decode {

using LocalBackend = cpu::Backend<cpu::LocalComm>;

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
  if (options.device == Device::cuda) return run_local_cuda(checkpoint, config, topo, request, options);
  const int threads = threads_per_rank(options, topo);
  return run_rank_threads(
      cpu::LocalComm::create_group(topo.world_size(), options.timeout),
      [&](int, const WorldComms<cpu::LocalComm>& comms) {
        return LocalBackend(comms.stage, comms.kvp, threads);
      },
      checkpoint, config, topo, request, options.show_progress);
}

std::vector<RankMemory> plan_memory(const Checkpoint& checkpoint, const ModelConfig& config,
                                    const Topology& topo, const GenerationRequest& request,
                                    const LaunchOptions& options) {
  check_request(request, config, topo);
  if (options.device == Device::cuda) return plan_memory_cuda(checkpoint, config, topo, request, options);
  return plan_ranks<cpu::LocalComm>(
      [&](const cpu::LocalComm& stage, const cpu::LocalComm& kvp) {
        return LocalBackend(stage, kvp, threads_per_rank(options, topo));
      },
      checkpoint, config, topo, request);
}

}  // namespace helix::decode
