// SPDX-License-Identifier: Apache-2.0
// helix-decode: a Llama or DeepSeek checkpoint under a Helix topology, on rank threads or one process a rank.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <helix/error.hpp>

#include "checkpoint/checkpoint.hpp"
#include "checkpoint/mapped_file.hpp"
#include "checkpoint/output_file.hpp"
#include "cli/launch.hpp"
#include "cli/nccl_environment.hpp"
#include "cli/options.hpp"
#include "cli/planning.hpp"
#include "cli/report.hpp"
#include "model/parse_config.hpp"

namespace helix::decode {
namespace {

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

/// Ranks of --topology auto: the launcher's processes, else --ranks.
int num_ranks(const Options& options, const Launcher& launcher) {
  if (launcher.has_processes()) {
    HELIX_EXPECTS(options.num_ranks == 0 || options.num_ranks == launcher.size(), ErrorCode::invalid_argument,
                  "--ranks is ", options.num_ranks, " but the launcher started ", launcher.size(),
                  " processes: drop --ranks");
    return launcher.size();
  }
  HELIX_EXPECTS(
      options.num_ranks > 0, ErrorCode::invalid_argument,
      "--topology auto needs to know for how many ranks: give --ranks, or start the ranks by mpirun "
      "or torchrun");
  return options.num_ranks;
}

/// What is known before a weight is loaded.
void print_plan(const Launcher& launcher, const ModelConfig& config, const Topology& topo,
                const GenerationRequest& request, const LaunchOptions& launch,
                const std::vector<RankMemory>& plan) {
  if (request.synthetic_context > config.max_positions) {
    fmt::print(
        "note: {} tokens of synthetic context exceed the model's {} positions; the limit is lifted for this "
        "run\n",
        request.synthetic_context, config.max_positions);
  }
  fmt::print("{}\n{}", topo.to_string(), format_memory(plan, topo));
  const std::string devices = launcher.describe_devices(topo, launch);
  if (!devices.empty()) fmt::print("{}\n", devices);
  flush_standard_output();
}

void run(Options& options, Launcher& launcher) {
  const bool is_root = launcher.rank() == 0;
  if (is_root && !options.json.empty()) check_output(options.json);
  const LaunchOptions launch{.num_threads = options.num_threads,
                             .show_progress = true,
                             .timeout = std::chrono::seconds(options.timeout_seconds),
                             .device = options.device,
                             .activation = options.activation,
                             .gpu = launcher.gpu()};
  const Checkpoint checkpoint(options.model);
  const ModelConfig config = parse_model_config(checkpoint.config_json(), checkpoint.config_path());
  GenerationRequest& request = options.request;
  request.kv_dtype = options.kv_dtype_name.empty() ? config.dtype : *parse_dtype(options.kv_dtype_name);
  const TopologySpec spec = options.is_topology_auto
                                ? choose_topology(config, request, launch, num_ranks(options, launcher))
                                : options.topology;
  const Topology topo =
      launcher.has_processes() ? Topology(spec, config.shape, launcher.size()) : Topology(spec, config.shape);
  const std::vector<RankMemory> plan = plan_memory(checkpoint, config, topo, request, launch);
  if (is_root) print_plan(launcher, config, topo, request, launch, plan);
  if (options.is_plan_only) return;

  const GenerationResult result = launcher.run(checkpoint, config, topo, request, launch);
  if (!is_root) return;
  fmt::print("{}", format_result(result));
  if (!options.json.empty()) write_json(options.json, topo, request, result);
  if (options.verify) {
    const Topology one_rank(TopologySpec{}, config.shape);
    check_same_tokens(result, run_local(checkpoint, config, one_rank, request, launch));
    fmt::print("verified: {} ranks give the tokens of one rank\n", topo.world_size());
  }
}

}  // namespace
}  // namespace helix::decode

int main(int argc, char** argv) {
  using namespace helix::decode;
  guard_mappings("helix-decode");
  helix::turn_nccl_multicast_off();
  helix::promise_nccl_one_graph_at_a_time();
  std::unique_ptr<Launcher> launcher = make_thread_launcher();  // until it is known what this process is of
  try {
    // The device decides whether mpirun means MPI, also for an error on the command line, which all ranks
    // share.
    std::optional<Options> options;
    std::exception_ptr usage_error;
    try {
      options = parse_options(argc, argv);
      if (!options) {
        flush_standard_output();
        return 0;
      }
    } catch (const std::exception&) {
      usage_error = std::current_exception();
    }
    launcher = make_launcher(options ? options->device : Device::cpu, hash_arguments(argc, argv),
                             std::chrono::seconds(options ? options->timeout_seconds : 60));
    if (usage_error) std::rethrow_exception(usage_error);
    run(*options, *launcher);
    flush_standard_output();
    return 0;
  } catch (const std::exception& error) {
    const std::string message = launcher->fail(error.what());
    if (!message.empty()) fmt::print(stderr, "helix-decode: {}\n", message);
    return 1;
  }
}
