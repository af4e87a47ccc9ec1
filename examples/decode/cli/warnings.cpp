// SPDX-License-Identifier: Apache-2.0
// Warnings about idle replicas, unused weights, keys that are not built, and scarce memory.
#include "cli/warnings.hpp"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <helix/error.hpp>
#include <helix/integers.hpp>

#include "cli/launch_cuda.hpp"
#include "cli/machine.hpp"
#include "cli/report.hpp"
#include "files/strict_json.hpp"
#include "model/weight_plan.hpp"

namespace helix::decode {
namespace {

std::int64_t bytes_of(const RankMemory& memory) {
  return saturating_sum(saturating_sum(memory.weights_bytes, memory.kv_bytes), memory.workspace_bytes);
}

/// Memory of the plan's first `num_ranks` ranks, without the weights used in place in the checkpoint's files.
std::int64_t own_bytes(const std::vector<RankMemory>& plan, std::size_t num_ranks) {
  std::int64_t own = 0;
  for (std::size_t rank = 0; rank < std::min(num_ranks, plan.size()); ++rank)
    own = saturating_sum(own, bytes_of(plan[rank]) - plan[rank].weights_in_place_bytes);
  return own;
}

/// Number of the plan's ranks on this machine.
std::size_t num_local_ranks(const Launcher& launcher, const std::vector<RankMemory>& plan) {
  const int local = launcher.num_local_ranks();
  return local > 0 ? static_cast<std::size_t>(local) : plan.size();
}

constexpr const char* kAdvice = "use shorter or fewer sequences, a smaller --kv-dtype or more ";

std::optional<std::string> idle_replicas(const Topology& topo, const GenerationRequest& request) {
  const std::int64_t sequences = request.num_sequences();
  if (request.serving || topo.dp() <= sequences) return std::nullopt;
  return fmt::format(
      "warning: {} of {} replicas have no sequence: --dp is {} and there {} {}; give more prompts or a "
      "smaller --dp",
      topo.dp() - sequences, topo.dp(), topo.dp(), sequences == 1 ? "is" : "are",
      sequences == 1 ? "1 sequence" : fmt::format("{} sequences", sequences));
}

std::optional<std::string> unused_weights(const ModelConfig& config, const Checkpoint& checkpoint) {
  const std::vector<std::string_view> unused = unused_tensors(config, checkpoint);
  if (unused.empty()) return std::nullopt;
  return fmt::format(
      "warning: {} of {} tensors are not used, the first of them {}: see that config.json is of this model",
      unused.size(), checkpoint.num_tensors(), printable(unused.front()));
}

std::optional<std::string> unread_rope_keys(const ModelConfig& config, const Checkpoint& checkpoint) {
  const std::vector<std::string>& keys = config.unread_rope_keys;
  if (keys.empty()) return std::nullopt;
  return fmt::format(
      "warning: {}: the rope does not take {} of its keys, the first of them {}: see that it is "
      "spelled as in transformers",
      one_line(checkpoint.config_path()), keys.size(), printable(keys.front()));
}

std::optional<std::string> unread_attention_keys(const ModelConfig& config, const Checkpoint& checkpoint) {
  const std::vector<std::string>& keys = config.unread_attention_keys;
  if (keys.empty()) return std::nullopt;
  return fmt::format("warning: {}: {} attends to all tokens and takes no {}: see that model_type is right",
                     one_line(checkpoint.config_path()), config.model_type, fmt::join(keys, ", "));
}

std::optional<std::string> unknown_eos_ids(const ModelConfig& config, const GenerationDefaults& defaults,
                                           const Checkpoint& checkpoint) {
  const std::int64_t vocab = config.shape.vocab;
  const auto unknown = std::ranges::find_if(config.eos_ids, [&](std::int64_t id) { return id >= vocab; });
  if (unknown == config.eos_ids.end()) return std::nullopt;
  return fmt::format(
      "warning: {}: eos_token_id {} is outside the vocabulary of {}: no sequence ends with it",
      one_line(defaults.eos_ids.empty() ? checkpoint.config_path() : checkpoint.generation_config_path()),
      *unknown, vocab);
}

std::optional<std::string> unheeded_keys(const GenerationDefaults& defaults, const Checkpoint& checkpoint) {
  if (defaults.unheeded.empty()) return std::nullopt;
  return fmt::format("warning: {} asks for {}, which is not built: texts may differ from transformers'",
                     one_line(checkpoint.generation_config_path()), fmt::join(defaults.unheeded, ", "));
}

/// transformers applies the penalty even without sampling, and refuses one that is not positive.
std::optional<std::string> unheeded_penalty(const GenerationDefaults& defaults, const Checkpoint& checkpoint,
                                            const GenerationRequest& request) {
  const float asked = defaults.penalties.repetition;
  if (request.serving || request.penalties.repetition != 1.0f || asked == 1.0f || asked <= 0.0f)
    return std::nullopt;
  return fmt::format(
      "warning: {} asks for a repetition_penalty of {}, which only requests of --serve take from there: give "
      "--repetition-penalty {} for transformers' texts",
      one_line(checkpoint.generation_config_path()), asked, asked);
}

std::optional<std::string> short_gpu(int gpu, std::int64_t needed) {
  const std::int64_t free = gpu_memory(gpu).free;
  if (needed <= free) return std::nullopt;
  return fmt::format("warning: the plan takes {} of GPU {}, of which {} are free: {}GPUs",
                     format_bytes(needed), gpu, format_bytes(free), kAdvice);
}

}  // namespace

std::int64_t host_bytes(const std::vector<RankMemory>& plan, std::size_t num_ranks,
                        const Checkpoint& checkpoint) {
  std::int64_t in_place = 0;
  for (std::size_t rank = 0; rank < std::min(num_ranks, plan.size()); ++rank)
    in_place = saturating_sum(in_place, plan[rank].weights_in_place_bytes);
  std::int64_t files = 0;
  for (const SafetensorsFile& file : checkpoint.files())
    files = saturating_sum(files, static_cast<std::int64_t>(file.size()));
  return saturating_sum(own_bytes(plan, num_ranks), std::min(in_place, files));
}

std::map<int, std::int64_t> gpu_bytes(const std::vector<RankMemory>& plan, const std::vector<int>& gpus) {
  std::map<int, std::int64_t> bytes;
  for (std::size_t rank = 0; rank < plan.size(); ++rank) {
    std::int64_t& sum = bytes[gpus[rank]];
    sum = saturating_sum(sum, bytes_of(plan[rank]));
  }
  return bytes;
}

std::vector<std::string> warnings(const Launcher& launcher, const Checkpoint& checkpoint,
                                  const ModelConfig& config, const GenerationDefaults& defaults,
                                  const Topology& topo, const GenerationRequest& request,
                                  const LaunchOptions& launch, const std::vector<RankMemory>& plan) {
  std::vector<std::string> lines;
  const auto add = [&](const std::optional<std::string>& line) {
    if (line) lines.push_back(*line);
  };
  const bool is_root = launcher.rank() == 0;
  if (is_root) {
    add(idle_replicas(topo, request));
    add(unused_weights(config, checkpoint));
    add(unread_rope_keys(config, checkpoint));
    add(unread_attention_keys(config, checkpoint));
    add(unknown_eos_ids(config, defaults, checkpoint));
    add(unheeded_keys(defaults, checkpoint));
    add(unheeded_penalty(defaults, checkpoint, request));
  }
  if (launch.device == Device::cuda) {
    if (launcher.has_processes()) {
      add(short_gpu(launch.gpu, bytes_of(plan[static_cast<std::size_t>(launcher.rank())])));
      return lines;
    }
    for (const auto& [gpu, needed] : gpu_bytes(plan, rank_gpus(topo, launch))) add(short_gpu(gpu, needed));
    return lines;
  }
  if (!is_root) return lines;
  const std::int64_t needed = host_bytes(plan, num_local_ranks(launcher, plan), checkpoint);
  const std::optional<std::int64_t> available = machine_memory("MemAvailable:");
  if (available && needed > *available) {
    add(fmt::format(
        "warning: the plan takes {} of this machine's memory, of which {} are available: {}machines",
        format_bytes(needed), format_bytes(*available), kAdvice));
  }
  return lines;
}

void expect_memory(const Launcher& launcher, const LaunchOptions& launch,
                   const std::vector<RankMemory>& plan) {
  if (launch.device == Device::cuda || launcher.rank() != 0) return;
  const std::int64_t needed = own_bytes(plan, num_local_ranks(launcher, plan));
  const std::optional<std::int64_t> all = machine_memory("MemTotal:");
  HELIX_EXPECTS(!all || needed <= *all, ErrorCode::capacity, "the plan takes ", format_bytes(needed),
                " of this machine's memory, of which it, or its container, gives ", format_bytes(*all), ": ",
                kAdvice, "machines");
}

}  // namespace helix::decode
