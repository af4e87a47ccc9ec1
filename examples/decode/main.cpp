// SPDX-License-Identifier: Apache-2.0
// helix-decode: a Llama or DeepSeek checkpoint under a Helix topology, on rank threads or one process a rank.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <helix/error.hpp>

#include "checkpoint.hpp"
#include "launch.hpp"
#include "model_config.hpp"
#include "nccl_environment.hpp"
#include "options.hpp"
#include "planning.hpp"
#include "report.hpp"

namespace helix::decode {
namespace {

/// How this process takes part where each rank is a process; both null: ranks are threads of this one.
struct Job {
  std::unique_ptr<MpiLaunch> mpi;
  std::unique_ptr<CudaLaunch> cuda;

  bool has_processes() const { return mpi != nullptr || cuda != nullptr; }
  int rank() const { return mpi != nullptr ? mpi->rank() : cuda != nullptr ? cuda->rank() : 0; }
  int size() const { return mpi != nullptr ? mpi->size() : cuda != nullptr ? cuda->size() : 1; }
};

/// FNV-1a of the command line, which must be equal on all ranks.
std::uint64_t hash_arguments(int argc, char** argv) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&](char c) { hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u; };
  for (int i = 1; i < argc; ++i) {
    for (const char c : std::string_view(argv[i])) add(c);
    add('\0');
  }
  return hash;
}

/// Ranks of --topology auto: of the launcher's job, else --ranks.
int num_ranks(const Options& options, const Job& job) {
  if (job.has_processes()) {
    HELIX_EXPECTS(options.num_ranks == 0 || options.num_ranks == job.size(), ErrorCode::invalid_argument,
                  "--ranks is ", options.num_ranks, " but the launcher started ", job.size(),
                  " processes: drop --ranks");
    return job.size();
  }
  HELIX_EXPECTS(
      options.num_ranks > 0, ErrorCode::invalid_argument,
      "--topology auto needs to know for how many ranks: give --ranks, or start the ranks by mpirun "
      "or torchrun");
  return options.num_ranks;
}

Topology one_rank_topology(const Topology& topo) {
  return Topology(TopologySpec{}, topo.shape());
}

GenerationResult run_ranks(const Job& job, const Checkpoint& checkpoint, const ModelConfig& config,
                           const Topology& topo, const GenerationRequest& request,
                           const LaunchOptions& launch) {
  if (job.mpi != nullptr) return job.mpi->run(checkpoint, config, topo, request, launch);
  if (job.cuda != nullptr) return job.cuda->run(checkpoint, config, topo, request, launch);
  return run_local(checkpoint, config, topo, request, launch);
}

void run(Options& options, const Job& job) {
  const bool is_root = job.rank() == 0;
  const LaunchOptions launch{.num_threads = options.num_threads,
                             .show_progress = true,
                             .device = options.device,
                             .activation = options.activation,
                             .gpu = job.cuda != nullptr ? job.cuda->gpu() : 0};
  const Checkpoint checkpoint(options.model);
  const ModelConfig config = parse_model_config(checkpoint.config_json(), checkpoint.config_path());
  GenerationRequest& request = options.request;
  request.kv_dtype = options.kv_dtype_name.empty() ? config.dtype : *parse_dtype(options.kv_dtype_name);
  const TopologySpec spec = options.is_topology_auto
                                ? choose_topology(config, request, launch, num_ranks(options, job))
                                : options.topology;
  const Topology topo =
      job.has_processes() ? Topology(spec, config.shape(), job.size()) : Topology(spec, config.shape());
  const std::vector<RankMemory> plan = plan_memory(checkpoint, config, topo, request, launch);
  if (is_root) {
    if (request.synthetic_context > config.max_positions) {
      fmt::print(
          "note: {} tokens of synthetic context exceed the model's {} positions; the limit is lifted for "
          "this run\n",
          request.synthetic_context, config.max_positions);
    }
    fmt::print("{}\n{}", topo.to_string(), format_memory(plan, topo));
    if (job.cuda != nullptr) {
      fmt::print("device: cuda, {} processes with a GPU each, over NCCL\n", job.size());
    } else if (launch.device == Device::cuda) {
      fmt::print("{}\n", describe_gpus(topo, launch));
    }
    std::fflush(stdout);
  }
  if (options.is_plan_only) return;

  const GenerationResult result = run_ranks(job, checkpoint, config, topo, request, launch);
  if (!is_root) return;
  fmt::print("{}", format_result(result));
  if (!options.json.empty()) write_json(options.json, topo, request, result);
  if (options.verify) {
    const GenerationResult alone = run_local(checkpoint, config, one_rank_topology(topo), request, launch);
    check_same_tokens(result, alone);
    fmt::print("verified: {} ranks give the tokens of one rank\n", topo.world_size());
  }
}

}  // namespace
}  // namespace helix::decode

int main(int argc, char** argv) {
  using namespace helix::decode;
  helix::turn_nccl_multicast_off();
  helix::promise_nccl_one_graph_at_a_time();
  Job job;
  try {
    // The device decides whether mpirun means MPI, also for an error on the command line, which all ranks
    // share.
    std::optional<Options> options;
    std::exception_ptr usage_error;
    try {
      options = parse_options(argc, argv);
      if (!options) return 0;
    } catch (const std::exception&) {
      usage_error = std::current_exception();
    }
    const bool is_cuda = options && options->device == Device::cuda;
    if (is_cuda && is_cuda_job()) {
      job.cuda = std::make_unique<CudaLaunch>(hash_arguments(argc, argv), LaunchOptions{}.timeout);
    } else if (!is_cuda && is_mpi_process()) {
      job.mpi = std::make_unique<MpiLaunch>();
    }
    if (usage_error) std::rethrow_exception(usage_error);
    run(*options, job);
    return 0;
  } catch (const std::exception& error) {
    if (job.mpi != nullptr) job.mpi->abort(error.what());
    if (job.cuda != nullptr) job.cuda->abort(error.what());
    if (job.cuda == nullptr || job.cuda->reports_failures()) {
      fmt::print(stderr, "helix-decode: {}{}\n",
                 job.cuda == nullptr ? "" : fmt::format("rank {}: ", job.rank()), error.what());
    }
    return 1;
  }
}
