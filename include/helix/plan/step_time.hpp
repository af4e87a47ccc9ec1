// SPDX-License-Identifier: Apache-2.0
// StepModel: how long one decode step takes, operator by operator, and what bounds each.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include <helix/export.hpp>
#include <helix/plan/collectives.hpp>
#include <helix/plan/hardware.hpp>
#include <helix/plan/layout.hpp>
#include <helix/plan/memory.hpp>
#include <helix/plan/model.hpp>
#include <helix/plan/units.hpp>
#include <helix/plan/workload.hpp>

namespace helix::plan {

/// The operators of a step, in the order in which they run.
enum class Operator : std::uint8_t {
  embedding,
  embedding_all_reduce,
  attention_norm,
  qkv_projection,  ///< MLA: both query products, the latent, and the absorption of W_UK
  rope_append,
  attention,
  kvp_exchange,  ///< Helix: the all-to-all; medha: the gather on KVP rank 0
  lse_combine,
  value_up_projection,  ///< MLA: W_UV
  output_projection,
  attention_all_reduce,
  ffn_norm,
  ffn_dispatch,  ///< Data-parallel attention: tokens to the ranks that compute them
  router,
  ffn_gate_up,
  ffn_down,
  experts_gate_up,
  experts_down,
  shared_gate_up,
  shared_down,
  ffn_all_reduce,
  ffn_collect,       ///< Data-parallel attention: results back to their sequences
  hidden_broadcast,  ///< Medha: to the KVP ranks that only attend
  pipeline_send,
  final_norm,
  lm_head,
  sample_gather,
  layer_overhead,  ///< Overheads::per_layer
  step_overhead,   ///< Overheads::per_step
  pipeline_wait    ///< What the slowest stage adds when micro-batches fill the pipeline
};
/// Name of the operator: "kvp_exchange".
HELIX_API std::string_view to_string(Operator op);

/// Which resource bounds an operator's time. Overhead: declared times exceed the rest.
enum class Bound : std::uint8_t { memory, compute, network, overhead };
/// Name of the resource: "memory".
HELIX_API std::string_view to_string(Bound bound);

/// What an operator's time is spent on: the terms in which layouts are compared.
enum class Cost : std::uint8_t {
  kv_read,
  attention_weights,
  ffn_weights,
  exchange,  ///< Across KVP, after overlap
  all_reduce,
  token_exchange,  ///< Data-parallel attention's dispatch and collect
  vocabulary,
  pipeline,
  overhead  ///< Declared times of all operators, and what is neither read nor sent
};
/// Number of costs.
inline constexpr int kNumCosts = static_cast<int>(Cost::overhead) + 1;
/// Name of the cost: "kv_read".
HELIX_API std::string_view to_string(Cost cost);

/// One operator of a step, as the slowest rank sees it.
struct OperatorTime {
  Operator op = Operator::embedding;
  bool is_moe = false;       ///< Part of MoE layers; else of dense layers or of no layer.
  bool is_windowed = false;  ///< Part of windowed layers.
  std::int64_t count = 1;    ///< Runs while a token passes through the model
  /// Bytes of one run: read and written by a rank; a collective: its size, see MeasuredCollective
  Bytes bytes{};
  Flops flops{};    ///< Flops of one run, on a rank
  Time time{};      ///< Time of one run, overhead included
  Time overhead{};  ///< Declared overhead in the time.
  Time hidden{};    ///< Part of the time that overlaps attention under HOP-B; a run adds time - hidden
  Bound bound = Bound::memory;
  Cost cost = Cost::overhead;
  CollectiveAlgorithm algorithm = CollectiveAlgorithm::none;  ///< Collectives only
  int ranks = 1;                                              ///< Ranks of the collective's group

  /// The part of the time that nothing hides, over all runs.
  Time exposed() const { return (time - hidden) * count; }
};

/// What a step costs. The sum of `by_cost` is `ttl`.
struct StepTotals {
  Time ttl{};  ///< Token-to-token latency: one step of every sequence
  std::array<Time, kNumCosts> by_cost{};
  int hop_b_slices = 1;  ///< Slices chosen for full-attention layers; if there are none, for windowed layers.
  int micro_batches = 1;   ///< Micro-batches that share the pipeline.
  std::int64_t batch = 0;  ///< Batch as asked for.
  int num_gpus = 0;

  /// Tokens of one user over time. step_tokens counts as one token: the gain of drafts depends on acceptance.
  TokenRate tokens_per_user() const { return tokens(1) / ttl; }
  /// Tokens of all users over time and GPU.
  TokenRate tokens_per_gpu() const { return tokens(1) * batch / (ttl * num_gpus); }
};

/// A step and the operators that it is made of.
struct StepReport {
  StepTotals totals{};
  /// Operators in order; dense before MoE layers, full before windowed.
  std::vector<OperatorTime> operators{};
};

/// The step-time model of one model on one machine.
///
/// A local operator takes max(bytes / bandwidth(bytes), flops / peak) + per_operator; a collective its
/// fastest algorithm + per_collective. Attention and exchange of n HOP-B slices take hop_b_time() of n
/// slices' times. With PP stages the batch is cut into min(PP, batch) micro-batches: a token passes all
/// stages and PP - 1 sends, and TTL is the larger of that and micro-batches * the slowest stage. DP replicas
/// share the batch. The slowest rank counts: the one with the most sequences and tokens.
class HELIX_API StepModel {
 public:
  /// Checks the parts. @throws Error from the check() of each, and Error(unsupported) if the hardware does
  /// not compute in the precision.
  StepModel(const Model& model, const Precision& precision, const Hardware& hardware);

  const Model& model() const { return model_; }
  const Precision& precision() const { return precision_; }
  const Hardware& hardware() const { return hardware_; }

  /// Totals of a step. No allocation, a few microseconds. The layout must be legal and the workload sound.
  StepTotals evaluate(const Layout& layout, const Workload& workload) const;

  /// Totals of a step, as evaluate(), and every operator. @throws Error(invalid_topology) with the violated
  /// rules, Error(invalid_argument) for an unsound workload.
  StepReport explain(const Layout& layout, const Workload& workload) const;

  /// Memory of the fullest rank; see plan_memory().
  RankMemoryPlan memory(const Layout& layout, const Workload& workload) const;

 private:
  Model model_;
  Precision precision_;
  Hardware hardware_;
  FlopRate product_rate_{};
  FlopRate attention_rate_{};
  /// Layers before each layer, and before the end, by kind: dense [0] or MoE [1], and of each full [0] or
  /// windowed [1].
  std::vector<std::array<std::array<std::int64_t, 2>, 2>> layers_before_{};
};

}  // namespace helix::plan
