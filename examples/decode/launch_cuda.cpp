// SPDX-License-Identifier: Apache-2.0
// Ranks on GPUs: threads of this process over cuda::LocalComm or cuda::NcclComm, or one process each over
// NCCL.
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <helix/comm/bootstrap.hpp>
#include <helix/cuda/backend.hpp>
#include <helix/cuda/local_comm.hpp>
#include <helix/cuda/nccl_comm.hpp>

#include "launch.hpp"
#include "rank_threads.hpp"

namespace helix::decode {

namespace {

/// Each step is waited for before the next is queued.
constexpr auto kGraphUse = cuda::NcclComm::GraphUse::one_at_a_time;

void expect_cuda() {
  const std::string reason = cuda_unavailable_reason();
  HELIX_EXPECTS(reason.empty(), ErrorCode::unsupported, "--device cuda: ", reason);
}

/// Calls body(T{}) for the activation type.
template <class Body>
auto with_activation(DType activation, Body&& body) {
  switch (activation) {
    case DType::f32:
      return body(float{});
    case DType::f16:
      return body(f16{});
    case DType::bf16:
      return body(bf16{});
    case DType::fp8_e4m3:
      break;
  }
  throw Error(ErrorCode::unsupported, "activations are ", to_string(activation), "; give f32, f16 or bf16");
}

bool has_one_gpu_each(const Topology& topo, GpuPlacement placement) {
  if (placement != GpuPlacement::automatic) return placement == GpuPlacement::one_each;
  return topo.world_size() > 1 && cuda::device_count() >= topo.world_size();
}

}  // namespace

std::string cuda_unavailable_reason() {
  if (cuda::device_count() > 0) return "";
  return "no GPU can be used (" + cuda::no_device_reason() +
         "); check the driver with nvidia-smi and CUDA_VISIBLE_DEVICES, or give --device cpu";
}

std::string describe_gpus(const Topology& topo, const LaunchOptions& options) {
  if (has_one_gpu_each(topo, options.placement))
    return "device: cuda, a GPU for each of " + std::to_string(topo.world_size()) + " ranks, over NCCL";
  return "device: cuda, " + std::to_string(topo.world_size()) +
         (topo.world_size() == 1 ? " rank" : " ranks") + " on GPU " + std::to_string(options.gpu);
}

GenerationResult run_local_cuda(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                                const GenerationRequest& request, const LaunchOptions& options) {
  expect_cuda();
  return with_activation(options.activation, [&]<class T>(T) {
    if (has_one_gpu_each(topo, options.placement)) {
      std::vector<int> devices(static_cast<std::size_t>(topo.world_size()));
      std::iota(devices.begin(), devices.end(), 0);
      return run_rank_threads(
          cuda::NcclComm::create_group(devices, options.timeout, kGraphUse),
          [](int rank, const WorldComms<cuda::NcclComm>& comms) {
            return cuda::Backend<cuda::NcclComm, T>(comms.stage, comms.kvp, rank);
          },
          checkpoint, config, topo, request, options.show_progress);
    }
    return run_rank_threads(
        cuda::LocalComm::create_group(topo.world_size(), options.timeout),
        [&](int, const WorldComms<cuda::LocalComm>& comms) {
          return cuda::Backend<cuda::LocalComm, T>(comms.stage, comms.kvp, options.gpu);
        },
        checkpoint, config, topo, request, options.show_progress);
  });
}

std::vector<RankMemory> plan_memory_cuda(const Checkpoint& checkpoint, const ModelConfig& config,
                                         const Topology& topo, const GenerationRequest& request,
                                         const LaunchOptions& options) {
  expect_cuda();
  return with_activation(options.activation, [&]<class T>(T) {
    return plan_ranks<cuda::LocalComm>(
        [&](const cuda::LocalComm& stage, const cuda::LocalComm& kvp) {
          return cuda::Backend<cuda::LocalComm, T>(stage, kvp, options.gpu);
        },
        checkpoint, config, topo, request);
  });
}

bool is_cuda_job() {
  return comm::BootstrapOptions::from_environment().size > 1;
}

struct CudaLaunch::State {
  comm::Bootstrap bootstrap;
  bool has_started = false;
};

CudaLaunch::CudaLaunch(std::uint64_t config_hash, std::chrono::milliseconds timeout) {
  expect_cuda();
  comm::BootstrapOptions options = comm::BootstrapOptions::from_environment();
  options.config_hash = config_hash;
  options.timeout = timeout;
  state_ = std::make_unique<State>(State{.bootstrap = comm::Bootstrap(options)});
  try {
    HELIX_EXPECTS(gpu() < cuda::device_count(), ErrorCode::unsupported, "--device cuda: local rank ", gpu(),
                  " has no GPU, there are ", cuda::device_count(),
                  "; start one process a GPU, or one process in all: its ranks are threads that share a GPU");
  } catch (const Error& error) {
    abort(error.what());
    throw;
  }
}
CudaLaunch::~CudaLaunch() = default;

int CudaLaunch::rank() const {
  return state_->bootstrap.rank();
}
int CudaLaunch::size() const {
  return state_->bootstrap.size();
}
int CudaLaunch::gpu() const {
  return state_->bootstrap.local_rank();
}

GenerationResult CudaLaunch::run(const Checkpoint& checkpoint, const ModelConfig& config,
                                 const Topology& topo, const GenerationRequest& request,
                                 const LaunchOptions& options) {
  state_->has_started = true;
  return with_activation(options.activation, [&]<class T>(T) {
    auto comms =
        WorldComms<cuda::NcclComm>::split(cuda::NcclComm::connect(state_->bootstrap, gpu(), kGraphUse), topo);
    cuda::Backend<cuda::NcclComm, T> backend(comms.stage, comms.kvp, gpu());
    return generate(backend, comms, topo, checkpoint, config, request, options.show_progress);
  });
}

void CudaLaunch::abort(std::string_view reason) noexcept {
  state_->bootstrap.fail(reason);
}

bool CudaLaunch::reports_failures() const {
  return rank() == 0 || state_->has_started;
}

}  // namespace helix::decode
