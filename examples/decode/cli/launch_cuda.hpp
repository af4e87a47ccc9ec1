// SPDX-License-Identifier: Apache-2.0
// Ranks on GPUs. If CUDA is not built in, there are no GPUs, and functions that need one throw
// Error(unsupported).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/launch.hpp"

namespace helix::decode {

/// Whether the CUDA backend is built in.
bool is_cuda_built();

/// The reason why --device cuda cannot work here; empty if it can.
std::string cuda_unavailable_reason();

/// Number of GPUs that this process may use. Never an error.
int visible_gpus();

/// Memory of one GPU, in bytes.
struct GpuMemory {
  std::int64_t free = 0;
  std::int64_t total = 0;
};

/// The current memory of GPU `gpu`.
GpuMemory gpu_memory(int gpu);

/// The GPU of each rank thread, by rank.
std::vector<int> rank_gpus(const Topology& topo, const LaunchOptions& options);

/// Description of the rank threads' GPUs for the user.
std::string describe_gpus(const Topology& topo, const LaunchOptions& options);

/// run_local() on GPUs. The request must already be checked.
GenerationResult run_local_cuda(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                                const GenerationRequest& request, const LaunchOptions& options);

/// plan_memory() on GPUs. The request must already be checked.
std::vector<RankMemory> plan_memory_cuda(const Checkpoint& checkpoint, const ModelConfig& config,
                                         const Topology& topo, const GenerationRequest& request,
                                         const LaunchOptions& options);

/// Whether a launcher (torchrun, mpirun, srun) started this process as one of several ranks.
/// @throws Error(invalid_argument) naming the launcher's variable that is missing or wrong.
bool is_cuda_job();

/// A launcher with one process per GPU, over cuda::PeerComm or NCCL; MPI is not used. Collective over the
/// processes of the job.
/// @throws Error(unsupported) if this process has no GPU, and the errors of Bootstrap.
std::unique_ptr<Launcher> make_cuda_launcher(std::chrono::milliseconds timeout);

}  // namespace helix::decode
