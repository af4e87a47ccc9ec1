// SPDX-License-Identifier: Apache-2.0
// --topology auto.
#include "cli/planning.hpp"

#include <algorithm>
#include <cstdlib>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <helix/error.hpp>
#include <helix/limits.hpp>
#include <helix/plan/hardware.hpp>
#include <helix/plan/search.hpp>

#include "cli/machine.hpp"
#include "model/planner_model.hpp"

namespace helix::decode {
namespace {

double bits(DType type) {
  return 8.0 * static_cast<double>(size_bytes(type));
}

/// The CPU's speeds are assumptions of the magnitude of those in docs/measurements/cpu.md. They are good
/// enough to rank topologies, but predict no time.
plan::Hardware host_hardware(double rank_memory, int num_ranks) {
  plan::Hardware host;
  host.name = "this machine's CPU";
  host.source = "memory as installed, shared by the ranks; speeds assumed";
  host.memory = plan::bytes(rank_memory);
  host.read = plan::BandwidthCurve(plan::gigabytes_per_second(16));
  host.peaks = {{64, plan::teraflops_per_second(0.24)}};
  host.nvlink_domain = num_ranks;
  host.inside = {plan::microseconds(5), plan::gigabytes_per_second(8)};
  host.outside = host.inside;
  return host;
}

plan::Hardware gpu_hardware() {
  plan::Hardware gpu = plan::hardware_preset("h200");
  gpu.peaks.push_back({32, plan::teraflops_per_second(67)});  // f32 activations; vendor's figure
  return gpu;
}

/// The number of ranks nearest to `wanted` that has a legal topology of one replica: N * PP.
std::int64_t nearest_legal(const ModelShape& shape, std::int64_t wanted) {
  const auto distance = [&](std::int64_t ranks) { return std::abs(ranks - wanted); };
  std::int64_t nearest = 1;
  // The ranks of a stage divide the query heads.
  const std::int64_t largest = std::min(shape.num_query_heads, kMaxRanks);
  for (std::int64_t stage_size = 1; stage_size <= largest; ++stage_size) {
    if (Topology::legal_topologies(shape, static_cast<int>(stage_size)).empty()) continue;
    const std::int64_t most_stages = std::min(shape.num_layers, kMaxRanks / stage_size);
    for (const std::int64_t stages : {wanted / stage_size, wanted / stage_size + 1}) {
      const std::int64_t ranks = stage_size * std::clamp<std::int64_t>(stages, 1, most_stages);
      if (distance(ranks) < distance(nearest)) nearest = ranks;
    }
  }
  return nearest;
}

/// Checks that one of `num_ranks` has a legal topology. The planner's own message speaks of GPUs and of
/// choices that this program does not offer.
void expect_legal(const ModelShape& shape, const std::vector<int>& num_ranks) {
  if (std::ranges::any_of(num_ranks, [&](int ranks) { return nearest_legal(shape, ranks) == ranks; })) return;
  throw Error(ErrorCode::invalid_topology, "no topology of ", fmt::format("{}", fmt::join(num_ranks, " or ")),
              " ranks is legal for this model; the nearest number that has one is ",
              nearest_legal(shape, num_ranks.front()));
}

}  // namespace

TopologySpec choose_topology(const ModelConfig& config, const GenerationRequest& request,
                             const LaunchOptions& launch, const std::vector<int>& num_ranks) {
  expect_legal(config.shape, num_ranks);
  const int most_ranks = *std::ranges::max_element(num_ranks);
  // Block-scaled fp8 weights are widened to f32 as they are read.
  const plan::Precision precision{.weight_bits = config.fp8_blocks ? 32.0 : bits(config.dtype),
                                  .kv_bits = plan::kv_element_bits(config.shape, request.kv_dtype),
                                  .activation_bits = bits(launch.activation)};
  const double rank_memory = launch.rank_memory > 0 ? static_cast<double>(launch.rank_memory)
                                                    : static_cast<double>(host_memory()) / most_ranks;
  const plan::StepModel model(
      planner_model(config), precision,
      launch.device == Device::cuda ? gpu_hardware() : host_hardware(rank_memory, most_ranks));
  plan::Workload workload;
  workload.batch = std::max<std::int64_t>(1, request.num_sequences());
  workload.step_tokens = request.draft_tokens;
  workload.chunk = request.chunk;
  workload.page_tokens = request.page_tokens;
  std::int64_t longest = request.draft_tokens;
  for (std::int64_t sequence = 0; sequence < request.num_sequences(); ++sequence) {
    longest = std::max(longest, request.longest_length(sequence));
  }
  if (request.serving) {
    workload.batch = request.serving->max_sequences;
    longest = request.serving->max_tokens;
  }
  workload.context = plan::tokens(static_cast<double>(longest));
  plan::SearchSpace space;
  space.max_gpus = most_ranks;
  space.gpu_counts = num_ranks;
  space.batches = {workload.batch};
  space.strategies = {plan::Strategy::helix};
  for (int stages = 1; stages <= most_ranks; ++stages) space.pipeline_stages.push_back(stages);
  space.objective = plan::Objective::latency;
  const plan::SearchResult found = plan::search_or_throw(model, workload, space);
  return found.candidates[*found.best].layout.topology_spec();
}

}  // namespace helix::decode
