// SPDX-License-Identifier: Apache-2.0
// Search over layouts and batches, and the Pareto frontier.
#include <algorithm>
#include <numeric>
#include <string>

#include <helix/error.hpp>
#include <helix/limits.hpp>
#include <helix/plan/search.hpp>

#include "plan/search_walk.hpp"

namespace helix::plan {
namespace {

/// Throws because no layout of the space is legal for any batch. Names the numbers of GPUs that were asked
/// for, and the nearest other one that has a layout.
[[noreturn]] void throw_illegal(const StepModel& model, const Workload& workload, const SearchSpace& space) {
  const std::vector<int>& asked = space.gpu_counts;
  std::vector<int> others;
  if (asked.empty()) {  // only larger powers of two: those up to max_gpus were tried
    for (int gpus = 1; gpus <= kMaxRanks; gpus *= 2) {
      if (gpus > space.max_gpus) others.push_back(gpus);
    }
  } else {
    constexpr int kNear = 64;  // bounds the work
    const int most = *std::max_element(asked.begin(), asked.end());
    for (int distance = 1; distance <= kNear; ++distance) {
      if (most > distance) others.push_back(most - distance);
      if (most + distance <= kMaxRanks) others.push_back(most + distance);
    }
  }
  const auto is_legal_on = [&](int gpus) {
    SearchSpace probe = space;
    probe.max_gpus = gpus;
    probe.gpu_counts = {gpus};
    probe.batches = {1};
    bool is_legal = false;
    detail::for_each_configuration(model.model(), workload, probe,
                                   [&](const Layout&, const Workload&) { is_legal = true; });
    return is_legal;
  };
  const auto nearest = std::find_if(others.begin(), others.end(), is_legal_on);
  const std::string where = asked.size() == 1 ? std::to_string(asked.front())
                                              : (asked.empty() ? "powers of two" : "any number asked for") +
                                                    std::string(" up to ") + std::to_string(space.max_gpus);
  throw Error(ErrorCode::invalid_topology, "no layout of ", model.model().name, " is legal on ", where,
              " GPUs with the strategies and widths asked for: ",
              nearest != others.end() ? "the nearest number that has one is " + std::to_string(*nearest)
                                      : "no number near has one; ask for other strategies or stages");
}

}  // namespace

void SearchSpace::check() const {
  HELIX_EXPECTS(max_gpus >= 1 && max_gpus <= kMaxRanks, ErrorCode::invalid_argument, "max_gpus is ", max_gpus,
                "; it must be in [1, ", kMaxRanks, "]");
  for (const int gpus : gpu_counts) {
    HELIX_EXPECTS(gpus >= 1 && gpus <= max_gpus, ErrorCode::invalid_argument, "gpu_counts has ", gpus,
                  "; it must be in [1, max_gpus = ", max_gpus, "]");
  }
  HELIX_EXPECTS(max_batch >= 1 && max_batch <= kMaxWorkloadCount, ErrorCode::invalid_argument,
                "max_batch is ", max_batch, "; it must be in [1, ", kMaxWorkloadCount, "]");
  for (const std::int64_t batch : batches) {
    HELIX_EXPECTS(batch >= 1 && batch <= kMaxWorkloadCount, ErrorCode::invalid_argument, "batches has ",
                  batch, "; it must be in [1, ", kMaxWorkloadCount, "]");
  }
  for (const Strategy strategy : strategies) {
    HELIX_EXPECTS(to_string(strategy) != "unknown", ErrorCode::invalid_argument, "strategies has ",
                  static_cast<int>(strategy), "; it must name a strategy");
  }
  for (const int stages : pipeline_stages) {
    HELIX_EXPECTS(stages >= 1 && stages <= kMaxRanks, ErrorCode::invalid_argument, "pipeline_stages has ",
                  stages, "; it must be in [1, ", kMaxRanks, "]");
  }
  for (const int slices : hop_b_slices) {
    HELIX_EXPECTS(slices >= 0, ErrorCode::invalid_argument, "hop_b_slices has ", slices,
                  "; it must be 0 (the fastest), 1 (off) or more");
  }
  if (ttl_limit) {
    HELIX_EXPECTS(*ttl_limit > Time{}, ErrorCode::invalid_argument, "ttl_limit is ",
                  in_milliseconds(*ttl_limit), " ms; it must be positive");
  }
}

SearchResult search(const StepModel& model, const Workload& workload, const SearchSpace& space) {
  SearchResult result;
  result.least_memory = Bytes::unlimited();
  detail::for_each_configuration(model.model(), workload, space,
                                 [&](const Layout& layout, const Workload& load) {
                                   ++result.counts.evaluated;
                                   const RankMemoryPlan memory = model.memory(layout, load);
                                   result.least_memory = std::min(result.least_memory, memory.total());
                                   if (memory.total() > model.hardware().usable_memory()) {
                                     ++result.counts.out_of_memory;
                                     return;
                                   }
                                   const StepTotals totals = model.evaluate(layout, load);
                                   if (space.ttl_limit && totals.ttl > *space.ttl_limit) {
                                     ++result.counts.over_ttl;
                                     return;
                                   }
                                   result.candidates.push_back({layout, totals, memory});
                                 });
  for (std::size_t i = 0; i < result.candidates.size(); ++i) {
    if (!result.best || detail::is_better(space.objective, result.candidates[i].totals,
                                          result.candidates[*result.best].totals)) {
      result.best = i;
    }
  }
  result.frontier = pareto_frontier(result.candidates);
  return result;
}

SearchResult search_or_throw(const StepModel& model, const Workload& workload, const SearchSpace& space) {
  SearchResult result = search(model, workload, space);
  if (result.best) return result;
  const SearchCounts& counts = result.counts;
  if (counts.evaluated == 0) throw_illegal(model, workload, space);
  HELIX_EXPECTS(counts.over_ttl > 0, ErrorCode::capacity, "none of ", counts.evaluated, " configurations of ",
                model.model().name, " fits on up to ", space.max_gpus,
                " GPUs: the one that needs least needs ", in_gigabytes(result.least_memory), " GB a GPU, ",
                model.hardware().name, " has ", in_gigabytes(model.hardware().usable_memory()),
                " usable; use more GPUs, a smaller batch or context, or fewer bits");
  SearchSpace without_limit = space;
  without_limit.ttl_limit.reset();
  without_limit.objective = Objective::latency;
  const SearchResult all = search(model, workload, without_limit);
  throw Error(ErrorCode::capacity, "none of the ", all.candidates.size(), " configurations of ",
              model.model().name, " that fit meets the limit of ", in_milliseconds(*space.ttl_limit),
              " ms: the fastest, ", all.candidates[*all.best].layout.to_string(), ", takes ",
              in_milliseconds(all.candidates[*all.best].totals.ttl), " ms");
}

std::vector<std::size_t> pareto_frontier(const std::vector<Candidate>& candidates) {
  std::vector<std::size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const StepTotals& x = candidates[a].totals;
    const StepTotals& y = candidates[b].totals;
    if (x.tokens_per_user() != y.tokens_per_user()) return x.tokens_per_user() > y.tokens_per_user();
    if (x.tokens_per_gpu() != y.tokens_per_gpu()) return x.tokens_per_gpu() > y.tokens_per_gpu();
    return a < b;
  });
  // In order from the fastest, keeps only what yields more per GPU than everything before it.
  std::vector<std::size_t> frontier;
  for (const std::size_t i : order) {
    if (frontier.empty() ||
        candidates[i].totals.tokens_per_gpu() > candidates[frontier.back()].totals.tokens_per_gpu()) {
      frontier.push_back(i);
    }
  }
  std::reverse(frontier.begin(), frontier.end());
  return frontier;
}

}  // namespace helix::plan
