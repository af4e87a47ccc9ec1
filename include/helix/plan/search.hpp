// SPDX-License-Identifier: Apache-2.0
// Search: every legal layout and batch on up to a number of GPUs, the Pareto frontier, and why others lost.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <helix/export.hpp>
#include <helix/plan/step_time.hpp>

namespace helix::plan {

/// What the best configuration optimises.
enum class Objective : std::uint8_t {
  latency,    ///< Least TTL; then most tokens/s/GPU
  throughput  ///< Most tokens/s/GPU; then least TTL
};

/// What to search. Empty lists mean the defaults named.
struct HELIX_API SearchSpace {
  int max_gpus = 8;
  std::vector<int> gpu_counts{};        ///< GPUs of a replica; default: powers of two up to max_gpus
  std::vector<std::int64_t> batches{};  ///< Default: powers of two up to max_batch
  std::int64_t max_batch = 1024;
  std::vector<Strategy> strategies{};   ///< Default: all
  std::vector<int> pipeline_stages{};   ///< Default: powers of two that divide the GPUs
  std::vector<int> hop_b_slices{};      ///< Slices of helix with KVP > 1; default: {0}.
  bool medha_may_duplicate_kv = false;  ///< See legal_layouts()
  bool has_replicas = false;            ///< Fills max_gpus with DP replicas of each layout
  std::optional<Time> ttl_limit{};
  Objective objective = Objective::throughput;

  /// Checks the space. @throws Error(invalid_argument) naming what is out of range.
  void check() const;
};

/// One configuration that fits into memory and meets the TTL limit.
struct Candidate {
  Layout layout{};
  StepTotals totals{};
  RankMemoryPlan memory{};
};

/// Numbers of configurations, by what became of them.
struct SearchCounts {
  std::int64_t evaluated = 0;
  std::int64_t out_of_memory = 0;
  std::int64_t over_ttl = 0;
};

/// What a search found.
struct SearchResult {
  std::vector<Candidate> candidates{};
  std::vector<std::size_t> frontier{};  ///< Indices of candidates, by tokens/s/user, the slowest first
  std::optional<std::size_t> best{};    ///< Index of a candidate, by the objective
  SearchCounts counts{};
  /// Memory of the fullest rank of the configuration that needs the least; for messages.
  Bytes least_memory{};
};

/// Evaluates the whole space. `workload.batch` is replaced by each batch.
/// @throws Error(invalid_argument) for an unsound space or workload.
HELIX_API SearchResult search(const StepModel& model, const Workload& workload, const SearchSpace& space);

/// Runs search() and requires an answer. @throws Error(capacity) if nothing fits into memory or meets the
/// limit, saying which and by how much; Error(invalid_topology) if no layout is legal, naming the nearest
/// number of GPUs that has one.
HELIX_API SearchResult search_or_throw(const StepModel& model, const Workload& workload,
                                       const SearchSpace& space);

/// Indices of the points that no other point beats or equals in both values (of equal points the first), by
/// tokens/s/user.
HELIX_API std::vector<std::size_t> pareto_frontier(const std::vector<Candidate>& candidates);

/// Why one configuration is not the answer.
enum class LossReason : std::uint8_t {
  memory,         ///< It does not fit
  ttl,            ///< It fits, but its TTL is over the limit
  slower,         ///< Its TTL is longer
  fewer_per_gpu,  ///< It gives fewer tokens/s/GPU
  equal           ///< It is as good, and was found later
};
/// Name of the reason: "fewer_per_gpu".
HELIX_API std::string_view to_string(LossReason reason);

/// A configuration other than the winner, and why it lost.
struct Loss {
  Layout layout{};
  std::int64_t batch = 0;
  LossReason reason = LossReason::slower;
  Cost cost = Cost::kv_read;  ///< The cost that exceeds the winner's most
  Time excess{};              ///< Excess of that cost: time of a step; for fewer_per_gpu of a GPU and token
  RankMemoryPlan memory{};
  StepTotals totals{};  ///< Totals, also if it does not fit
  std::string text{};   ///< The loss in a sentence.
};

/// For each strategy of the space, and separately for HOP-B off: the best configuration by the objective
/// other than the winner, and why it lost. If none meets the limit it is the fastest; if none fits, the one
/// that needs the least memory. Empty without a winner.
HELIX_API std::vector<Loss> explain_losses(const StepModel& model, const Workload& workload,
                                           const SearchSpace& space, const SearchResult& result);

}  // namespace helix::plan
