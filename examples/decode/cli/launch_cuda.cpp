// SPDX-License-Identifier: Apache-2.0
// Ranks on GPUs: threads of this process over cuda::LocalComm, cuda::PeerComm or cuda::NcclComm, or one
// process per rank over PeerComm or NcclComm.
#include "cli/launch_cuda.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <helix/comm/bootstrap.hpp>
#include <helix/cuda/backend.hpp>
#include <helix/cuda/local_comm.hpp>
#include <helix/cuda/nccl_comm.hpp>
#include <helix/cuda/peer_comm.hpp>
#include <helix/job_comms.hpp>

#include "cli/rank_threads.hpp"
#include "files/standard_streams.hpp"
#include "files/strict_json.hpp"

namespace helix::decode {

namespace {

/// At most one step is queued before the previous step has finished. It replays the same graph on the same
/// stream, so the two never run at once.
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
    case DType::fp8_ds_mla:
      break;
  }
  throw Error(ErrorCode::unsupported, "activations are ", to_string(activation), "; give f32, f16 or bf16");
}

bool has_one_gpu_each(const Topology& topo, GpuPlacement placement) {
  if (placement != GpuPlacement::automatic) return placement == GpuPlacement::one_each;
  return topo.world_size() > 1 && cuda::device_count() >= topo.world_size();
}

/// Name of the transport that was asked for. Whether peer memory is really available shows only when the
/// ranks connect.
std::string_view transport_of(const LaunchOptions& options) {
  return options.peer_memory == PeerMemory::off ? "NCCL"
                                                : "peer memory where GPUs reach each other, else NCCL";
}

cuda::PeerComm::Options peer_options(const LaunchOptions& options) {
  const char* const island = std::getenv("HELIX_ISLAND");
  return {.timeout = options.timeout,
          .use_nccl = true,
          .graph_use = kGraphUse,
          .island = island == nullptr ? "" : island};
}

}  // namespace

bool is_cuda_built() {
  return true;
}

std::string cuda_unavailable_reason() {
  if (cuda::device_count() > 0) return "";
  return "no GPU can be used (" + cuda::no_device_reason() +
         "); check the driver with nvidia-smi and CUDA_VISIBLE_DEVICES, or give --device cpu";
}

int visible_gpus() {
  return cuda::device_count();
}

GpuMemory gpu_memory(int gpu) {
  const cuda::DeviceMemory memory = cuda::device_memory(gpu);
  return {.free = static_cast<std::int64_t>(memory.free_bytes),
          .total = static_cast<std::int64_t>(memory.total_bytes)};
}

std::vector<int> rank_gpus(const Topology& topo, const LaunchOptions& options) {
  std::vector<int> gpus(static_cast<std::size_t>(topo.world_size()), options.gpu);
  if (has_one_gpu_each(topo, options.placement)) std::iota(gpus.begin(), gpus.end(), 0);
  return gpus;
}

std::string describe_gpus(const Topology& topo, const LaunchOptions& options) {
  if (has_one_gpu_each(topo, options.placement))
    return "device: cuda, a GPU for each of " + std::to_string(topo.world_size()) + " ranks, over " +
           std::string(transport_of(options));
  return "device: cuda, " + std::to_string(topo.world_size()) +
         (topo.world_size() == 1 ? " rank" : " ranks") + " on GPU " + std::to_string(options.gpu) +
         (options.peer_memory == PeerMemory::on ? ", over peer memory" : "");
}

GenerationResult run_local_cuda(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                                const GenerationRequest& request, const LaunchOptions& options) {
  expect_cuda();
  return with_activation(options.activation, [&]<class T>(T) {
    const bool has_one_each = has_one_gpu_each(topo, options.placement);
    if (options.peer_memory == PeerMemory::on ||
        (has_one_each && options.peer_memory == PeerMemory::automatic)) {
      const std::vector<int> gpus = rank_gpus(topo, options);
      return run_rank_threads(
          cuda::PeerComm::create_group(gpus, peer_options(options)),
          [&](int rank, const JobComms<cuda::PeerComm>& comms) {
            return cuda::Backend<cuda::PeerComm, T>(comms.stage, comms.kvp,
                                                    gpus[static_cast<std::size_t>(rank)]);
          },
          checkpoint, config, topo, request, root_io(options));
    }
    if (has_one_each) {
      return run_rank_threads(
          cuda::NcclComm::create_group(rank_gpus(topo, options), options.timeout, kGraphUse),
          [](int rank, const JobComms<cuda::NcclComm>& comms) {
            return cuda::Backend<cuda::NcclComm, T>(comms.stage, comms.kvp, rank);
          },
          checkpoint, config, topo, request, root_io(options));
    }
    return run_rank_threads(
        cuda::LocalComm::create_group(topo.world_size(), options.timeout),
        [&](int, const JobComms<cuda::LocalComm>& comms) {
          return cuda::Backend<cuda::LocalComm, T>(comms.stage, comms.kvp, options.gpu);
        },
        checkpoint, config, topo, request, root_io(options));
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

namespace {

/// The longest time that a process may take to free its resources after a failure.
constexpr std::chrono::milliseconds kExitGrace{5000};

class CudaLauncher : public Launcher {
 public:
  explicit CudaLauncher(const comm::BootstrapOptions& options) : bootstrap_(options) {
    // Last resort: a call of NCCL or CUDA may never return once a peer has stopped, even after an abort.
    bootstrap_.on_failure(
        [rank = options.rank, grace = std::max(kExitGrace, options.timeout)](const Error& error) {
          try {
            std::thread([rank, grace, text = std::string(error.what())] {
              std::this_thread::sleep_for(grace);
              print_error(fmt::format(
                  "helix-decode: rank {}: {}; a call of NCCL or CUDA did not return for {} s after it\n",
                  rank, one_line(text), std::chrono::duration_cast<std::chrono::seconds>(grace).count()));
              std::_Exit(1);
            }).detach();
          } catch (...) {
            // There is no thread or no memory left. The other processes have already been told.
          }
        });
  }

  /// After a failure, a thread may be stuck in an NCCL call that never returns. A normal exit would destroy
  /// static objects that this thread still uses.
  ~CudaLauncher() override {
    if (!has_started_ || !bootstrap_.has_failed()) return;
    std::fflush(nullptr);
    std::_Exit(1);
  }
  CudaLauncher(const CudaLauncher&) = delete;
  CudaLauncher& operator=(const CudaLauncher&) = delete;

  /// Checks that this process has a GPU; if not, tells the other processes.
  /// @throws Error(unsupported) if it has none.
  void expect_gpu() {
    if (gpu() < cuda::device_count()) return;
    const Error missing(ErrorCode::unsupported, "--device cuda: local rank ", gpu(),
                        " has no GPU, there are ", cuda::device_count(),
                        "; start one process a GPU, or one process in all: its ranks are threads that share "
                        "a GPU");
    bootstrap_.fail(missing.what());
    throw missing;
  }

  bool has_processes() const override { return true; }
  int rank() const override { return bootstrap_.rank(); }
  int size() const override { return bootstrap_.size(); }
  int gpu() const override { return bootstrap_.local_rank(); }
  std::string processor() const override { return cuda::device_name(gpu()); }
  std::string describe_devices(const Topology&, const LaunchOptions& options) const override {
    return "device: cuda, " + std::to_string(size()) + " processes with a GPU each, over " +
           std::string(transport_of(options));
  }

  GenerationResult run(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                       const GenerationRequest& request, const LaunchOptions& options) override {
    has_started_ = true;
    return with_activation(options.activation, [&]<class T>(T) {
      const auto run_over = [&]<class Comm>(Comm world) {
        JobComms<Comm> comms = split_world(world, topo);
        cuda::Backend<Comm, T> backend(comms.stage, comms.kvp, gpu());
        return generate(backend, world, comms.pipeline, topo, checkpoint, config, request, root_io(options));
      };
      if (options.peer_memory == PeerMemory::off)
        return run_over(cuda::NcclComm::connect(bootstrap_, gpu(), kGraphUse));
      return run_over(cuda::PeerComm::connect(bootstrap_, gpu(), peer_options(options)));
    });
  }

  /// Before run() either all ranks fail alike, or rank 0 hears of the failure: only rank 0 prints.
  std::string fail(std::string_view reason) noexcept override {
    bootstrap_.fail(reason);
    if (rank() != 0 && !has_started_) return "";
    return "rank " + std::to_string(rank()) + ": " + std::string(reason);
  }

 protected:
  std::vector<std::string> gather_texts(const std::string& mine) override {
    return decode::gather_texts(bootstrap_, mine);
  }

 private:
  comm::Bootstrap bootstrap_;
  bool has_started_ = false;
};

}  // namespace

std::unique_ptr<Launcher> make_cuda_launcher(std::chrono::milliseconds timeout) {
  expect_cuda();
  comm::BootstrapOptions options = comm::BootstrapOptions::from_environment();
  options.timeout = timeout;
  auto launcher = std::make_unique<CudaLauncher>(options);
  launcher->expect_gpu();
  return launcher;
}

}  // namespace helix::decode
