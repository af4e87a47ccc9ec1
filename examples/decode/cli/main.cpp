// SPDX-License-Identifier: Apache-2.0
// helix-decode: a Llama or DeepSeek checkpoint under a Helix topology, on rank threads or one process a rank.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/tuning.hpp>
#include <helix/error.hpp>

#include "checkpoint/checkpoint.hpp"
#include "checkpoint/mapped_file.hpp"
#include "checkpoint/output_file.hpp"
#include "cli/launch.hpp"
#include "cli/launch_cuda.hpp"
#include "cli/nccl_environment.hpp"
#include "cli/options.hpp"
#include "cli/planning.hpp"
#include "cli/report.hpp"
#include "cli/warnings.hpp"
#include "model/parse_config.hpp"

namespace helix::decode {
namespace {

/// Prompt tokens a step that keep a GPU's products busy: weights are read once for all of them.
constexpr std::int64_t kGpuPrefillTokens = 2048;

/// How many ranks --topology auto may take: the launcher's processes, else --ranks, else on GPUs any number
/// up to theirs, on the CPU one, whose threads share its cores as well as several ranks would.
std::vector<int> num_ranks(const Options& options, const Launcher& launcher) {
  if (launcher.has_processes()) {
    HELIX_EXPECTS(options.num_ranks == 0 || options.num_ranks == launcher.size(), ErrorCode::invalid_argument,
                  "--ranks is ", options.num_ranks, " but the launcher started ", launcher.size(),
                  " processes: drop --ranks");
    return {launcher.size()};
  }
  if (options.num_ranks > 0) return {options.num_ranks};
  std::vector<int> counts(
      options.device == Device::cuda ? static_cast<std::size_t>(std::max(1, visible_gpus())) : 1);
  std::iota(counts.begin(), counts.end(), 1);
  return counts;
}

/// What activations are where the command line leaves it open and every rank accepts 16 bits: on GPUs what
/// the checkpoint was made in, on the CPU what of that it multiplies.
DType widest_choice(const Options& options, const ModelConfig& config) {
  if (options.activation) return *options.activation;
  if (options.verify) return DType::f32;
  if (options.device == Device::cuda) return config.fp8_blocks ? DType::bf16 : config.dtype;
  return config.dtype == DType::bf16 ? DType::bf16 : DType::f32;
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
  if (request.synthetic_context == 0)
    fmt::print("prefill: at most {} prompt tokens a step\n", request.prefill_tokens);
  flush_standard_output();
}

/// What is known of a job once its checkpoint is open.
struct Job {
  Options options;
  LaunchOptions launch;
  Checkpoint checkpoint;
  ModelConfig config;
  std::optional<Topology> topo;
  std::vector<RankMemory> plan;

  Job(Options given, const Launcher& launcher)
      : options(std::move(given)),
        launch{.num_threads = options.num_threads,
               .show_progress = true,
               .timeout = std::chrono::seconds(options.timeout_seconds),
               .device = options.device,
               .activation = options.activation.value_or(DType::f32),
               .gpu = launcher.gpu()},
        checkpoint(options.model),
        config(parse_model_config(checkpoint.config_json(), checkpoint.config_path())) {
    // The CPU's plan is that of f32: its products keep what they round to themselves.
    if (options.device == Device::cuda) launch.activation = widest_choice(options, config);
    if (launcher.rank() == 0 && !options.json.empty()) check_output(options.json);
    GenerationRequest& request = options.request;
    request.kv_dtype = options.kv_dtype_name.empty() ? config.dtype : *parse_dtype(options.kv_dtype_name);
    const TopologySpec spec = options.is_topology_auto
                                  ? choose_topology(config, request, launch, num_ranks(options, launcher))
                                  : options.topology;
    topo = launcher.has_processes() ? Topology(spec, config.shape, launcher.size())
                                    : Topology(spec, config.shape);
    if (options.is_prefill_auto && options.device == Device::cuda) {
      request.prefill_tokens = kGpuPrefillTokens;
      plan = plan_memory(checkpoint, config, *topo, request, launch);
      if (is_plan_inside_gpus(launcher)) return;
      request.prefill_tokens = GenerationRequest{}.prefill_tokens;
    }
    plan = plan_memory(checkpoint, config, *topo, request, launch);
  }

  /// Sets what all ranks agreed upon; elements of another size make another plan.
  void set_activation(DType activation) {
    if (activation == launch.activation) return;
    launch.activation = activation;
    if (options.device == Device::cuda)
      plan = plan_memory(checkpoint, config, *topo, options.request, launch);
  }

  /// Whether each GPU's ranks leave it some memory. Of all of it, not of what is free, so that the processes
  /// of a job on equal GPUs answer alike.
  bool is_plan_inside_gpus(const Launcher& launcher) const {
    constexpr double kUsable = 0.9;      // the rest is for the runtime, communicators and fragmentation
    std::vector<int> gpus(plan.size());  // of processes each has one, like this one's
    std::iota(gpus.begin(), gpus.end(), 0);
    if (!launcher.has_processes()) gpus = rank_gpus(*topo, launch);
    return std::ranges::all_of(gpu_bytes(plan, gpus), [&](const auto& need) {
      const int gpu = launcher.has_processes() ? launch.gpu : need.first;
      return static_cast<double>(need.second) <= kUsable * static_cast<double>(gpu_memory(gpu).total);
    });
  }

  /// What all processes of the job must have been started with.
  JobFields fields() const {
    JobFields fields;
    add_fields(fields, launch);
    add_fields(fields, checkpoint);
    add_fields(fields, topo->spec());
    add_fields(fields, options.request);
    add_fields(fields, options);
    return fields;
  }
};

/// What activations are where the command line leaves it open, once it is known what all machines can do.
DType choose_activation(const Job& job, const JobAgreement& agreement) {
  if (job.options.activation) return *job.options.activation;
  return agreement.accepts_bf16 ? widest_choice(job.options, job.config) : DType::f32;
}

/// Whether this process can take 16-bit activations, and is asked for nothing that needs f32.
bool accepts_16_bit(const Options& options) {
  return !options.verify && (options.device == Device::cuda || helix::cpu::has_bf16_products());
}

void run(const Job& job, Launcher& launcher) {
  const bool is_root = launcher.rank() == 0;
  const auto& [options, launch, checkpoint, config, topo, plan] = job;
  const GenerationRequest& request = options.request;
  if (is_root) print_plan(launcher, config, *topo, request, launch, plan);
  for (const std::string& line : warnings(launcher, checkpoint, *topo, request, launch, plan))
    fmt::print(stderr, "{}\n", line);
  if (options.is_plan_only) return;

  const GenerationResult result = launcher.run(checkpoint, config, *topo, request, launch);
  if (!is_root) return;
  fmt::print("{}{}", format_result(result), format_computation(launch));
  if (!options.json.empty()) write_json(options.json, *topo, request, launch, result);
  if (options.verify) {
    const Topology one_rank(TopologySpec{}, config.shape);
    check_same_tokens(result, run_local(checkpoint, config, one_rank, request, launch));
    fmt::print("verified: {} ranks give the tokens of one rank\n", topo->world_size());
  }
}

/// Makes the launcher of the device, unless nobody needs to hear of the error that there is already.
std::unique_ptr<Launcher> find_launcher(Device device, std::chrono::seconds timeout,
                                        const std::string& error) {
  try {
    return make_launcher(device, timeout);
  } catch (const std::exception&) {
    if (error.empty()) throw;
    throw Error(ErrorCode::invalid_argument, error);
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
    // An error of one process is told to all before it ends: the others wait for this one.
    JobStatement statement;
    std::optional<Options> options;
    try {
      options = parse_options(argc, argv);
      if (!options) {
        flush_standard_output();
        return 0;
      }
    } catch (const std::exception& error) {
      statement.error = error.what();
    }
    launcher =
        find_launcher(options ? options->device : named_device(argc, argv),
                      std::chrono::seconds(options ? options->timeout_seconds : Options{}.timeout_seconds),
                      statement.error);
    std::optional<Job> job;
    if (options) {
      try {
        if (!options->tuning.empty()) helix::cpu::fix_tuning(options->tuning);
        job.emplace(std::move(*options), *launcher);
        if (launcher->has_processes())
          statement.fields = job->fields();  // which reads samples of all weights
      } catch (const std::exception& error) {
        statement.error = error.what();
      }
    }
    statement.accepts_bf16 = job && accepts_16_bit(job->options);
    const JobAgreement agreement = launcher->agree(statement);
    job->set_activation(choose_activation(*job, agreement));
    run(*job, *launcher);
    flush_standard_output();
    return 0;
  } catch (const std::exception& error) {
    const bool is_told = launcher->all_fail_alike();
    const std::string message = !is_told                ? launcher->fail(error.what())
                                : launcher->rank() == 0 ? std::string(error.what())
                                                        : std::string();
    if (!message.empty()) fmt::print(stderr, "helix-decode: {}\n", message);
    return 1;
  }
}
