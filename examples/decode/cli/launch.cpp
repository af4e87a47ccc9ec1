// SPDX-License-Identifier: Apache-2.0
// Rank threads of one process, the memory plan that needs none, and the choice of a launcher.
#include "cli/launch.hpp"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <thread>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>
#include <helix/job_comms.hpp>

#include "cli/launch_cuda.hpp"
#include "cli/launch_mpi.hpp"
#include "cli/rank_threads.hpp"
#include "generate/request_plan.hpp"

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
      [&](int, const JobComms<cpu::LocalComm>& comms) {
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

void add_fields(JobFields& fields, const LaunchOptions& options) {
  // A binding, so that a new member does not compile until it is decided upon here.
  [[maybe_unused]] const auto& [num_threads, show_progress, timeout, device, activation, placement, gpu] =
      options;
  fields.push_back({"--device", device == Device::cuda ? "cuda" : "cpu"});
  fields.push_back({"--activation", std::string(to_string(activation))});
}

void Launcher::agree(const JobStatement& mine) {
  std::vector<JobStatement> statements;
  for (const std::string& text : gather_texts(serialize(mine)))
    statements.push_back(deserialize_statement(text));
  try {
    expect_agreement(statements);
  } catch (...) {
    all_fail_alike_ = true;
    throw;
  }
}

namespace {

bool is_mpi_process() {
  return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr || std::getenv("PMI_SIZE") != nullptr;
}

class ThreadLauncher : public Launcher {
 public:
  bool has_processes() const override { return false; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string describe_devices(const Topology& topo, const LaunchOptions& options) const override {
    return options.device == Device::cuda ? describe_gpus(topo, options) : "";
  }
  GenerationResult run(const Checkpoint& checkpoint, const ModelConfig& config, const Topology& topo,
                       const GenerationRequest& request, const LaunchOptions& options) override {
    return run_local(checkpoint, config, topo, request, options);
  }
  std::string fail(std::string_view reason) noexcept override { return std::string(reason); }

 protected:
  std::vector<std::string> gather_texts(const std::string& mine) override { return {mine}; }
};

}  // namespace

std::unique_ptr<Launcher> make_thread_launcher() {
  return std::make_unique<ThreadLauncher>();
}

std::unique_ptr<Launcher> make_launcher(Device device, std::chrono::milliseconds timeout) {
  if (device == Device::cuda) return is_cuda_job() ? make_cuda_launcher(timeout) : make_thread_launcher();
  return is_mpi_process() ? make_mpi_launcher(timeout) : make_thread_launcher();
}

}  // namespace helix::decode
