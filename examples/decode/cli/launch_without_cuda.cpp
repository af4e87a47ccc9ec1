// SPDX-License-Identifier: Apache-2.0
// Replaces launch_cuda.cpp if CUDA is not built in: there are no GPUs, and --device cuda is refused.
#include <helix/error.hpp>

#include "cli/launch_cuda.hpp"

namespace helix::decode {

namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported, "--device cuda: ", cuda_unavailable_reason());
}

}  // namespace

bool is_cuda_built() {
  return false;
}

std::string cuda_unavailable_reason() {
  return "this build has no CUDA backend; install a CUDA compiler and configure with HELIX_CUDA=ON, or give "
         "--device cpu";
}

int visible_gpus() {
  return 0;
}

GpuMemory gpu_memory(int) {
  refuse();
}

std::vector<int> rank_gpus(const Topology&, const LaunchOptions&) {
  refuse();
}

std::string describe_gpus(const Topology&, const LaunchOptions&) {
  refuse();
}

GenerationResult run_local_cuda(const Checkpoint&, const ModelConfig&, const Topology&,
                                const GenerationRequest&, const LaunchOptions&) {
  refuse();
}

std::vector<RankMemory> plan_memory_cuda(const Checkpoint&, const ModelConfig&, const Topology&,
                                         const GenerationRequest&, const LaunchOptions&) {
  refuse();
}

bool is_cuda_job() {
  refuse();
}

std::unique_ptr<Launcher> make_cuda_launcher(std::chrono::milliseconds) {
  refuse();
}

}  // namespace helix::decode
