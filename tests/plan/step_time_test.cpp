// SPDX-License-Identifier: Apache-2.0
// StepModel: totals compared with their operators, times computed by hand, properties, and steps measured on
// H200s.
#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <helix/hop_b_model.hpp>
#include <helix/plan/roofline.hpp>
#include <helix/plan/step_time.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"

namespace {

using namespace helix::plan;
using helix::ErrorCode;
using helix::test::failure_of;

const Precision kFp4{4, 4, 4};
const std::vector<Strategy> kStrategies{Strategy::helix, Strategy::tensor_parallel,
                                        Strategy::data_parallel_attention, Strategy::medha};

const OperatorTime& find(const StepReport& report, Operator op, bool is_moe = false) {
  const auto found = std::find_if(report.operators.begin(), report.operators.end(),
                                  [&](const OperatorTime& x) { return x.op == op && x.is_moe == is_moe; });
  REQUIRE(found != report.operators.end());
  return *found;
}

bool has(const StepReport& report, Operator op) {
  return std::any_of(report.operators.begin(), report.operators.end(),
                     [&](const OperatorTime& x) { return x.op == op; });
}

/// Layouts of all strategies, for properties that must hold for every layout.
std::vector<Layout> some_layouts(const Model& model) {
  std::vector<Layout> layouts;
  for (const Strategy strategy : kStrategies) {
    for (const int n : {1, 8, 64}) {
      for (Layout layout : legal_layouts(strategy, model, n, true)) {
        for (const int stages : {1, 4}) {
          layout.pp = stages;
          layouts.push_back(layout);
        }
      }
    }
  }
  return layouts;
}

TEST_CASE("a step is the sum of its operators, and of its costs") {
  Hardware hardware = hardware_preset("h200");
  hardware.overheads = {microseconds(1), microseconds(2), microseconds(3), microseconds(4), microseconds(5)};
  hardware.peaks = {{16, teraflops_per_second(790)}};
  for (const std::string& name : model_preset_names()) {
    const StepModel model(model_preset(name), kFp4, hardware);
    for (const Layout& layout : some_layouts(model.model())) {
      for (const std::int64_t batch : {1, 6, 300}) {
        const StepReport report = model.explain(layout, {.context = tokens(123456), .batch = batch});
        Time operators;
        for (const OperatorTime& op : report.operators) {
          operators += op.exposed();
          REQUIRE(op.count > 0);
          REQUIRE(op.time >= op.overhead);
          REQUIRE(op.hidden <= op.time);
        }
        Time costs;
        for (const Time cost : report.totals.by_cost) {
          costs += cost;
          REQUIRE(cost >= microseconds(-1e-6));
        }
        INFO(name << " " << layout.to_string() << " batch " << batch);
        REQUIRE(in_microseconds(operators) == Approx(in_microseconds(report.totals.ttl)).epsilon(1e-9));
        REQUIRE(in_microseconds(costs) == Approx(in_microseconds(report.totals.ttl)).epsilon(1e-9));
      }
    }
  }
}

BandwidthCurve scaled(const BandwidthCurve& curve, double factor) {
  std::vector<BandwidthCurve::Point> points = curve.points();
  for (BandwidthCurve::Point& point : points) point.bandwidth = point.bandwidth * factor;
  return BandwidthCurve(points);
}

TEST_CASE("more bandwidth, throughput or less latency never slows a step") {
  using Improve = void (*)(Hardware&);
  const std::vector<Improve> improvements{
      [](Hardware& h) { h.read = scaled(h.read, 1.3); },
      [](Hardware& h) { h.attention_read = scaled(h.attention_read, 1.3); },
      [](Hardware& h) { h.inside.bandwidth = h.inside.bandwidth * 2; },
      [](Hardware& h) { h.outside.bandwidth = h.outside.bandwidth * 2; },
      [](Hardware& h) { h.inside.latency = h.inside.latency * 0.5; },
      [](Hardware& h) { h.outside.latency = h.outside.latency * 0.5; },
      [](Hardware& h) {
        for (ComputePeak& peak : h.peaks) peak.rate = peak.rate * 2;
      },
      [](Hardware& h) { h.overheads = {}; }};
  for (const char* name : {"llama-3.1-405b", "deepseek-r1", "gpt-oss-120b"}) {
    Hardware hardware = hardware_preset("h200");
    hardware.measured.clear();
    const StepModel before(model_preset(name), {}, hardware);
    for (const Improve improve : improvements) {
      Hardware better = hardware;
      improve(better);
      const StepModel after(model_preset(name), {}, better);
      for (const Layout& layout : some_layouts(before.model())) {
        for (const std::int64_t batch : {1, 40}) {
          const Workload workload{.context = tokens(300000), .batch = batch};
          REQUIRE(after.evaluate(layout, workload).ttl <=
                  before.evaluate(layout, workload).ttl * (1 + 1e-12));
        }
      }
    }
  }
}

TEST_CASE("on appendix A's machine a Helix layer reads what section 2.2 says") {
  Model model = model_preset("llama-3.1-405b");
  model.shape.ffn = 65536;
  const StepModel step(model, kFp4, hardware_preset("roofline-8000"));
  const StepReport report =
      step.explain({.kvp = 8, .tpa = 8, .tpf = 64}, {.context = tokens(1024e3), .batch = 8});
  const Time weights = find(report, Operator::qkv_projection).time +
                       find(report, Operator::output_projection).time +
                       find(report, Operator::ffn_gate_up).time + find(report, Operator::ffn_down).time;
  CHECK(in_microseconds(weights) == Approx(5.767168).epsilon(0.03));  // activations add a few percent
  CHECK(in_microseconds(weights) > 5.767168);
  CHECK(in_microseconds(find(report, Operator::attention).time) == Approx(16.384).epsilon(1e-3));
}

TEST_CASE("without activations a Helix layer reads the weights of the roofline, dense and MoE") {
  const Precision weights_only{4, 4, 1e-12};
  for (const char* name : {"llama-3.1-405b", "deepseek-r1", "qwen3-235b-a22b", "llama-4-maverick"}) {
    const Model model = model_preset(name);
    const StepModel step(model, weights_only, hardware_preset("roofline-8000"));
    for (const Layout& layout : legal_layouts(Strategy::helix, model, 8)) {
      const StepReport report = step.explain(layout, {.context = tokens(1000), .batch = 5});
      const RooflineWidths widths{
          .tpa = layout.tpa, .kvp = layout.kvp, .tpf = 8, .output_projection = OutputProjection::over_stage};
      for (const bool is_moe : {false, true}) {
        if (is_moe ? !model.shape.moe : model.shape.ffn == 0) continue;
        Bytes read;
        for (const OperatorTime& op : report.operators) {
          const bool is_of_layers = op.cost == Cost::attention_weights || op.cost == Cost::ffn_weights;
          if (is_of_layers && op.is_moe == is_moe && op.is_windowed == (model.window > 0)) read += op.bytes;
        }
        const Bytes expected = is_moe ? moe_weight_read_bytes(model, weights_only, 5, widths)
                                      : weight_read_bytes(model, weights_only, widths);
        INFO(name << " " << layout.to_string() << " MoE " << is_moe);
        CHECK(in_bytes(read) == Approx(in_bytes(expected)).epsilon(1e-9));
      }
    }
  }
}

TEST_CASE("past the KV heads tensor parallelism reads no less KV, and Helix does") {
  const StepModel step(model_preset("llama-3.1-405b"), kFp4, hardware_preset("roofline-8000"));
  const Workload workload{.context = tokens(1e6)};
  const auto attention_us = [&](const Layout& layout) {
    return in_microseconds(find(step.explain(layout, workload), Operator::attention).time);
  };
  const auto tensor_parallel = [](int n) {
    Layout layout;
    layout.strategy = Strategy::tensor_parallel;
    layout.tpa = layout.tpf = n;
    return layout;
  };
  CHECK(attention_us(tensor_parallel(8)) == Approx(16).epsilon(1e-3));
  CHECK(attention_us(tensor_parallel(64)) == Approx(16).epsilon(1e-3));
  CHECK(attention_us({.kvp = 8, .tpa = 8, .tpf = 64}) == Approx(2).epsilon(1e-3));
}

TEST_CASE("HOP-B is the two-machine flow shop of its slices") {
  const StepModel step(model_preset("llama-3.1-70b"), {}, hardware_preset("gb200"));
  const Workload workload{.context = tokens(20000), .batch = 16};
  const auto pair_of = [&](int slices) {
    const StepReport report = step.explain({.kvp = 8, .tpa = 1, .tpf = 8, .hop_b_slices = slices}, workload);
    return std::pair{find(report, Operator::attention), find(report, Operator::kvp_exchange)};
  };
  const auto [attention, exchange] = pair_of(1);
  CHECK(exchange.hidden == Time{});
  for (const int slices : {2, 4, 16}) {
    const auto [a, e] = pair_of(slices);
    // Reads scale with the slice, but each message of a slice pays the link's latency of 1 us again.
    CHECK(in_microseconds(a.time) == Approx(in_microseconds(attention.time)));
    CHECK(in_microseconds(e.time) == Approx(in_microseconds(exchange.time) + slices - 1));
    CHECK(in_microseconds(a.time + e.time - e.hidden) ==
          Approx(helix::hop_b_time(slices, in_microseconds(a.time), in_microseconds(e.time))));
  }
  const StepTotals best = step.evaluate({.kvp = 8, .tpa = 1, .tpf = 8}, workload);
  for (const int slices : {1, 2, 4, 8, 16}) {
    CHECK(best.ttl <=
          step.evaluate({.kvp = 8, .tpa = 1, .tpf = 8, .hop_b_slices = slices}, workload).ttl * (1 + 1e-12));
  }
  CHECK(best.hop_b_slices > 1);
}

TEST_CASE("a pipeline adds sends to one sequence, and overlaps several") {
  // 64 layers, so stages are equal.
  const StepModel step(model_preset("qwen3-32b"), {}, hardware_preset("gb200"));
  const auto evaluate = [&](int stages, std::int64_t batch) {
    return step.evaluate({.kvp = 2, .tpa = 4, .tpf = 8, .pp = stages},
                         {.context = tokens(1e5), .batch = batch});
  };
  const StepTotals flat = evaluate(1, 1);
  const StepTotals one = evaluate(4, 1);
  // Three sends of 5120 bf16 values each.
  CHECK(in_microseconds(one.ttl - flat.ttl) == Approx(3 * (1 + 5120 * 2 / 900e3)));
  CHECK(one.micro_batches == 1);
  const StepTotals two = evaluate(4, 2);
  CHECK(two.micro_batches == 2);
  CHECK(in_microseconds(two.ttl) == Approx(in_microseconds(one.ttl)));
  CHECK(two.tokens_per_gpu() / one.tokens_per_gpu() == Approx(2));
  // With a full pipeline, each step waits four times for the slowest stage, which has the head.
  const StepTotals four = evaluate(4, 4);
  CHECK(four.ttl > one.ttl);
  CHECK(four.by_cost[static_cast<std::size_t>(Cost::pipeline)] >
        one.by_cost[static_cast<std::size_t>(Cost::pipeline)]);
}

TEST_CASE("an uneven pipeline waits for its longest stage") {
  Model model = model_preset("llama-3.1-8b");
  model.shape.num_layers = 5;  // 3 and 2
  model.shape.vocab = 1000;    // a head that takes less time than a layer
  const StepModel step(model, {}, hardware_preset("h200"));
  Time embedding;
  Time layer;
  Time head;
  for (const OperatorTime& op : step.explain({}, {.context = tokens(1e5), .batch = 2}).operators) {
    (op.count == 5 ? layer : op.op == Operator::embedding ? embedding : head) += op.time;
  }
  REQUIRE(embedding + layer > head);
  // Two micro-batches of two sequences each: the first stage (the embedding and 3 layers) runs twice.
  const StepReport report = step.explain({.pp = 2}, {.context = tokens(1e5), .batch = 4});
  const Time longest = embedding + layer * 3;
  CHECK(in_microseconds(report.totals.ttl) == Approx(in_microseconds(longest * 2)).epsilon(1e-9));
  // The path of one token: every stage once, and one send of 2 x 4096 bf16 values.
  const Time way = embedding + layer * 5 + head + microseconds(1.2 + 2 * 4096 * 2 / 379e3);
  CHECK(in_microseconds(find(report, Operator::pipeline_wait).time) ==
        Approx(in_microseconds(longest * 2 - way)).epsilon(1e-9));
  CHECK(find(report, Operator::pipeline_wait).overhead == Time{});  // nobody works meanwhile
}

TEST_CASE("replicas share the batch") {
  const StepModel step(model_preset("llama-3.1-8b"), {}, hardware_preset("h200"));
  const StepTotals one = step.evaluate({.kvp = 2, .tpf = 2}, {.context = tokens(1e5), .batch = 4});
  const StepTotals two = step.evaluate({.kvp = 2, .tpf = 2, .dp = 2}, {.context = tokens(1e5), .batch = 8});
  CHECK(two.ttl == one.ttl);
  CHECK(two.num_gpus == 4);
  CHECK(two.tokens_per_gpu() == one.tokens_per_gpu());
  CHECK(in_tokens_per_second(one.tokens_per_gpu()) == Approx(4 / in_seconds(one.ttl) / 2));
}

TEST_CASE("experts: expectation by its formula, the worst case never less") {
  const StepModel step(model_preset("deepseek-r1"), kFp4, hardware_preset("roofline-8000"));
  const Layout layout{.kvp = 64, .tpf = 4, .ep = 16};
  for (const std::int64_t batch : {1, 4, 32, 1024}) {
    Workload workload{.context = tokens(1e4), .batch = batch};
    const auto read = [&] {
      return in_bytes(find(step.explain(layout, workload), Operator::experts_down, true).bytes);
    };
    const double expected = read();
    workload.expert_hits = ExpertHits::worst_case;
    CHECK(read() >= expected);
    const double hits = 256 * (1 - std::pow(1 - 8.0 / 256, batch)) / 16;
    const double pairs = static_cast<double>(batch) * 8 / 16;
    CHECK(expected == Approx((hits * 7168 * 512 + pairs * (7168 + 512)) / 2));
    // Weights that are read count once a pair in the multiplications, not once a token.
    workload.expert_hits = ExpertHits::expectation;
    const StepReport report = step.explain(layout, workload);
    CHECK(in_flops(find(report, Operator::experts_down, true).flops) == Approx(2 * pairs * 7168 * 512));
    CHECK(in_flops(find(report, Operator::experts_gate_up, true).flops) == Approx(4 * pairs * 7168 * 512));
  }
}

TEST_CASE("a product of many rows takes two flops for each of its weights and rows") {
  Hardware hardware = hardware_preset("h200");
  hardware.peaks = {{16, teraflops_per_second(790)}};
  const StepModel step(model_preset("llama-3.1-8b"), {}, hardware);
  const StepReport report = step.explain({}, {.context = tokens(1000), .batch = 4096});
  const OperatorTime& head = find(report, Operator::lm_head);
  CHECK(in_flops(head.flops) == 2.0 * 4096 * 128256 * 4096);
  CHECK(head.bound == Bound::compute);
  CHECK(in_microseconds(head.time - head.overhead) == Approx(2.0 * 4096 * 128256 * 4096 / 790e6));
}

TEST_CASE("queries without a LoRA, and a vocabulary that the ranks do not divide, by hand") {
  Model model = model_preset("deepseek-v2-lite");
  model.shape.vocab = 1001;
  const StepModel step(model, {}, hardware_preset("gb200"));
  const StepReport report = step.explain({.kvp = 2, .tpf = 2}, {.context = tokens(1000), .batch = 3});
  const double qkv = 2048 * 16 * 192 + 2048 * 576 + 16 * 128 * 512;
  CHECK(in_bytes(find(report, Operator::qkv_projection).bytes) ==
        Approx(2 * qkv + 2 * 3 * (2048 + 16 * 576 + 576)));
  CHECK(in_bytes(find(report, Operator::lm_head).bytes) == Approx(2 * 501 * 2048 + 2 * 3 * (2048 + 501)));
}

TEST_CASE("a batch has no more slices than sequences, and a part of a token is read like a token") {
  const StepModel step(model_preset("llama-3.1-405b"), {}, hardware_preset("gb200"));
  const Layout layout{.kvp = 4, .tpa = 8, .tpf = 32, .hop_b_slices = 8};
  CHECK(step.evaluate(layout, {.context = tokens(1e5), .batch = 2}).hop_b_slices == 2);
  CHECK(step.evaluate(layout, {.context = tokens(1e5), .batch = 9}).hop_b_slices == 8);
  CHECK(step.evaluate({}, {.context = tokens(1000.5)}).ttl ==
        step.evaluate({}, {.context = tokens(1001)}).ttl);
}

TEST_CASE("the worst case of experts is bounded by what a rank holds and by what tokens choose") {
  const StepModel step(model_preset("deepseek-r1"), kFp4, hardware_preset("roofline-8000"));
  const Layout layout{.kvp = 64, .tpf = 1, .ep = 64};  // 4 experts per rank
  const auto read = [&](std::int64_t batch) {
    const Workload workload{.context = tokens(1e4), .batch = batch, .expert_hits = ExpertHits::worst_case};
    return in_bytes(find(step.explain(layout, workload), Operator::experts_down, true).bytes);
  };
  // The 8 choices of a token are distinct, so at most 4 of them are on this rank.
  CHECK(read(1) == (4.0 * 7168 * 2048 + 4 * (7168 + 2048)) / 2);
  CHECK(read(100) == (4.0 * 7168 * 2048 + 400 * (7168 + 2048)) / 2);
  const StepModel few(model_preset("llama-4-maverick"), kFp4, hardware_preset("roofline-8000"));
  const Workload one{.context = tokens(1e4), .expert_hits = ExpertHits::worst_case};
  CHECK(in_bytes(find(few.explain({}, one), Operator::experts_down, true).bytes) ==
        (1.0 * 5120 * 8192 + 5120 + 8192) / 2);
}

TEST_CASE("exchange and combine by hand") {
  const StepModel step(model_preset("llama-3.1-405b"), {}, hardware_preset("gb200"));
  const Workload workload{.context = tokens(1e5), .batch = 6};
  const StepReport helix = step.explain({.kvp = 4, .tpa = 8, .tpf = 32, .hop_b_slices = 1}, workload);
  // 16 heads of 128 bf16 values and an f32 LSE; after the exchange, 4 partials of 4 heads.
  CHECK(in_bytes(find(helix, Operator::kvp_exchange).bytes) == 6 * 16 * (128 * 2 + 4));
  CHECK(in_microseconds(find(helix, Operator::kvp_exchange).time) == Approx(1 + 0.75 * 6 * 16 * 260 / 900e3));
  // Ranks of a KVP group are 8 apart: with domains of 8 ranks, each lies in its own.
  Hardware small_domains = hardware_preset("gb200");
  small_domains.nvlink_domain = 8;
  const StepModel spread(step.model(), {}, small_domains);
  const StepReport far = spread.explain({.kvp = 4, .tpa = 8, .tpf = 32, .hop_b_slices = 1}, workload);
  CHECK(in_microseconds(find(far, Operator::kvp_exchange).time) == Approx(5 + 0.75 * 6 * 16 * 260 / 50e3));
  CHECK(in_bytes(find(helix, Operator::lse_combine).bytes) == 6 * 4 * (5 * 128 * 2 + 4 * 4));
  CHECK(in_bytes(find(helix, Operator::attention_all_reduce).bytes) == 6 * 16384 * 2);
  Layout medha;
  medha.strategy = Strategy::medha;
  medha.kvp = 4;
  medha.tpa = medha.tpf = 8;
  const StepReport tied = step.explain(medha, workload);
  // KVP rank 0 receives the other ranks' 16 heads and combines all of them.
  CHECK(in_microseconds(find(tied, Operator::kvp_exchange).time) == Approx(1 + 3.0 * 6 * 16 * 260 / 900e3));
  CHECK(in_bytes(find(tied, Operator::lse_combine).bytes) == 6 * 16 * (5 * 128 * 2 + 4 * 4));
}

/// An operator of a step in a list made by hand.
struct Expected {
  Operator op;
  bool is_moe;
  std::int64_t count;
  double bytes;
};

TEST_CASE("a step of data-parallel attention over two domains by hand") {
  // 16 ranks: 4 groups of TPA 4 with 16 of 64 sequences each; 8 groups of 32 experts over TPF 2.
  Hardware hardware = hardware_preset("gb200");
  hardware.nvlink_domain = 8;
  hardware.inside = {microseconds(1), gigabytes_per_second(100)};
  hardware.outside = {microseconds(5), gigabytes_per_second(50)};
  const StepModel step(model_preset("deepseek-r1"), {8, 8, 16}, hardware);
  Layout layout;
  layout.strategy = Strategy::data_parallel_attention;
  layout.attn_dp = layout.tpa = 4;
  layout.tpf = 2;
  layout.ep = 8;
  const StepReport report = step.explain(layout, {.context = tokens(1000), .batch = 64});

  // Bytes: weights and KV have 1 byte per element, activations 2.
  const double hidden = 7168;
  const double own = 2 * 16 * hidden;  // hidden states of a rank's tokens
  const double all = 2 * 64 * hidden;  // hidden states of all tokens
  const double qkv_width = 32 * 576 + 576;
  const double qkv = hidden * 1536 + 1536 * 32 * 192 + hidden * 576 + 32 * 128 * 512;
  // The 8 choices of a token fall into 5.25 of 8 groups with TPF 2 ranks each; TPA 4 ranks share their 16
  // tokens.
  const double chosen = 2 * 16 / 4 * (8 * (1 - std::pow(7.0 / 8, 8))) * 2 * hidden;
  const double hits = 256 * (1 - std::pow(1 - 8.0 / 256, 64)) / 8;
  const double pairs = 2 * 64 * 8 / 8;  // activations of a rank's (token, expert) pairs
  std::vector<Expected> expected{{Operator::embedding, false, 1, all},
                                 {Operator::embedding_all_reduce, false, 1, all}};
  for (const bool is_moe : {false, true}) {
    const std::int64_t layers = is_moe ? 58 : 3;
    const auto add = [&](Operator op, double size) { expected.push_back({op, is_moe, layers, size}); };
    add(Operator::attention_norm, 2 * own);
    add(Operator::qkv_projection, qkv + 2 * 16 * (hidden + qkv_width));
    add(Operator::rope_append, 2 * 2 * 16 * qkv_width);
    add(Operator::attention, 16 * 1000 * 576 + 2 * 16 * 32 * (576 + 512));
    add(Operator::value_up_projection, 32 * 512 * 128 + 2 * 16 * (32 * 512 + 32 * 128));
    add(Operator::output_projection, 32 * 128 * hidden + 2 * 16 * (32 * 128 + hidden));
    add(Operator::attention_all_reduce, own);
    add(Operator::ffn_norm, 2 * own);
    if (!is_moe) {
      add(Operator::ffn_dispatch, all);
      add(Operator::ffn_gate_up, 2 * hidden * 1152 + 2 * 64 * (hidden + 2 * 1152));
      add(Operator::ffn_down, hidden * 1152 + 2 * 64 * (hidden + 1152));
      add(Operator::ffn_collect, all);
      continue;
    }
    add(Operator::router, hidden * 256 + 2 * 16 * (hidden + 256));
    add(Operator::ffn_dispatch, chosen);
    add(Operator::experts_gate_up, 2 * hits * hidden * 1024 + pairs * (hidden + 2 * 1024));
    add(Operator::experts_down, hits * hidden * 1024 + pairs * (hidden + 1024));
    add(Operator::shared_gate_up, 2 * hidden * 512 + 2 * 16 * (hidden + 2 * 512));
    add(Operator::shared_down, hidden * 512 + 2 * 16 * (hidden + 512));
    add(Operator::ffn_collect, chosen);
    add(Operator::ffn_all_reduce, own);
  }
  expected.push_back({Operator::final_norm, false, 1, 2 * own});
  expected.push_back({Operator::ffn_dispatch, false, 1, all});
  expected.push_back({Operator::lm_head, false, 1, 8080 * hidden + 2 * 64 * (hidden + 8080)});
  expected.push_back({Operator::sample_gather, false, 1, 8 * 64 * 16});

  REQUIRE(report.operators.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const OperatorTime& op = report.operators[i];
    INFO(i << ": " << to_string(op.op));
    CHECK(op.op == expected[i].op);
    CHECK(op.is_moe == expected[i].is_moe);
    CHECK(op.count == expected[i].count);
    CHECK(in_bytes(op.bytes) == Approx(expected[i].bytes).epsilon(1e-12));
  }

  // Between the domains, each rank sends one message in 16 to each of the 8 ranks of the other domain at 50
  // GB/s, which is the slower half; within TPA, a reduce-scatter and a gather of quarters.
  const auto time_us = [&](Operator op, bool is_moe) {
    return in_microseconds(find(report, op, is_moe).time);
  };
  CHECK(time_us(Operator::ffn_dispatch, false) == Approx(5 + 8 * all / 16 / 50e3));
  CHECK(time_us(Operator::ffn_collect, false) == Approx(5 + 8 * all / 16 / 50e3));
  CHECK(time_us(Operator::ffn_dispatch, true) == Approx(5 + 8 * chosen / 16 / 50e3));
  CHECK(time_us(Operator::ffn_collect, true) == Approx(5 + 8 * chosen / 16 / 50e3));
  CHECK(time_us(Operator::sample_gather, false) == Approx(5 + 8 * 8 * 64 / 50e3));
  CHECK(time_us(Operator::attention_all_reduce, true) == Approx(2 * (1 + 3 * own / 4 / 100e3)));
}

TEST_CASE("an exchange over two domains takes as long as that of the rank that is alone in one") {
  Hardware hardware = hardware_preset("gb200");
  hardware.nvlink_domain = 7;
  const StepModel step(model_preset("deepseek-v2-lite"), {}, hardware);
  const StepReport report =
      step.explain({.kvp = 8, .tpf = 1, .ep = 8, .hop_b_slices = 1}, {.context = tokens(1e5), .batch = 64});
  // 16 heads of 64 tokens, with 512 bf16 values and an f32 LSE each; an eighth goes to each of the 7 other
  // ranks.
  CHECK(in_microseconds(find(report, Operator::kvp_exchange).time) ==
        Approx(5 + 7.0 * 64 * 16 * (512 * 2 + 4) / 8 / 50e3));
}

TEST_CASE("a pipeline's sends cross domains only where its stages do") {
  const auto sends = [](int n, int stages, int domain = 8) {
    Hardware hardware = hardware_preset("gb200");
    hardware.nvlink_domain = domain;
    const StepModel step(model_preset("llama-3.1-405b"), kFp4, hardware);
    double inside = 0;
    double between = 0;
    for (const OperatorTime& op :
         step.explain({.kvp = n, .tpf = n, .pp = stages}, {.context = tokens(1e4)}).operators) {
      if (op.op != Operator::pipeline_send) continue;
      const bool is_slow = in_microseconds(op.time) > 5;
      (is_slow ? between : inside) += static_cast<double>(op.count);
    }
    return std::pair{inside, between};
  };
  CHECK(sends(8, 4) == std::pair{0.0, 3.0});
  CHECK(sends(2, 4) == std::pair{3.0, 0.0});
  CHECK(sends(4, 4) == std::pair{2.0, 1.0});
  // A stage of 16 ranks fills two domains. Two stages of 4 fit whole into a domain of 10, three of 2 into one
  // of 7: the collectives of a stage never leave its domain.
  CHECK(sends(16, 4) == std::pair{0.0, 3.0});
  CHECK(sends(4, 4, 10) == std::pair{2.0, 1.0});
  CHECK(sends(2, 8, 7) == std::pair{5.0, 2.0});
}

TEST_CASE("operators, bounds and costs have names of their own") {
  std::set<std::string_view> names;
  for (int i = 0; i <= static_cast<int>(Operator::pipeline_wait); ++i) {
    names.insert(to_string(static_cast<Operator>(i)));
  }
  for (int i = 0; i < kNumCosts; ++i) CHECK(to_string(static_cast<Cost>(i)) != "unknown");
  CHECK(names.size() == static_cast<std::size_t>(Operator::pipeline_wait) + 1);
  CHECK_FALSE(names.contains("unknown"));
}

TEST_CASE("each operator names the resource that bounds it") {
  const StepModel step(model_preset("deepseek-r1"), {}, hardware_preset("h200"));
  const StepReport report = step.explain({.kvp = 8, .tpf = 1, .ep = 8}, {.context = tokens(1e6), .batch = 8});
  CHECK(find(report, Operator::attention).bound == Bound::compute);  // 243 flops per byte
  CHECK(find(report, Operator::kvp_exchange).bound == Bound::network);
  CHECK(find(report, Operator::ffn_gate_up).bound == Bound::memory);
  CHECK(find(report, Operator::rope_append).bound == Bound::overhead);
  CHECK(find(report, Operator::attention).count == 3);
  CHECK(find(report, Operator::attention, true).count == 58);
}

TEST_CASE("each strategy communicates as it says") {
  const StepModel dense(model_preset("llama-3.1-405b"), kFp4, hardware_preset("gb200"));
  const Workload workload{.context = tokens(1e5), .batch = 16};
  Layout medha;
  medha.strategy = Strategy::medha;
  medha.kvp = 4;
  medha.tpa = medha.tpf = 8;
  const StepReport tied = dense.explain(medha, workload);
  CHECK(has(tied, Operator::hidden_broadcast));
  CHECK(find(tied, Operator::ffn_all_reduce).ranks == 8);
  CHECK(find(tied, Operator::kvp_exchange).hidden == Time{});
  // A fixed group of 8 ranks reads four times as many FFN weights as 32 ranks.
  const StepReport helix = dense.explain({.kvp = 4, .tpa = 8, .tpf = 32}, workload);
  CHECK(find(tied, Operator::ffn_down).bytes / find(helix, Operator::ffn_down).bytes ==
        Approx(4).epsilon(0.05));
  CHECK(find(helix, Operator::ffn_all_reduce).ranks == 32);

  const StepModel moe(model_preset("deepseek-r1"), kFp4, hardware_preset("gb200"));
  Layout spread;
  spread.strategy = Strategy::data_parallel_attention;
  spread.attn_dp = 16;
  spread.ep = 16;
  const StepReport dispatched = moe.explain(spread, workload);
  CHECK(has(dispatched, Operator::ffn_dispatch));
  CHECK_FALSE(has(dispatched, Operator::kvp_exchange));
  CHECK_FALSE(has(dispatched, Operator::attention_all_reduce));
  // 16 sequences on 16 ranks: each rank reads one whole sequence.
  CHECK(in_microseconds(find(dispatched, Operator::attention).time) ==
        Approx(1e5 * 576 / 2 / 8e6).epsilon(0.05));
}

TEST_CASE("windowed layers read their window only") {
  const StepModel step(model_preset("gpt-oss-120b"), {}, hardware_preset("roofline-8000"));
  const StepReport report = step.explain({}, {.context = tokens(131072)});
  double windowed = 0;
  double full = 0;
  for (const OperatorTime& op : report.operators) {
    if (op.op != Operator::attention) continue;
    CHECK(op.count == 18);
    (op.is_windowed ? windowed : full) = in_bytes(op.bytes);
  }
  CHECK(full / windowed > 800);
  CHECK(full / windowed < 1024);
  // The first of 5 query tokens sees 128 tokens back, the last one 4 more: K and V of 8 heads of 64, and the
  // query and output of 64 heads.
  const StepReport drafts = step.explain({}, {.context = tokens(131072), .step_tokens = 5});
  const auto at = std::find_if(drafts.operators.begin(), drafts.operators.end(), [](const OperatorTime& op) {
    return op.op == Operator::attention && op.is_windowed;
  });
  REQUIRE(at != drafts.operators.end());
  CHECK(in_bytes(at->bytes) == 2.0 * (132 * 2 * 8 * 64 + 5 * 64 * (64 + 64)));
}

TEST_CASE("where all layers are windowed, HOP-B's slices are theirs") {
  Model model = model_preset("llama-3.1-405b");
  model.window = 65536;
  const Layout layout{.kvp = 64, .tpf = 64};
  const Workload workload{.context = tokens(65536), .batch = 1024};
  const Precision precision{8, 8, 16};
  const int full_slices = StepModel(model, precision, hardware_preset("gb200"))
                              .evaluate(layout, workload)
                              .hop_b_slices;  // windows are as long as the context
  CHECK(full_slices > 1);
  model.full_attention_stride = 0;
  const StepReport report = StepModel(model, precision, hardware_preset("gb200")).explain(layout, workload);
  CHECK(find(report, Operator::kvp_exchange).is_windowed);
  CHECK(find(report, Operator::kvp_exchange).hidden > Time{});
  CHECK(report.totals.hop_b_slices == full_slices);
}

TEST_CASE("memory of a StepModel is that of plan_memory(), whatever layers its stages hold") {
  for (const char* name : {"deepseek-r1", "gpt-oss-120b", "llama-3.1-8b"}) {
    Model model = model_preset(name);
    const StepModel step(model, kFp4, hardware_preset("gb200"));
    for (const Layout& layout : some_layouts(model)) {
      const Workload workload{.context = tokens(5000), .batch = 7};
      REQUIRE(step.memory(layout, workload).total() == plan_memory(model, kFp4, layout, workload).total());
    }
  }
}

TEST_CASE("steps measured on four H200s are predicted within a tenth, uncalibrated") {
  // docs/measurements/steps.md: eight layers of Llama-405B in bf16, 8 sequences of 524288 tokens.
  Model model = model_preset("llama-3.1-405b");
  model.shape.num_layers = 8;
  model.shape.vocab = 0;
  const StepModel step(model, {}, hardware_preset("h200"));
  struct Row {
    int kvp;
    int tpa;
    int slices;
    double measured_ms;
  };
  for (const Row& row : {Row{4, 1, 1, 12.38}, Row{4, 1, 2, 12.64}, Row{2, 2, 1, 11.75}, Row{2, 2, 2, 11.97},
                         Row{1, 4, 1, 11.40}}) {
    const StepTotals totals =
        step.evaluate({.kvp = row.kvp, .tpa = row.tpa, .tpf = 4, .hop_b_slices = row.slices},
                      {.context = tokens(524288), .batch = 8});
    INFO(row.kvp << " x " << row.tpa << ", " << row.slices << " slices");
    CHECK(in_milliseconds(totals.ttl) == Approx(row.measured_ms).epsilon(0.1));
  }
}

TEST_CASE("attention and exchange measured on H200s are predicted within a tenth") {
  // docs/measurements/attention.md: one layer, bf16, 64 query heads over 8 KV heads of 128 on one GPU.
  struct Row {
    std::int64_t batch;
    double context;
    std::int64_t step_tokens;
    double measured_us;
  };
  Model model = model_preset("llama-3.1-70b");
  model.shape.num_layers = 1;
  const StepModel attention(model, {}, hardware_preset("h200"));
  for (const Row& row :
       {Row{64, 131072, 1, 7463.6}, Row{8, 131072, 1, 948.2}, Row{1, 1048576, 1, 942.1},
        Row{1, 131072, 1, 128.3}, Row{64, 66942, 1, 3822.9},  // ragged, with the same total number of tokens
        Row{8, 131072, 4, 978.5}, Row{8, 8192, 1, 69.4}, Row{1, 8192, 1, 15.6}, Row{64, 8192, 1, 480.1}}) {
    const StepReport report = attention.explain(
        {}, {.context = tokens(row.context), .batch = row.batch, .step_tokens = row.step_tokens});
    INFO(row.batch << " sequences of " << row.context << " tokens");
    CHECK(in_microseconds(find(report, Operator::attention).time) == Approx(row.measured_us).epsilon(0.1));
  }

  // 128 query heads of 128 over four GPUs.
  Model wide = model_preset("llama-3.1-405b");
  wide.shape.num_layers = 1;
  const StepModel exchange(wide, {}, hardware_preset("h200"));
  const std::vector<std::pair<std::int64_t, double>> rows{
      {1, 9.0}, {4, 9.6}, {16, 12.0}, {32, 16.0}, {64, 18.3}};
  for (const auto& [batch, measured_us] : rows) {
    const StepReport report =
        exchange.explain({.kvp = 4, .tpf = 4, .hop_b_slices = 1}, {.context = tokens(1000), .batch = batch});
    INFO(batch << " tokens");
    CHECK(in_microseconds(find(report, Operator::kvp_exchange).time +
                          find(report, Operator::lse_combine).time) == Approx(measured_us).epsilon(0.1));
  }
}

TEST_CASE("products of 4-bit elements that have scales run at the rate of 4 bits") {
  const Workload workload{.context = tokens(2000), .batch = 16384};
  const auto gate_up = [&](double bits) {
    const StepModel step(model_preset("llama-3.1-405b"), {bits, 4, bits}, hardware_preset("gb200"));
    return in_microseconds(find(step.explain({.kvp = 8, .tpf = 8}, workload), Operator::ffn_gate_up).time);
  };
  CHECK(gate_up(4.5) == Approx(gate_up(4)));
  CHECK(gate_up(4.25) == Approx(gate_up(4)));
  CHECK(gate_up(6) > 1.5 * gate_up(4));  // it has no rate of its own and uses that of 8
}

TEST_CASE("what cannot be timed is refused with the reason") {
  const StepModel step(model_preset("llama-3.1-8b"), {}, hardware_preset("h200"));
  const Workload workload{.context = tokens(1000)};
  const auto illegal = failure_of([&] { step.explain({.kvp = 3, .tpf = 3}, workload); });
  REQUIRE(illegal);
  CHECK(illegal->code == ErrorCode::invalid_topology);
  CHECK(illegal->says("num_query_heads 32"));
  Layout nameless;
  nameless.strategy = static_cast<Strategy>(9);
  CHECK_FALSE(is_legal(nameless, step.model()));
  const auto unknown = failure_of([&] { step.explain(nameless, workload); });
  REQUIRE(unknown);
  CHECK(unknown->code == ErrorCode::invalid_topology);
  CHECK(unknown->says("strategy is 9"));
  const auto empty = failure_of([&] { step.explain({}, {}); });
  REQUIRE(empty);
  CHECK(empty->says("context is 0"));
  const auto wide = failure_of([&] { StepModel(step.model(), {16, 16, 32}, step.hardware()); });
  REQUIRE(wide);
  CHECK(wide->code == ErrorCode::unsupported);
  CHECK(failure_of([&] { StepModel(Model{}, {}, step.hardware()); })->says("hidden is 0"));
}

TEST_CASE("each slice of attention costs its own overhead, which is counted as overhead") {
  Hardware hardware = hardware_preset("h200");
  hardware.attention_read = {};
  hardware.overheads.per_operator = microseconds(3);
  hardware.overheads.per_slice = microseconds(2);
  const StepModel model(model_preset("llama-3.1-8b"), {}, hardware);
  Layout layout;
  layout.kvp = layout.tpf = 2;
  layout.hop_b_slices = 4;
  Time overhead;
  for (const OperatorTime& op : model.explain(layout, {.context = tokens(1e5), .batch = 8}).operators) {
    if (op.op == Operator::attention) overhead = op.overhead;
  }
  CHECK(in_microseconds(overhead) == Approx(4 * (3 + 2)));
}

TEST_CASE("attention computes at the rate of its wider operand") {
  const auto attention = [](double kv_bits) {
    const StepModel model(model_preset("llama-3.1-8b"),
                          {.weight_bits = 16, .kv_bits = kv_bits, .activation_bits = 16},
                          hardware_preset("gb200"));
    Time time;
    // Many query tokens a sequence: bound by operations, not by bytes.
    for (const OperatorTime& op :
         model.explain({}, {.context = tokens(1e5), .step_tokens = 4096}).operators) {
      if (op.op == Operator::attention) time = op.time;
    }
    return in_microseconds(time);
  };
  CHECK(attention(4) == Approx(attention(16)));
}

}  // namespace
