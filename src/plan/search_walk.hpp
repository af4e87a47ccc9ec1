// SPDX-License-Identifier: Apache-2.0
// Iterates over a search space, for the search and for its explanation.
#pragma once

#include <cstdint>
#include <vector>

#include <helix/error.hpp>
#include <helix/plan/search.hpp>

namespace helix::plan::detail {

inline std::vector<std::int64_t> powers_of_two(std::int64_t last) {
  std::vector<std::int64_t> powers;
  for (std::int64_t power = 1; power <= last; power *= 2) powers.push_back(power);
  return powers;
}

/// Calls `visit(layout, workload)` for each configuration of the space, without regard to memory and time.
/// @throws what SearchSpace::check() and Workload::check() throw.
template <class Visit>
void for_each_configuration(const Model& model, const Workload& workload, const SearchSpace& space,
                            Visit&& visit) {
  space.check();
  workload.check();
  std::vector<std::int64_t> gpu_counts(space.gpu_counts.begin(), space.gpu_counts.end());
  if (gpu_counts.empty()) gpu_counts = powers_of_two(space.max_gpus);
  std::vector<std::int64_t> batches = space.batches;
  if (batches.empty()) batches = powers_of_two(space.max_batch);
  std::vector<Strategy> strategies = space.strategies;
  if (strategies.empty()) {
    strategies = {Strategy::helix, Strategy::tensor_parallel, Strategy::data_parallel_attention,
                  Strategy::medha};
  }
  std::vector<int> slice_counts = space.hop_b_slices;
  if (slice_counts.empty()) slice_counts = {0};

  Workload load = workload;
  for (const std::int64_t gpus : gpu_counts) {
    std::vector<std::int64_t> stage_counts(space.pipeline_stages.begin(), space.pipeline_stages.end());
    if (stage_counts.empty()) stage_counts = powers_of_two(gpus);
    for (const std::int64_t stages : stage_counts) {
      if (gpus % stages != 0 || stages > model.shape.num_layers) continue;
      for (const Strategy strategy : strategies) {
        for (Layout layout :
             legal_layouts(strategy, model, static_cast<int>(gpus / stages), space.medha_may_duplicate_kv)) {
          layout.pp = static_cast<int>(stages);
          layout.dp = space.has_replicas ? space.max_gpus / static_cast<int>(gpus) : 1;
          const bool overlaps = layout.hop_b_slices == 0;
          for (const int slices : slice_counts) {
            if (overlaps) layout.hop_b_slices = slices;
            for (const std::int64_t batch : batches) {
              load.batch = batch;
              visit(layout, load);
            }
            if (!overlaps) break;  // nothing to slice
          }
        }
      }
    }
  }
}

/// Whether `a` meets `objective` better than `b`.
inline bool is_better(Objective objective, const StepTotals& a, const StepTotals& b) {
  const bool is_faster = a.ttl < b.ttl;
  const bool gives_more = a.tokens_per_gpu() > b.tokens_per_gpu();
  if (objective == Objective::latency) return is_faster || (a.ttl == b.ttl && gives_more);
  return gives_more || (a.tokens_per_gpu() == b.tokens_per_gpu() && is_faster);
}

}  // namespace helix::plan::detail
