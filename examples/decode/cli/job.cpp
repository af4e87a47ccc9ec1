// SPDX-License-Identifier: Apache-2.0
// The decisions of one process before the ranks of a job agree.
#include "cli/job.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <helix/error.hpp>
#include <helix/integers.hpp>

#include "cli/launch_cuda.hpp"
#include "cli/planning.hpp"
#include "cli/warnings.hpp"
#include "files/output_file.hpp"
#include "generate/request_plan.hpp"
#include "model/parse_config.hpp"

namespace helix::decode {
namespace {

/// Prompt tokens per step that keep a GPU's products busy: the weights are read once for all of them. Each
/// expert sees only some of the tokens, so models with experts take more: 4096 tokens through six layers of
/// DeepSeek-V2-Lite's shape take 16.6 to 18.1 ms in one step and 21.1 ms in two (H100). When serving,
/// decoding requests would have to wait for such a long step.
constexpr std::int64_t kGpuPrefillTokens = 2048;
constexpr std::int64_t kGpuExpertPrefillTokens = 4096;

/// The numbers of ranks that --topology auto may choose from: the launcher's number of processes, or else
/// --ranks, or else on GPUs any number up to the number of GPUs, and on the CPU one, because the threads of
/// one rank use the cores as well as several ranks would.
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

/// The activation type if the command line leaves it open and every rank accepts 16 bits. On GPUs it is the
/// checkpoint's type. On the CPU it is bf16 for a bf16 checkpoint, else f32.
DType preferred_activation(const Options& options, const ModelConfig& config) {
  if (options.activation) return *options.activation;
  if (options.verify) return DType::f32;
  if (options.device == Device::cuda) return config.fp8_blocks ? DType::bf16 : config.dtype;
  return config.dtype == DType::bf16 ? DType::bf16 : DType::f32;
}

/// Fills the serving limits that the command line leaves open.
ServeLimits serve_limits(ServeLimits limits, const ModelConfig& config) {
  constexpr std::int64_t kUsualContext = 8192;
  if (limits.max_tokens == 0) limits.max_tokens = std::min(kUsualContext, config.max_positions);
  if (limits.kv_tokens == 0) limits.kv_tokens = saturating_product(limits.max_sequences, limits.max_tokens);
  return limits;
}

/// Fills the sampling parameters that the command line leaves open from generation_config.json, at `path`.
/// @throws Error(invalid_file) naming the file if one of them is out of range.
void fill_sampling(const std::set<std::string>& given, const GenerationDefaults& defaults,
                   const std::string& path, GenerationRequest& request) {
  const auto fill = [&](const char* option, auto& value, const auto& of_file) {
    if (!given.contains(option)) value = of_file;
  };
  fill("--temperature", request.sampling.temperature, defaults.sampling.temperature);
  fill("--top-p", request.sampling.top_p, defaults.sampling.top_p);
  fill("--min-p", request.sampling.min_p, defaults.sampling.min_p);
  fill("--top-k", request.sampling.top_k, defaults.sampling.top_k);
  fill("--repetition-penalty", request.penalties.repetition, defaults.penalties.repetition);
  fill("--presence-penalty", request.penalties.presence, defaults.penalties.presence);
  fill("--frequency-penalty", request.penalties.frequency, defaults.penalties.frequency);
  try {  // the command line's own values have passed these checks
    check_sampling(request.sampling);
    check_penalties(request.penalties);
  } catch (const Error& error) {
    throw Error(ErrorCode::invalid_file, path, ": ", error.what());
  }
}

/// The files that a run reads, and those of the checkpoint that tokenizers read.
std::vector<NamedFile> input_files(const Options& options, const Checkpoint& checkpoint) {
  std::vector<NamedFile> files;
  for (const char* name :
       {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"}) {
    files.push_back({fmt::format("{} of --model", name), checkpoint.directory() / name});
  }
  for (const SafetensorsFile& file : checkpoint.files()) {
    const std::filesystem::path path = file.path();
    files.push_back({fmt::format("{} of --model", path.filename().string()), path});
  }
  if (!options.prompts_file.empty()) files.push_back({"--prompts", options.prompts_file});
  if (!options.teacher_file.empty()) files.push_back({"--teacher-force", options.teacher_file});
  return files;
}

}  // namespace

Job::Job(Options given, const Launcher& launcher)
    : options(std::move(given)),
      launch{.num_threads = options.num_threads,
             .show_progress = true,
             .timeout = std::chrono::seconds(options.timeout_seconds),
             .device = options.device,
             .activation = options.activation.value_or(DType::f32),
             .peer_memory = options.peer_memory,
             .gpu = launcher.gpu(),
             .num_local_ranks = launcher.num_local_ranks(),
             .rank_memory = launcher.rank_memory()},
      checkpoint(options.model),
      config(read_model_config(checkpoint)),
      defaults(parse_generation_config(checkpoint.generation_config_json(),
                                       checkpoint.generation_config_path(), options.serve)) {
  // On the CPU the memory plan is that of f32: products keep the 16-bit copies of their inputs themselves.
  if (options.device == Device::cuda) launch.activation = preferred_activation(options, config);
  if (launcher.rank() == 0 && !options.json.empty()) {
    check_replaces_none({"--json", options.json}, input_files(options, checkpoint));
    check_output(options.json);
  }
  GenerationRequest& request = options.request;
  HELIX_EXPECTS(config.shape.is_mla() || request.mla_prefill == MlaForm::automatic,
                ErrorCode::invalid_argument,
                "--mla-prefill is given, but the model has no latent attention: drop it");
  if (!defaults.eos_ids.empty()) config.eos_ids = defaults.eos_ids;
  if (options.serve) {
    request.serving = serve_limits(options.serve_limits, config);
    fill_sampling(options.given_sampling, defaults, checkpoint.generation_config_path(), request);
  }
  // Sums round differently under different topologies, so a rounded cache would differ too: --verify compares
  // with f32.
  request.kv_dtype = !options.kv_dtype_name.empty() ? *parse_dtype(options.kv_dtype_name)
                     : options.verify               ? DType::f32
                                                    : config.dtype;
  const TopologySpec spec = options.is_topology_auto
                                ? choose_topology(config, request, launch, num_ranks(options, launcher))
                                : options.topology;
  topo =
      launcher.has_processes() ? Topology(spec, config.shape, launcher.size()) : Topology(spec, config.shape);
  choose_prefill(launcher);
}

void Job::choose_prefill(const Launcher& launcher) {
  GenerationRequest& request = options.request;
  if (options.is_prefill_auto && options.device == Device::cuda) {
    for (const std::int64_t tokens : {kGpuExpertPrefillTokens, kGpuPrefillTokens}) {
      if (tokens == kGpuExpertPrefillTokens && (!config.shape.moe || options.serve)) continue;
      request.prefill_tokens = tokens;
      plan = plan_memory(checkpoint, config, *topo, request, launch);
      if (is_plan_inside_gpus(launcher)) return;
    }
    request.prefill_tokens = GenerationRequest{}.prefill_tokens;
    if (config.shape.is_mla() && request.mla_prefill == MlaForm::automatic) {
      plan = plan_memory(checkpoint, config, *topo, request, launch);
      if (is_plan_inside_gpus(launcher)) return;
      request.mla_prefill = MlaForm::absorbed;
    }
  }
  plan = plan_memory(checkpoint, config, *topo, request, launch);
}

void Job::set_activation(DType activation) {
  if (activation == launch.activation) return;
  launch.activation = activation;
  if (options.device == Device::cuda) plan = plan_memory(checkpoint, config, *topo, options.request, launch);
}

PromptRoom Job::room() const {
  return {.tokens = options.request.prefill_tokens,
          .can_expand = options.request.mla_prefill != MlaForm::absorbed};
}

void Job::set_room(const PromptRoom& agreed) {
  if (!options.is_prefill_auto || agreed == room()) return;
  options.request.prefill_tokens = agreed.tokens;
  if (!agreed.can_expand) options.request.mla_prefill = MlaForm::absorbed;
  plan = plan_memory(checkpoint, config, *topo, options.request, launch);
}

bool Job::is_plan_inside_gpus(const Launcher& launcher) const {
  constexpr double kUsable = 0.9;  // the rest is for the runtime, communicators and fragmentation
  // GPU of each rank. With one process per rank, each rank has a GPU of its own, like the one of this
  // process.
  std::vector<int> gpus(plan.size());
  std::iota(gpus.begin(), gpus.end(), 0);
  if (!launcher.has_processes()) gpus = rank_gpus(*topo, launch);
  return std::ranges::all_of(gpu_bytes(plan, gpus), [&](const auto& need) {
    const int gpu = launcher.has_processes() ? launch.gpu : need.first;
    return static_cast<double>(need.second) <= kUsable * static_cast<double>(gpu_memory(gpu).total);
  });
}

JobFields Job::fields(const std::string& processor) const {
  JobFields fields;
  add_fields(fields, launch);
  add_fields(fields, checkpoint);
  add_fields(fields, topo->spec());
  GenerationRequest given = options.request;
  if (options.is_mla_prefill_auto) given.mla_prefill = MlaForm::automatic;
  add_fields(fields, given);
  if (options.is_prefill_auto) std::ranges::find(fields, "--prefill-tokens", &JobField::name)->value = "auto";
  add_fields(fields, options);
  fields.push_back({"eos_token_id", fmt::format("{}", fmt::join(config.eos_ids, ", "))});
  // Each rank chooses experts for itself. Another order of sums would at times choose others.
  if (config.shape.num_experts() > 0) fields.push_back({"kernels for", processor});
  return fields;
}

DType choose_activation(const Job& job, const JobAgreement& agreement) {
  if (job.options.activation) return *job.options.activation;
  return agreement.accepts_bf16 ? preferred_activation(job.options, job.config) : DType::f32;
}

}  // namespace helix::decode
