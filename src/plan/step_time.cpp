// SPDX-License-Identifier: Apache-2.0
// StepModel: totals and lists of a step's operators, and the pipeline.
#include <algorithm>
#include <sstream>

#include <helix/error.hpp>
#include <helix/plan/step_time.hpp>

#include "plan/rank_elements.hpp"
#include "plan/step.hpp"

namespace helix::plan {
namespace {

/// Keeps only sums, which is all that evaluate() needs.
struct SumSink {
  Time time;
  std::array<Time, kNumCosts> by_cost{};

  void operator()(const OperatorTime& op) {
    const Time exposed = op.exposed();
    const Time overhead = std::min(op.overhead * op.count, exposed);
    time += exposed;
    by_cost[static_cast<std::size_t>(op.cost)] += exposed - overhead;
    by_cost[static_cast<std::size_t>(Cost::overhead)] += overhead;
  }
  void add(const SumSink& other, std::int64_t count) {
    time += other.time * count;
    for (std::size_t i = 0; i < by_cost.size(); ++i) by_cost[i] += other.by_cost[i] * count;
  }
};

/// Keeps the operators, with where they run and how often.
struct ListSink {
  std::vector<OperatorTime>& operators;
  bool is_moe = false;
  bool is_windowed = false;
  std::int64_t count = 1;

  void operator()(OperatorTime op) {
    op.is_moe = is_moe;
    op.is_windowed = is_windowed;
    op.count *= count;
    operators.push_back(op);
  }
};

constexpr std::size_t index(Cost cost) {
  return static_cast<std::size_t>(cost);
}

/// Operand width for elements of `stored` bits. Their scales add up to an eighth, as for nvfp4 (4.5 bits) and
/// mxfp4 (4.25).
double operand_bits(double stored) {
  for (const double width : {4.0, 8.0, 16.0, 32.0})
    if (stored >= width && stored <= width * 1.125) return width;
  return stored;
}

}  // namespace

StepModel::StepModel(const Model& model, const Precision& precision, const Hardware& hardware)
    : model_(model), precision_(precision), hardware_(hardware) {
  model_.check();
  precision_.check();
  hardware_.check();
  product_rate_ = hardware_.peak(operand_bits(std::max(precision_.weight_bits, precision_.activation_bits)));
  attention_rate_ = hardware_.peak(operand_bits(std::max(precision_.kv_bits, precision_.activation_bits)));
  layers_before_ = detail::count_layers_before(model_);
}

StepTotals StepModel::evaluate(const Layout& layout, const Workload& workload) const {
  detail::Step step(*this, product_rate_, attention_rate_, layout, workload);
  StepTotals totals;
  totals.batch = workload.batch;
  totals.num_gpus = layout.num_gpus();
  totals.micro_batches = static_cast<int>(step.batch().micro_batches);

  const detail::LayerCounts& all = layers_before_.back();
  const bool has_full_layers = all[0][0] + all[1][0] > 0;
  std::array<std::array<SumSink, 2>, 2> layer{};
  SumSink sum;
  for (const int is_moe : {0, 1}) {
    for (const int is_windowed : {0, 1}) {
      const auto moe = static_cast<std::size_t>(is_moe);
      const auto windowed = static_cast<std::size_t>(is_windowed);
      if (all[moe][windowed] == 0) continue;
      step.layer(layer[moe][windowed], is_moe == 1, is_windowed == 1);
      sum.add(layer[moe][windowed], all[moe][windowed]);
      if (is_windowed == 0 || !has_full_layers) totals.hop_b_slices = step.hop_b_slices();
    }
  }
  SumSink first;
  SumSink last;
  step.first(first);
  step.last(last);
  sum.add(first, 1);
  sum.add(last, 1);
  step.sends(sum);
  if (hardware_.overheads.per_step > Time{}) {
    sum(step.declared(Operator::step_overhead, hardware_.overheads.per_step));
  }
  totals.ttl = sum.time;
  totals.by_cost = sum.by_cost;
  if (layout.pp == 1) return totals;

  Time slowest;
  for (int stage = 0; stage < layout.pp; ++stage) {
    const detail::LayerCounts counts =
        detail::count_layers(layers_before_, split_evenly(model_.shape.num_layers, layout.pp, stage));
    Time time = stage == 0 ? first.time : Time{};
    if (stage == layout.pp - 1) time += last.time;
    for (const std::size_t moe : {0u, 1u}) {
      for (const std::size_t windowed : {0u, 1u}) time += layer[moe][windowed].time * counts[moe][windowed];
    }
    slowest = std::max(slowest, time);
  }
  const Time full_pipeline = slowest * totals.micro_batches;
  if (full_pipeline > totals.ttl) {
    totals.by_cost[index(Cost::pipeline)] += full_pipeline - totals.ttl;
    totals.ttl = full_pipeline;
  }
  return totals;
}

StepReport StepModel::explain(const Layout& layout, const Workload& workload) const {
  workload.check();
  if (const std::vector<std::string> found = violations(layout, model_); !found.empty()) {
    std::ostringstream out;
    out << layout.to_string() << " is not legal for " << model_.name << ": ";
    for (std::size_t i = 0; i < found.size(); ++i) out << (i == 0 ? "" : "; ") << found[i];
    throw Error(ErrorCode::invalid_topology, out.str());
  }
  StepReport report;
  report.totals = evaluate(layout, workload);
  detail::Step step(*this, product_rate_, attention_rate_, layout, workload);
  ListSink list{.operators = report.operators};
  if (hardware_.overheads.per_step > Time{}) {
    list(step.declared(Operator::step_overhead, hardware_.overheads.per_step));
  }
  step.first(list);
  const detail::LayerCounts& all = layers_before_.back();
  for (const std::size_t moe : {0u, 1u}) {
    for (const std::size_t windowed : {0u, 1u}) {
      if (all[moe][windowed] == 0) continue;
      ListSink layers{report.operators, moe == 1, windowed == 1, all[moe][windowed]};
      step.layer(layers, moe == 1, windowed == 1);
    }
  }
  step.sends(list);
  step.last(list);
  Time sum;
  for (const OperatorTime& op : report.operators) sum += op.exposed();
  // Sums of doubles in different orders differ in their last bits; a real wait is longer.
  if (layout.pp > 1 && report.totals.ttl > sum * (1 + 1e-9)) {
    OperatorTime wait = step.declared(Operator::pipeline_wait, report.totals.ttl - sum);
    wait.overhead = Time{};
    wait.cost = Cost::pipeline;
    report.operators.push_back(wait);
  }
  return report;
}

}  // namespace helix::plan
