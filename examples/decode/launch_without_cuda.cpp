// SPDX-License-Identifier: Apache-2.0
// --device cuda where CUDA was not built in: refuses.
#include <helix/error.hpp>

#include "launch.hpp"

namespace helix::decode {

namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported, "--device cuda: ", cuda_unavailable_reason());
}

}  // namespace

std::string cuda_unavailable_reason() {
  return "this build has no CUDA backend; install a CUDA compiler and configure with HELIX_CUDA=ON, or give "
         "--device cpu";
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

struct CudaLaunch::State {};

CudaLaunch::CudaLaunch(std::uint64_t, std::chrono::milliseconds) {
  refuse();
}
CudaLaunch::~CudaLaunch() = default;
int CudaLaunch::rank() const {
  return 0;
}
int CudaLaunch::size() const {
  return 1;
}
int CudaLaunch::gpu() const {
  return 0;
}
GenerationResult CudaLaunch::run(const Checkpoint&, const ModelConfig&, const Topology&,
                                 const GenerationRequest&, const LaunchOptions&) {
  refuse();
}
void CudaLaunch::abort(std::string_view) noexcept {}
bool CudaLaunch::reports_failures() const {
  return true;
}

}  // namespace helix::decode
