// SPDX-License-Identifier: Apache-2.0
// Formats a plan as tables, JSON and CSV.
#include "report.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "files/output_file.hpp"
#include "files/strict_json.hpp"

namespace helix::plan_cli {
namespace {

using nlohmann::ordered_json;
using plan::Candidate;
using plan::OperatorTime;
using plan::StepTotals;

/// HOP-B as the layout requests it: "auto", "off", or a number of slices.
std::string requested_hop_b(const plan::Layout& layout) {
  if (layout.hop_b_slices == 0) return "auto";
  return layout.hop_b_slices == 1 ? "off" : std::to_string(layout.hop_b_slices);
}

/// HOP-B as the step actually runs it.
std::string describe_hop_b(const plan::StepReport& step) {
  if (step.totals.hop_b_slices > 1) return fmt::format("HOP-B in {} slices", step.totals.hop_b_slices);
  const bool hides = std::any_of(step.operators.begin(), step.operators.end(),
                                 [](const OperatorTime& op) { return op.hidden > plan::Time{}; });
  return hides ? "HOP-B in windowed layers alone" : "no HOP-B";
}

/// The largest cost of the step, and its share.
std::string main_cost(const StepTotals& totals) {
  const auto most = std::max_element(totals.by_cost.begin(), totals.by_cost.end());
  const auto cost = static_cast<plan::Cost>(most - totals.by_cost.begin());
  return fmt::format("{} {:.0f} %", to_string(cost), 100.0 * (*most / totals.ttl));
}

std::string format_header() {
  return fmt::format("  {:<62} {:>6} {:>10} {:>11} {:>10} {:>8}  {}\n", "layout", "batch", "TTL ms",
                     "tok/s/user", "tok/s/GPU", "GB/GPU", "most of a step");
}

std::string format_candidate(const Candidate& candidate) {
  const StepTotals& totals = candidate.totals;
  return fmt::format("  {:<62} {:>6} {:>10.3f} {:>11.1f} {:>10.2f} {:>8.1f}  {}\n",
                     candidate.layout.to_string(), totals.batch, in_milliseconds(totals.ttl),
                     in_tokens_per_second(totals.tokens_per_user()),
                     in_tokens_per_second(totals.tokens_per_gpu()), in_gigabytes(candidate.memory.total()),
                     main_cost(totals));
}

std::string format_operator(const OperatorTime& op, plan::Time ttl) {
  const std::string_view kind = op.is_moe ? " (MoE)" : "";
  const std::string name = fmt::format("{}{}{}", to_string(op.op), kind, op.is_windowed ? " (windowed)" : "");
  std::string bound(to_string(op.bound));
  if (op.algorithm != plan::CollectiveAlgorithm::none) {
    bound += fmt::format(", {} over {} ranks", to_string(op.algorithm), op.ranks);
  }
  return fmt::format("  {:<34} {:>6} {:>10.2f} {:>10.2f} {:>10.3f} {:>7.1f} %  {}\n", name, op.count,
                     in_microseconds(op.time), in_microseconds(op.hidden), in_bytes(op.bytes) / 1e6,
                     100.0 * (op.exposed() / ttl), bound);
}

ordered_json layout_json(const plan::Layout& layout) {
  return {{"strategy", std::string(to_string(layout.strategy))},
          {"kvp", layout.kvp},
          {"tpa", layout.tpa},
          {"attn_dp", layout.attn_dp},
          {"tpf", layout.tpf},
          {"ep", layout.ep},
          {"pp", layout.pp},
          {"dp", layout.dp},
          {"gpus", layout.num_gpus()},
          {"hop_b", requested_hop_b(layout)}};
}

ordered_json memory_json(const plan::RankMemoryPlan& memory) {
  return {{"weights", in_bytes(memory.weights)},
          {"kv", in_bytes(memory.kv)},
          {"workspace", in_bytes(memory.workspace)},
          {"total", in_bytes(memory.total())}};
}

ordered_json candidate_json(const Candidate& candidate) {
  const StepTotals& totals = candidate.totals;
  ordered_json json{{"layout", layout_json(candidate.layout)},
                    {"batch", totals.batch},
                    {"ttl_ms", in_milliseconds(totals.ttl)},
                    {"tokens_per_s_per_user", in_tokens_per_second(totals.tokens_per_user())},
                    {"tokens_per_s_per_gpu", in_tokens_per_second(totals.tokens_per_gpu())},
                    {"hop_b_slices", totals.hop_b_slices},
                    {"memory_bytes_per_gpu", memory_json(candidate.memory)}};
  for (std::size_t i = 0; i < totals.by_cost.size(); ++i) {
    json["cost_ms"][std::string(to_string(static_cast<plan::Cost>(i)))] = in_milliseconds(totals.by_cost[i]);
  }
  return json;
}

ordered_json operator_json(const OperatorTime& op) {
  return {{"operator", std::string(to_string(op.op))},
          {"is_moe", op.is_moe},
          {"is_windowed", op.is_windowed},
          {"count", op.count},
          {"us", in_microseconds(op.time)},
          {"hidden_us", in_microseconds(op.hidden)},
          {"overhead_us", in_microseconds(op.overhead)},
          {"bytes", in_bytes(op.bytes)},
          {"flops", in_flops(op.flops)},
          {"bound", std::string(to_string(op.bound))},
          {"cost", std::string(to_string(op.cost))},
          {"algorithm", std::string(to_string(op.algorithm))},
          {"ranks", op.ranks}};
}

}  // namespace

std::vector<std::size_t> best_layouts(const Plan& plan, std::size_t count) {
  const std::vector<Candidate>& candidates = plan.result.candidates;
  std::vector<std::size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const bool is_latency = plan.options.space.objective == plan::Objective::latency;
  const auto rank = [&](std::size_t i) {
    const double us = in_microseconds(candidates[i].totals.ttl);
    const double rate = -in_tokens_per_second(candidates[i].totals.tokens_per_gpu());
    return is_latency ? std::tuple(us, rate, i) : std::tuple(rate, us, i);
  };
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return rank(a) < rank(b); });
  std::set<std::string> seen;
  std::vector<std::size_t> best;
  for (const std::size_t i : order) {
    if (best.size() == count) break;
    if (seen.insert(candidates[i].layout.to_string()).second) best.push_back(i);
  }
  return best;
}

std::string format_plan(const Plan& plan) {
  const plan::StepModel& model = plan.model;
  const plan::ParameterCounts parameters = count_parameters(model.model());
  const plan::Precision& precision = model.precision();
  const plan::Workload& workload = plan.options.workload;
  const plan::Hardware& hardware = model.hardware();
  // Names and sources come from files and the command line, so they may hold any characters.
  std::string text =
      fmt::format("{}: {:.1f}e9 parameters, {:.1f}e9 of them for a token; {}\n",
                  decode::one_line(model.model().name), static_cast<double>(parameters.total()) / 1e9,
                  static_cast<double>(parameters.active()) / 1e9, decode::one_line(model.model().source));
  text += fmt::format("{}: {:.0f} GB a GPU, {:.1f} usable; {}\n", decode::one_line(hardware.name),
                      in_gigabytes(hardware.memory), in_gigabytes(hardware.usable_memory()),
                      decode::one_line(hardware.source));
  text += fmt::format(
      "context {:.0f} tokens: {:.2f} GB of KV a sequence; bits: weights {:.4g}, KV {:.4g}, activations "
      "{:.4g}\n",
      in_tokens(workload.context), in_gigabytes(kv_cache_bytes(model.model(), precision, workload.context)),
      precision.weight_bits, precision.kv_bits, precision.activation_bits);
  const plan::SearchCounts& counts = plan.result.counts;
  text += fmt::format(
      "{} configurations on up to {} GPUs, powers of two of GPUs and PP stages: {} do not fit, "
      "{} are over the limit, {} remain\n\n",
      counts.evaluated, plan.options.space.max_gpus, counts.out_of_memory, counts.over_ttl,
      plan.result.candidates.size());

  const bool is_latency = plan.options.space.objective == plan::Objective::latency;
  text += fmt::format("best layouts by {}\n", is_latency ? "latency" : "tokens/s/GPU") + format_header();
  for (const std::size_t i : best_layouts(plan, static_cast<std::size_t>(plan.options.top))) {
    text += format_candidate(plan.result.candidates[i]);
  }

  const Candidate& best = plan.best_candidate();
  text += fmt::format("\nthe first: {:.1f} GB weights, {:.1f} GB KV, {:.2f} GB workspace a GPU; {}\n",
                      in_gigabytes(best.memory.weights), in_gigabytes(best.memory.kv),
                      in_gigabytes(best.memory.workspace), describe_hop_b(plan.best));
  text += fmt::format("  {:<34} {:>6} {:>10} {:>10} {:>10} {:>9}  {}\n", "operator", "times", "us", "hidden",
                      "MB", "of step", "bound by");
  for (const OperatorTime& op : plan.best.operators) text += format_operator(op, best.totals.ttl);

  if (!plan.losses.empty()) text += "\nwhy the others lost, the best of each kind\n";
  for (const plan::Loss& loss : plan.losses) text += fmt::format("  {}\n", loss.text);

  if (plan.options.shows_frontier) {
    text += "\nfrontier of tokens/s/user against tokens/s/GPU\n" + format_header();
    for (const std::size_t i : plan.result.frontier) text += format_candidate(plan.result.candidates[i]);
  }
  return text;
}

void write_json(const std::filesystem::path& file, const Plan& plan) {
  const plan::Precision& precision = plan.model.precision();
  const plan::Workload& workload = plan.options.workload;
  ordered_json json;
  json["model"] = {{"name", plan.model.model().name}, {"source", plan.model.model().source}};
  json["hardware"] = {{"name", plan.model.hardware().name}, {"source", plan.model.hardware().source}};
  json["bits"] = {{"weights", precision.weight_bits},
                  {"kv", precision.kv_bits},
                  {"activations", precision.activation_bits}};
  json["workload"] = {{"context", in_tokens(workload.context)}, {"step_tokens", workload.step_tokens}};
  json["objective"] = plan.options.space.objective == plan::Objective::latency ? "latency" : "throughput";
  json["configurations"] = {{"evaluated", plan.result.counts.evaluated},
                            {"out_of_memory", plan.result.counts.out_of_memory},
                            {"over_ttl", plan.result.counts.over_ttl}};
  json["best"] = candidate_json(plan.best_candidate());
  json["best"]["operators"] = ordered_json::array();
  for (const OperatorTime& op : plan.best.operators) json["best"]["operators"].push_back(operator_json(op));
  json["top"] = ordered_json::array();
  for (const std::size_t i : best_layouts(plan, static_cast<std::size_t>(plan.options.top))) {
    json["top"].push_back(candidate_json(plan.result.candidates[i]));
  }
  json["frontier"] = ordered_json::array();
  for (const std::size_t i : plan.result.frontier) {
    json["frontier"].push_back(candidate_json(plan.result.candidates[i]));
  }
  json["losses"] = ordered_json::array();
  for (const plan::Loss& loss : plan.losses) {
    json["losses"].push_back({{"layout", layout_json(loss.layout)},
                              {"batch", loss.batch},
                              {"reason", std::string(to_string(loss.reason))},
                              {"cost", std::string(to_string(loss.cost))},
                              {"excess_ms", in_milliseconds(loss.excess)},
                              {"text", loss.text}});
  }
  // Names come from the command line and may be invalid UTF-8.
  decode::write_output(file, json.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n");
}

void write_csv(const std::filesystem::path& file, const Plan& plan) {
  const std::set<std::size_t> frontier(plan.result.frontier.begin(), plan.result.frontier.end());
  std::string text =
      "strategy,kvp,tpa,attn_dp,tpf,ep,pp,dp,gpus,hop_b,hop_b_slices,batch,ttl_ms,tokens_per_s_per_user,"
      "tokens_per_s_per_gpu,weights_gb,kv_gb,workspace_gb,on_frontier\n";
  for (std::size_t i = 0; i < plan.result.candidates.size(); ++i) {
    const Candidate& at = plan.result.candidates[i];
    const plan::Layout& layout = at.layout;
    text += fmt::format(
        "{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n", to_string(layout.strategy), layout.kvp,
        layout.tpa, layout.attn_dp, layout.tpf, layout.ep, layout.pp, layout.dp, layout.num_gpus(),
        requested_hop_b(layout), at.totals.hop_b_slices, at.totals.batch, in_milliseconds(at.totals.ttl),
        in_tokens_per_second(at.totals.tokens_per_user()), in_tokens_per_second(at.totals.tokens_per_gpu()),
        in_gigabytes(at.memory.weights), in_gigabytes(at.memory.kv), in_gigabytes(at.memory.workspace),
        frontier.contains(i) ? 1 : 0);
  }
  decode::write_output(file, text);
}

}  // namespace helix::plan_cli
