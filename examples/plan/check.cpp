// SPDX-License-Identifier: Apache-2.0
// The predictions of helix-plan --check.
#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include <helix/error.hpp>
#include <helix/limits.hpp>
#include <helix/plan/step_time.hpp>

#include "calibration.hpp"
#include "files/strict_json.hpp"

namespace helix::plan_cli {
namespace {

/// Layers of the bench's shape, without embedding and LM head.
plan::Model layer_model(std::int64_t heads, std::int64_t kv_heads, std::int64_t dim, std::int64_t layers) {
  return {.name = "bench",
          .shape = {.num_query_heads = heads,
                    .num_kv_heads = kv_heads,
                    .head_dim = dim,
                    .value_dim = dim,
                    .hidden = BenchShape::kHidden,
                    .ffn = BenchShape::kFfn,
                    .num_layers = layers}};
}

plan::Layout helix_layout(std::int64_t kvp, std::int64_t tpa, int hop_b_slices) {
  plan::Layout layout;
  layout.kvp = static_cast<int>(kvp);
  layout.tpa = static_cast<int>(tpa);
  layout.tpf = static_cast<int>(kvp * tpa);
  layout.hop_b_slices = hop_b_slices;
  return layout;
}

plan::Workload workload(std::int64_t batch, double context, std::int64_t step_tokens = 1) {
  plan::Workload load;
  load.batch = batch;
  load.context = plan::tokens(context);
  load.step_tokens = step_tokens;
  return load;
}

/// Time of one operator in one layer and step, of a layout with one slice: nothing is hidden.
double operator_us(const plan::StepReport& report, plan::Operator wanted) {
  plan::Time time;
  for (const plan::OperatorTime& op : report.operators) {
    if (op.op == wanted) time += op.time;
  }
  return in_microseconds(time);
}

class Predictor {
 public:
  Predictor(const plan::Hardware& base, const std::vector<BenchCase>& calibration)
      : base_(base), calibration_(calibration), hardware_(calibrate(base, calibration)) {}

  void add(const BenchCase& at) {
    try {
      predict(at);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::invalid_file) throw;
      throw Error(ErrorCode::invalid_file, at.where(), ": ", error.what());
    }
  }
  CheckResult take() { return std::move(result_); }

 private:
  void predict(const BenchCase& at) {
    if (is_step_attention(at)) {
      attention(at);
    } else if (at.family == "linear") {
      linear(at);
    } else if (at.family == "exchange") {
      exchange(at);
    } else if (at.family == "attention_scaling") {
      attention_scaling(at);
    } else if (at.family == "decode_layer" && !at.parameters.contains("spare_blocks")) {
      decode_layer(at);
    } else {
      result_.not_covered.push_back(at.name);
    }
  }
  plan::StepReport explain(const plan::Model& model, const plan::Layout& layout,
                           const plan::Workload& load) const {
    return plan::StepModel(model, plan::Precision{}, hardware_).explain(layout, load);
  }
  /// Like explain(), but calibrated without the case.
  plan::StepReport explain_without(const BenchCase& at, const plan::Model& model, const plan::Layout& layout,
                                   const plan::Workload& load) const {
    const plan::Hardware hardware = calibrate_without(base_, calibration_, at.name);
    return plan::StepModel(model, plan::Precision{}, hardware).explain(layout, load);
  }
  void row(const std::string& name, double measured_us, double predicted_us) {
    result_.rows.push_back({name, measured_us, predicted_us});
  }

  void attention(const BenchCase& at) {
    const std::string& heads = at.text("heads");  // "64:8"
    const std::size_t colon = heads.find(':');
    HELIX_EXPECTS(colon != std::string::npos, ErrorCode::invalid_file, at.where(),
                  ": heads are not \"query:kv\"");
    BenchCase split = at;
    split.parameters["hq"] = heads.substr(0, colon);
    split.parameters["hkv"] = heads.substr(colon + 1);
    const plan::Model model =
        layer_model(split.parameter("hq", kMaxCount), split.parameter("hkv", kMaxCount), BenchShape::kDim, 1);
    const std::int64_t batch = at.parameter("batch", kMaxSequences);
    // A ragged batch is predicted by its mean length, which follows from the bytes.
    const double kv_bytes = at.value("bytes/s") * at.value("us") * 1e-6;
    const double row_bytes = static_cast<double>(model.shape.kv_elements()) * BenchShape::kElementBytes;
    const double context = std::max(1.0, std::round(kv_bytes / row_bytes / static_cast<double>(batch)));
    const plan::Workload load = workload(batch, context, at.parameter("queries", kMaxStepTokens));
    const plan::StepReport report = explain_without(at, model, helix_layout(1, 1, 1), load);
    row(at.name, at.value("us"), operator_us(report, plan::Operator::attention));
  }

  /// A bench product does not have the shape of a step's, so only its bytes count.
  void linear(const BenchCase& at) {
    const plan::Time read = hardware_.read.time(plan::bytes(at.value("bytes")));
    const plan::Flops work = plan::flops(at.value("flop/s") * at.value("us") * 1e-6);
    constexpr double kBits = 16;
    const plan::Time time = std::max(read, work / hardware_.peak(kBits)) + hardware_.overheads.per_operator;
    row(at.name, at.value("us"), in_microseconds(time));
  }

  void exchange(const BenchCase& at) {
    const std::int64_t kvp = at.ranks("kvp");
    const std::int64_t heads = at.parameter("heads", kMaxCount);
    const plan::StepReport report =
        explain_without(at, layer_model(heads, BenchShape::kKvHeads, at.parameter("dim", kMaxWidth), 1),
                        helix_layout(kvp, 1, 1), workload(at.parameter("tokens", kMaxSequences), 1024));
    row(at.name, at.value("us"),
        operator_us(report, plan::Operator::kvp_exchange) + operator_us(report, plan::Operator::lse_combine));
  }

  void attention_scaling(const BenchCase& at) {
    const plan::Model model = layer_model(BenchShape::kHeads, BenchShape::kKvHeads, BenchShape::kDim, 1);
    const plan::Workload load = workload(at.parameter("batch", kMaxSequences),
                                         static_cast<double>(at.parameter("tokens", kMaxTokens)));
    const plan::StepReport shard = explain(model, helix_layout(at.ranks("kvp"), 1, 1), load);
    const plan::StepReport whole = explain(model, helix_layout(1, 1, 1), load);
    const double shard_us = operator_us(shard, plan::Operator::attention);
    row(at.name, at.value("us"), shard_us);
    row(at.name + ", with exchange", at.value("with_exchange_us"),
        shard_us + operator_us(shard, plan::Operator::kvp_exchange) +
            operator_us(shard, plan::Operator::lse_combine));
    row(at.name + ", one GPU", at.value("one_gpu_us"), operator_us(whole, plan::Operator::attention));
  }

  void decode_layer(const BenchCase& at) {
    constexpr std::int64_t kMaxSlices = 1024;
    const std::string& hop_b = at.text("hop_b");
    const int slices = hop_b == "off"    ? 1
                       : hop_b == "auto" ? 0
                                         : static_cast<int>(at.parameter("hop_b", kMaxSlices));
    const plan::Model model = layer_model(BenchShape::kHeads, BenchShape::kKvHeads, BenchShape::kDim,
                                          at.parameter("layers", kMaxCount));
    const plan::StepReport report =
        explain(model, helix_layout(at.ranks("kvp"), at.ranks("tpa"), slices),
                workload(at.parameter("batch", kMaxSequences),
                         static_cast<double>(at.parameter("context", kMaxTokens))));
    row(at.name, at.value("us"), in_microseconds(report.totals.ttl));
  }

  const plan::Hardware& base_;
  const std::vector<BenchCase>& calibration_;
  plan::Hardware hardware_;
  CheckResult result_;
};

}  // namespace

CheckResult check_predictions(const plan::Hardware& base, const std::vector<BenchCase>& calibration,
                              const std::vector<BenchCase>& cases) {
  Predictor predictor(base, calibration);
  for (const BenchCase& at : cases) predictor.add(at);
  return predictor.take();
}

std::string format_check(const CheckResult& result) {
  constexpr double kAim = 10.0;
  std::string text = "| case | measured, us | predicted, us | error | |\n|---|---|---|---|---|\n";
  int within = 0;
  for (const CheckRow& row : result.rows) {
    const bool is_off = std::abs(row.error_percent()) > kAim;
    within += is_off ? 0 : 1;
    text += fmt::format("| {} | {:.1f} | {:.1f} | {:+.1f} % | {} |\n", decode::one_line(row.name),
                        row.measured_us, row.predicted_us, row.error_percent(), is_off ? "above 10 %" : "");
  }
  std::map<std::string, int> others;
  for (const std::string& name : result.not_covered) ++others[name.substr(0, name.find('/'))];
  text += fmt::format("\n{} of {} rows within {} %\n", within, result.rows.size(), kAim);
  for (const auto& [family, count] : others) {
    text += fmt::format("not predicted: {} of {}{}\n", count, decode::one_line(family),
                        family == "decode_layer" ? " with spare blocks" : "");
  }
  return text;
}

}  // namespace helix::plan_cli
