// SPDX-License-Identifier: Apache-2.0
// Ranks on GPUs. Where CUDA was not built in, there are no GPUs, and whatever needs one throws
// Error(unsupported).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/launch.hpp"

namespace helix::decode {

/// Why --device cuda cannot work here, in words; empty: it can.
std::string cuda_unavailable_reason();

/// GPUs that this process may use; never an error.
int visible_gpus();

/// Memory of one GPU in bytes.
struct GpuMemory {
  std::int64_t free = 0;
  std::int64_t total = 0;
};

/// The memory of GPU `gpu` as it is now.
GpuMemory gpu_memory(int gpu);

/// The GPU of each rank thread, by rank.
std::vector<int> rank_gpus(const Topology& topo, const LaunchOptions& options);

/// The rank threads' GPUs in words, for the user.
std::string describe_gpus(const Topology& topo, const LaunchOptions& options);

/// run_local() on GPUs, for a request that was checked.
GenerationResult run_local_cuda(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                                const GenerationRequest& request, const LaunchOptions& options);

/// plan_memory() on GPUs, for a request that was checked.
std::vector<RankMemory> plan_memory_cuda(const Checkpoint& checkpoint, const ModelConfig& config,
                                         const Topology& topo, const GenerationRequest& request,
                                         const LaunchOptions& options);

/// Whether a launcher (torchrun, mpirun, srun) started this process as one of several ranks.
/// @throws Error(invalid_argument) naming the variable of the launcher that is missing or wrong.
bool is_cuda_job();

/// One process a GPU, over cuda::PeerComm or NCCL; MPI is not used. Collective over the processes of the job.
/// @throws Error(unsupported) without a GPU for this process, and what Bootstrap throws.
std::unique_ptr<Launcher> make_cuda_launcher(std::chrono::milliseconds timeout);

}  // namespace helix::decode
