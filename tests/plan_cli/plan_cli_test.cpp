// SPDX-License-Identifier: Apache-2.0
// helix-plan as a user runs it: tables, JSON, CSV, pictures, calibration, and one clear error for each
// invalid input; and helix-decode under the topology that the planner chooses.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include "hardware_source.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"
#include "support/process.hpp"

namespace {

using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using namespace helix::test;
using helix::ErrorCode;
namespace plan = helix::plan;
namespace plan_cli = helix::plan_cli;

Run run_plan(const std::string& arguments) {
  return run_command(HELIX_PLAN " " + arguments);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

const std::string kOneGpuResults = std::string(HELIX_BENCH_RESULTS) + "/NVIDIA-H200-2026-11-21.json";
const std::string kFourGpuResults = std::string(HELIX_BENCH_RESULTS) + "/NVIDIA-H200-x4-2026-11-21.json";

const std::string kRack =
    "--model llama-3.1-405b --hardware gb200 --gpus 64 --context 1000000 --weight-dtype fp4 --kv-dtype fp4 ";

TEST_CASE("the table shows layouts, memory, what bounds them, and why others lost") {
  const Run run = run_plan(kRack + "--ttl-ms 3 --frontier");
  INFO(run.output);
  REQUIRE(run.exit_code == 0);
  CHECK_THAT(run.output, ContainsSubstring("129.02 GB of KV a sequence"));
  CHECK_THAT(run.output, ContainsSubstring("best layouts by tokens/s/GPU"));
  CHECK_THAT(run.output, ContainsSubstring("helix KVP 8 x TPA 8, TPF 64 x EP 1"));
  CHECK_THAT(run.output, ContainsSubstring("bound by"));
  CHECK_THAT(run.output, ContainsSubstring("over the limit of 3 ms"));
  CHECK_THAT(run.output, ContainsSubstring("frontier of tokens/s/user"));
}

TEST_CASE("JSON and CSV agree, and the frontier is what brute force finds") {
  const ScratchDirectory scratch;
  const Run run = run_plan(kRack + "--json " + (scratch / "plan.json").string() + " --csv " +
                           (scratch / "plan.csv").string());
  INFO(run.output);
  REQUIRE(run.exit_code == 0);
  const json plan = json::parse(read_file(scratch / "plan.json"));
  const auto& best = plan.at("best");
  double cost_ms = 0;
  for (const auto& [name, ms] : best.at("cost_ms").items()) cost_ms += ms.get<double>();
  CHECK(cost_ms == Approx(best.at("ttl_ms").get<double>()));
  double operators_us = 0;
  for (const auto& op : best.at("operators")) {
    operators_us +=
        (op.at("us").get<double>() - op.at("hidden_us").get<double>()) * op.at("count").get<double>();
  }
  CHECK(operators_us == Approx(1e3 * best.at("ttl_ms").get<double>()));
  CHECK(plan.at("top")[0].at("ttl_ms") == best.at("ttl_ms"));

  const std::vector<std::string> lines = split(read_file(scratch / "plan.csv"), '\n');
  const auto& counts = plan.at("configurations");
  REQUIRE(static_cast<std::int64_t>(lines.size()) == 1 + counts.at("evaluated").get<std::int64_t>() -
                                                         counts.at("out_of_memory").get<std::int64_t>() -
                                                         counts.at("over_ttl").get<std::int64_t>());
  const std::vector<std::string> header = split(lines[0], ',');
  const auto column = [&](const std::string& name) {
    const auto at = std::find(header.begin(), header.end(), name);
    REQUIRE(at != header.end());
    return static_cast<std::size_t>(at - header.begin());
  };
  const std::size_t user = column("tokens_per_s_per_user");
  const std::size_t gpu = column("tokens_per_s_per_gpu");
  struct Row {
    double user, gpu, ttl_ms;
    bool on_frontier;
  };
  std::vector<Row> rows;
  for (std::size_t i = 1; i < lines.size(); ++i) {
    const std::vector<std::string> cells = split(lines[i], ',');
    REQUIRE(cells.size() == header.size());
    rows.push_back({std::stod(cells[user]), std::stod(cells[gpu]), std::stod(cells[column("ttl_ms")]),
                    cells[column("on_frontier")] == "1"});
  }
  std::size_t on_frontier = 0;
  for (const Row& row : rows) {
    CHECK(row.ttl_ms >= best.at("ttl_ms").get<double>() * (1 - 1e-12));
    on_frontier += row.on_frontier;
    const bool is_dominated = std::any_of(rows.begin(), rows.end(), [&](const Row& other) {
      return other.user >= row.user && other.gpu >= row.gpu && (other.user > row.user || other.gpu > row.gpu);
    });
    if (row.on_frontier) CHECK_FALSE(is_dominated);
    if (!is_dominated && !row.on_frontier) {  // only an equal row may represent it
      CHECK(std::any_of(rows.begin(), rows.end(), [&](const Row& other) {
        return other.on_frontier && other.user == row.user && other.gpu == row.gpu;
      }));
    }
  }
  CHECK(on_frontier == plan.at("frontier").size());
  CHECK(on_frontier > 2);
}

TEST_CASE("layouts with and without HOP-B are told apart in JSON and CSV") {
  const ScratchDirectory scratch;
  const Run run = run_plan(kRack + "--batch 1 --strategies helix --hop-b both --top 1000 --json " +
                           (scratch / "plan.json").string() + " --csv " + (scratch / "plan.csv").string());
  INFO(run.output);
  REQUIRE(run.exit_code == 0);
  std::map<std::string, int> requested;
  std::set<std::string> layouts;
  const json plan = json::parse(read_file(scratch / "plan.json"));
  for (const json& at : plan.at("top")) {
    ++requested[at.at("layout").at("hop_b")];
    CHECK(layouts.insert(at.at("layout").dump()).second);
  }
  CHECK(requested.size() == 2);
  CHECK(requested["off"] > requested["auto"]);  // also if there is no exchange
  CHECK(requested["auto"] > 10);
  for (const json& loss : plan.at("losses")) CHECK(loss.at("layout").contains("hop_b"));

  std::set<std::string> rows;
  const std::vector<std::string> lines = split(read_file(scratch / "plan.csv"), '\n');
  CHECK_THAT(lines[0], ContainsSubstring(",gpus,hop_b,hop_b_slices,"));
  for (std::size_t i = 1; i < lines.size(); ++i) {
    const std::vector<std::string> cells = split(lines[i], ',');
    REQUIRE(cells.size() == split(lines[0], ',').size());
    std::string row;  // the columns up to hop_b, one batch each
    for (std::size_t k = 0; k < 10; ++k) row += cells[k] + ",";
    CHECK(rows.insert(row).second);
  }
}

TEST_CASE("powers of two of GPUs and stages are searched, which help and report say") {
  const Run help = run_plan("--help");
  CHECK_THAT(help.output, ContainsSubstring("powers of two of GPUs and of pipeline stages are searched"));
  const Run run = run_plan("--model llama-3.1-8b --gpus 6 --context 1024");
  INFO(run.output);
  CHECK_THAT(run.output,
             ContainsSubstring("configurations on up to 6 GPUs, powers of two of GPUs and PP stages: "));
}

TEST_CASE("the bits of fp8_ds_mla are those of the model's rows") {
  const ScratchDirectory scratch;
  const auto plan_of = [&](const std::string& model, const std::string& printed) {
    const std::string file = (scratch / "plan.json").string();
    const Run run = run_plan("--gpus 8 --hardware gb200 --weight-dtype fp8 --kv-dtype fp8_ds_mla --model " +
                             model + " --json " + file);
    INFO(run.output);
    REQUIRE(run.exit_code == 0);
    CHECK_THAT(run.output, ContainsSubstring("KV " + printed + ", activations 16\n"));
    return json::parse(read_file(file)).at("bits").at("kv").get<double>();
  };
  CHECK(plan_of("deepseek-r1", "9.111") == 8.0 * 656 / 576);
  json config = json::parse(read_file(std::string(HELIX_TEST_DATA) + "/deepseek-v2-tiny/config.json"));
  config["kv_lora_rank"] = 256;
  write_file(scratch / "config.json", config.dump());
  // 256 columns of 8 bits, two scales of 4 bytes, 64 columns of 2 bytes.
  CHECK(plan_of((scratch / "config.json").string(), "9.8") == 8.0 * 392 / 320);
}

TEST_CASE("a machine from a file gives appendix A's KV time") {
  // 8 sequences of 1e6 tokens with 2 * 8 heads of 128 in 4 bits: 8.192 GB, which takes 1024 us per layer at
  // 8000 GB/s.
  const ScratchDirectory scratch;
  write_file(scratch / "machine.json",
             R"({"based_on": "roofline-8000", "name": "one large GPU", "memory_gb": 1e5})");
  const Run run = run_plan(
      "--model llama-3.1-405b --gpus 1 --batch 8 --context 1000000 --weight-dtype fp4 --kv-dtype "
      "fp4 --hardware " +
      (scratch / "machine.json").string() + " --json " + (scratch / "plan.json").string());
  INFO(run.output);
  REQUIRE(run.exit_code == 0);
  CHECK_THAT(run.output, ContainsSubstring("one large GPU"));
  double attention_us = 0;
  const json plan = json::parse(read_file(scratch / "plan.json"));
  for (const json& op : plan.at("best").at("operators")) {
    if (op.at("operator") == "attention") attention_us = op.at("us").get<double>();
  }
  CHECK(attention_us == Approx(1024.0).epsilon(1e-3));  // queries and outputs add a little
}

TEST_CASE("names from files are printed on one line, control characters as text") {
  const ScratchDirectory scratch;
  write_file(scratch / "machine.json",
             R"({"based_on": "h200", "name": "a\nb\u001b[31m", "source": "c\td\u0000e"})");
  const std::string model = (scratch / "f\ng").string();
  std::filesystem::copy(std::string(HELIX_TEST_DATA) + "/llama-tiny", model);
  const Run run = run_plan("--gpus 1 --context 1024 --hardware " + (scratch / "machine.json").string() +
                           " --model '" + model + "'");
  INFO(run.output);
  REQUIRE(run.exit_code == 0);
  CHECK_THAT(run.output, ContainsSubstring(R"(f\ng: )") && ContainsSubstring(R"(a\nb\x1b[31m: 141 GB)"));
  CHECK_THAT(run.output, ContainsSubstring(R"(; c\td\x00e)") && !ContainsSubstring("\x1b"));
}

TEST_CASE("a strategy that is named twice is searched once") {
  const ScratchDirectory scratch;
  const auto rows = [&](const std::string& strategies) {
    const std::string file = (scratch / "plan.csv").string();
    const Run run = run_plan("--model llama-3.1-8b --gpus 2 --context 1024 --strategies " + strategies +
                             " --csv " + file);
    INFO(run.output);
    REQUIRE(run.exit_code == 0);
    return read_file(file);
  };
  CHECK(rows("helix,helix") == rows("helix"));
  CHECK(rows("medha,helix,medha") == rows("medha,helix"));
}

TEST_CASE("a machine's file decides a plan's times") {
  const ScratchDirectory scratch;
  const std::string machine = R"({"name": "all of it", "source": "made up", "memory_gb": 200,
    "usable_memory_fraction": 0.5, "read_gb_per_s": [[1e6, 1000], [1e9, 5000]], "attention_gb_per_s": 4000,
    "peaks": [{"bits": 8, "tflops": 2000}, {"bits": 16, "tflops": 1000}], "nvlink_domain": 4,
    "inside": {"latency_us": 1, "gb_per_s": 400}, "outside": {"latency_us": 7, "gb_per_s": 40},
    "measured": [{"collective": "all_reduce", "ranks": 4, "points": [[1000, 7.5], [1e6, 12]]}],
    "overheads": {"per_operator_us": 1, "per_collective_us": 2, "per_layer_us": 3, "per_slice_us": 4, "per_step_us": 5}})";
  write_file(scratch / "machine.json", machine);
  const Run run =
      run_plan("--model llama-3.1-8b --gpus 4 --batch 1 --strategies tensor_parallel --hardware " +
               (scratch / "machine.json").string() + " --json " + (scratch / "plan.json").string());
  INFO(run.output);
  REQUIRE(run.exit_code == 0);
  CHECK_THAT(run.output, ContainsSubstring("200 GB a GPU, 100.0 usable; made up"));
  std::map<std::string, json> operators;
  const json plan = json::parse(read_file(scratch / "plan.json"));
  for (const json& op : plan.at("best").at("operators")) {
    operators[op.at("operator")] = op;
  }
  CHECK(operators.at("layer_overhead").at("us") == 3);
  CHECK(operators.at("step_overhead").at("us") == 5);
  CHECK(operators.at("attention").at("us").get<double>() ==
        Approx(operators.at("attention").at("bytes").get<double>() / 4e6));
  const json& all_reduce = operators.at("attention_all_reduce");  // 4096 * 2 bytes, between the two points
  CHECK(all_reduce.at("algorithm") == "measured");
  CHECK(all_reduce.at("us").get<double>() == Approx(2 + 7.5 + 4.5 * 7192 / 999000));
}

TEST_CASE("every value of a machine's file is where its key says") {
  const auto parse = [](const std::string& text) { return plan_cli::parse_hardware(text, "machine.json"); };
  const plan::Hardware hardware = parse(R"({"name": "all of it", "source": "made up", "memory_gb": 200,
    "usable_memory_fraction": 0.5, "read_gb_per_s": [[1e6, 1000], [1e9, 5000]],
    "attention_gb_per_s": [[2e6, 900], [2e9, 4000]],
    "peaks": [{"bits": 8, "tflops": 2000}, {"bits": 16, "tflops": 1000}], "nvlink_domain": 4,
    "inside": {"latency_us": 1, "gb_per_s": 400}, "outside": {"latency_us": 7, "gb_per_s": 40},
    "measured": [{"collective": "all_reduce", "ranks": 4, "points": [[1000, 7.5], [1e6, 12]]},
                 {"collective": "broadcast", "ranks": 2, "points": [[8, 3]]}],
    "overheads": {"per_operator_us": 1, "per_collective_us": 2, "per_layer_us": 3, "per_slice_us": 4,
                  "per_step_us": 5}})");
  CHECK(hardware.name == "all of it");
  CHECK(hardware.source == "made up");
  CHECK(hardware.memory == plan::gigabytes(200));
  CHECK(hardware.usable_memory_fraction == 0.5);
  const auto points = [](const plan::BandwidthCurve& curve) {
    std::vector<std::pair<double, double>> all;
    for (const auto& point : curve.points())
      all.emplace_back(in_bytes(point.size), in_gigabytes_per_second(point.bandwidth));
    return all;
  };
  CHECK(points(hardware.read) == std::vector<std::pair<double, double>>{{1e6, 1000}, {1e9, 5000}});
  CHECK(points(hardware.attention_read) == std::vector<std::pair<double, double>>{{2e6, 900}, {2e9, 4000}});
  REQUIRE(hardware.peaks.size() == 2);
  CHECK(hardware.peaks[0].bits == 8);
  CHECK(hardware.peaks[0].rate == plan::teraflops_per_second(2000));
  CHECK(hardware.peaks[1].bits == 16);
  CHECK(hardware.peaks[1].rate == plan::teraflops_per_second(1000));
  CHECK(hardware.nvlink_domain == 4);
  CHECK(hardware.inside.latency == plan::microseconds(1));
  CHECK(hardware.inside.bandwidth == plan::gigabytes_per_second(400));
  CHECK(hardware.outside.latency == plan::microseconds(7));
  CHECK(hardware.outside.bandwidth == plan::gigabytes_per_second(40));
  REQUIRE(hardware.measured.size() == 2);
  CHECK(hardware.measured[0].collective == plan::Collective::all_reduce);
  CHECK(hardware.measured[0].ranks == 4);
  REQUIRE(hardware.measured[0].points.size() == 2);
  CHECK(hardware.measured[0].points[0].size == plan::bytes(1000));
  CHECK(hardware.measured[0].points[0].time == plan::microseconds(7.5));
  CHECK(hardware.measured[0].points[1].size == plan::bytes(1e6));
  CHECK(hardware.measured[0].points[1].time == plan::microseconds(12));
  CHECK(hardware.measured[1].collective == plan::Collective::broadcast);
  CHECK(hardware.measured[1].ranks == 2);
  CHECK(hardware.overheads.per_operator == plan::microseconds(1));
  CHECK(hardware.overheads.per_collective == plan::microseconds(2));
  CHECK(hardware.overheads.per_layer == plan::microseconds(3));
  CHECK(hardware.overheads.per_slice == plan::microseconds(4));
  CHECK(hardware.overheads.per_step == plan::microseconds(5));

  const plan::Hardware base = plan::hardware_preset("h200");
  const plan::Hardware flat = parse(R"({"based_on": "h200", "read_gb_per_s": 3000})");
  CHECK(points(flat.read) == std::vector<std::pair<double, double>>{{0, 3000}});
  CHECK(points(flat.attention_read) == points(base.attention_read));
  CHECK(flat.name == "machine.json");
  CHECK(flat.source == "machine.json");
  CHECK(flat.memory == base.memory);
  CHECK(flat.nvlink_domain == base.nvlink_domain);
  CHECK(flat.inside.latency == base.inside.latency);
  CHECK(flat.measured.size() == base.measured.size());
  CHECK(flat.overheads.per_slice == base.overheads.per_slice);
}

TEST_CASE("a config.json and a checkpoint's folder are models") {
  const std::string folder = std::string(HELIX_TEST_DATA) + "/deepseek-tiny";
  for (const std::string& model : {folder, folder + "/config.json"}) {
    const Run run = run_plan("--model " + model + " --gpus 4 --context 1024");
    INFO(run.output);
    CHECK(run.exit_code == 0);
    CHECK_THAT(run.output,
               ContainsSubstring("experts_gate_up (MoE)") && ContainsSubstring("value_up_projection"));
  }
}

TEST_CASE("windowed layers take the same time in any order, and less than full ones") {
  const ScratchDirectory scratch;
  const auto milliseconds = [&](const json& layer_types) {
    const json config = {{"model_type", "qwen3"},     {"hidden_size", 1024},
                         {"intermediate_size", 3072}, {"num_hidden_layers", 4},
                         {"num_attention_heads", 16}, {"num_key_value_heads", 8},
                         {"vocab_size", 1000},        {"use_sliding_window", true},
                         {"sliding_window", 128},     {"layer_types", layer_types}};
    write_file(scratch / "config.json", config.dump());
    const std::string plan = (scratch / "plan.json").string();
    const Run run = run_plan("--model " + (scratch / "config.json").string() +
                             " --gpus 1 --context 1e6 --batch 1 --json " + plan);
    INFO(run.output);
    REQUIRE(run.exit_code == 0);
    return json::parse(read_file(plan)).at("best").at("ttl_ms").get<double>();
  };
  const std::string full = "full_attention";
  const std::string windowed = "sliding_attention";
  const double periodic = milliseconds({windowed, full, windowed, full});
  CHECK(milliseconds({full, windowed, windowed, full}) == periodic);
  CHECK(milliseconds({full, full, windowed, windowed}) == periodic);
  CHECK(milliseconds({full, windowed, full, full}) > periodic);
  CHECK(milliseconds({windowed, windowed, windowed, windowed}) < periodic);
}

TEST_CASE("report and timeline of a model whose layers are all windowed show its HOP-B") {
  const ScratchDirectory scratch;
  const auto plan = [&](const std::string& arguments) {
    const json config = {{"model_type", "qwen3"},
                         {"hidden_size", 8192},
                         {"intermediate_size", 8192},
                         {"num_hidden_layers", 1},
                         {"num_attention_heads", 64},
                         {"num_key_value_heads", 1},
                         {"head_dim", 128},
                         {"vocab_size", 1000},
                         {"use_sliding_window", true},
                         {"sliding_window", 16384},
                         {"layer_types", {"sliding_attention"}}};
    write_file(scratch / "config.json", config.dump());
    Run run = run_plan("--model " + (scratch / "config.json").string() +
                       " --gpus 8 --hardware gb200 --context 1e5 --strategies helix --pictures " +
                       scratch.path().string() + arguments);
    INFO(run.output);
    REQUIRE(run.exit_code == 0);
    return run.output;
  };
  std::smatch slices;
  const std::string many = plan(" --batch 1024");
  INFO(many);
  REQUIRE(std::regex_search(many, slices, std::regex("HOP-B in ([0-9]+) slices")));
  std::string timeline = read_file(scratch / "timeline.svg");
  CHECK_THAT(timeline, ContainsSubstring("with HOP-B in " + slices[1].str() + " slices"));
  const auto bars = [&] {
    const std::regex bar("<rect");
    return std::distance(std::sregex_iterator(timeline.begin(), timeline.end(), bar), std::sregex_iterator());
  };
  CHECK(bars() > 20 + 2 * std::stoi(slices[1].str()));
  plan(" --batch 1");  // one sequence cannot be two slices
  timeline = read_file(scratch / "timeline.svg");
  CHECK_THAT(timeline, ContainsSubstring("with HOP-B in 1 slice: ") && !ContainsSubstring("HOP-B 8"));
  CHECK(bars() > 20);
}

/// Rows of --check by case: the measured time, the predicted time, and whether the row is marked.
struct CheckRow {
  double measured_us, predicted_us;
  bool is_marked;
};

std::map<std::string, CheckRow> check_rows(const std::string& files) {
  const Run run = run_plan(files);
  INFO(run.output);
  REQUIRE(run.exit_code == 0);
  std::map<std::string, CheckRow> rows;
  const std::regex line(R"(\| ([^|]+) \| ([0-9.]+) \| ([0-9.]+) \| [^|]* %? \| ([^|]*) ?\|)");
  for (const std::string& text : split(run.output, '\n')) {
    std::smatch match;
    if (std::regex_match(text, match, line)) {
      rows[match[1]] = {std::stod(match[2]), std::stod(match[3]), match[4].str().find("above") == 0};
    }
  }
  return rows;
}

TEST_CASE("calibrated by single operators, whole steps are predicted within 10 percent") {
  const auto rows = check_rows("--check " + kOneGpuResults + " --check " + kFourGpuResults);
  REQUIRE(rows.size() > 30);
  int steps = 0;
  for (const auto& [name, row] : rows) {
    INFO(name);
    const double error = std::abs(row.predicted_us / row.measured_us - 1);
    // Except near 0.1, because the table is rounded.
    if (std::abs(error - 0.1) > 1e-3) CHECK((error > 0.1) == row.is_marked);
    if (name.starts_with("decode_layer")) {
      ++steps;
      CHECK(error < 0.1);
    }
  }
  CHECK(steps >= 8);
}

TEST_CASE("every file of results calibrates: an H200 stays one, small reads and other kernels told apart") {
  const ScratchDirectory scratch;
  const auto ttl_ms = [&](const std::string& calibration) {
    const std::string file = (scratch / "plan.json").string();
    const Run run =
        run_plan("--model llama-3.1-70b --gpus 8 --batch 8 --context 131072 --strategies helix --json " +
                 file + calibration);
    INFO(run.output);
    REQUIRE(run.exit_code == 0);
    return json::parse(read_file(file)).at("best").at("ttl_ms").get<double>();
  };
  const double preset = ttl_ms("");
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(HELIX_BENCH_RESULTS)) {
    const std::string file = entry.path().string();
    INFO(file);
    CHECK(ttl_ms(" --calibrate " + file) == Approx(preset).epsilon(0.1));
    const auto rows = check_rows("--check " + file);
    if (rows.size() < 15) continue;  // results of kernels that the model does not predict
    ++files;
    const auto far = std::count_if(rows.begin(), rows.end(), [](const auto& row) {
      return std::abs(row.second.predicted_us / row.second.measured_us - 1) > 0.1;
    });
    CHECK(5 * far < static_cast<std::ptrdiff_t>(rows.size()));
  }
  CHECK(files >= 4);
}

TEST_CASE("a prediction does not depend on what it predicts") {
  const std::string one = "--check " + kOneGpuResults + " --check ";
  const auto before = check_rows(one + kFourGpuResults);
  for (const std::string slow : {"decode_layer", "exchange/kvp:4/tokens:16/"}) {
    const ScratchDirectory scratch;
    json results = json::parse(read_file(kFourGpuResults));
    for (json& at : results["benchmarks"]) {
      if (at["name"].get<std::string>().starts_with(slow)) at["us"] = 2 * at["us"].get<double>();
    }
    write_file(scratch / "slow.json", results.dump());
    const auto after = check_rows(one + (scratch / "slow.json").string());
    REQUIRE(after.size() == before.size());
    int slowed = 0;
    for (const auto& [name, row] : after) {
      if (!name.starts_with(slow)) continue;
      INFO(name);
      CHECK(row.predicted_us == before.at(name).predicted_us);
      slowed += row.measured_us > 1.9 * before.at(name).measured_us;
    }
    CHECK(slowed >= 1);
  }
}

TEST_CASE("measurements change a plan's machine") {
  const Run run = run_plan("--model llama-3.1-70b --gpus 4 --calibrate " + kOneGpuResults + " --calibrate " +
                           kFourGpuResults);
  INFO(run.output);
  CHECK(run.exit_code == 0);
  CHECK_THAT(run.output, ContainsSubstring("h200, calibrated") && ContainsSubstring("measured over 4 ranks"));
}

/// Whether tags nest, attributes are quoted and text is escaped: the only XML that a picture may use.
bool is_well_formed(const std::string& xml) {
  const std::regex tag(R"(<(/?)([a-z]+)((?: [A-Za-z0-9-]+="[^"<&]*")*)(/?)>)");
  std::vector<std::string> open;
  std::size_t at = 0;
  bool has_root = false;
  for (std::sregex_iterator match(xml.begin(), xml.end(), tag), end; match != end; ++match) {
    const std::string between = xml.substr(at, static_cast<std::size_t>(match->position()) - at);
    if (between.find_first_of("<>") != std::string::npos) return false;
    if (std::regex_search(between, std::regex("&(?!amp;|lt;|gt;)"))) return false;
    at = static_cast<std::size_t>(match->position() + match->length());
    if ((*match)[1].length() > 0) {
      if (open.empty() || open.back() != (*match)[2]) return false;
      open.pop_back();
    } else if ((*match)[4].length() == 0) {
      if (open.empty() && has_root) return false;
      has_root = true;
      open.push_back((*match)[2]);
    }
  }
  return has_root && open.empty() && xml.substr(at) == "\n";
}

TEST_CASE("the check of XML sees what is broken") {
  CHECK(is_well_formed("<svg a=\"1\"><text>a &lt; b</text><rect x=\"2\"/></svg>\n"));
  CHECK_FALSE(is_well_formed("<svg><text></svg></text>\n"));
  CHECK_FALSE(is_well_formed("<svg>a & b</svg>\n"));
  CHECK_FALSE(is_well_formed("<svg>a < b</svg>\n"));
  CHECK_FALSE(is_well_formed("<svg a=1></svg>\n"));
}

TEST_CASE("pictures are well-formed, whatever the machine is called") {
  const ScratchDirectory scratch;
  write_file(scratch / "machine.json", R"({"based_on": "gb200", "name": "<b>&\"\u00e9"})");
  const Run run = run_plan(
      "--model llama-3.1-405b --gpus 64 --context 1000000 --weight-dtype fp4 --kv-dtype fp4 "
      "--ttl-ms 3 --hardware " +
      (scratch / "machine.json").string() + " --pictures " + (scratch / "new/folder").string());
  INFO(run.output);
  REQUIRE(run.exit_code == 0);
  for (const char* name : {"roofline.svg", "frontier.svg", "timeline.svg"}) {
    INFO(name);
    const std::string svg = read_file(scratch / "new/folder" / name);
    CHECK(is_well_formed(svg));
    CHECK_THAT(svg, ContainsSubstring("&lt;b&gt;&amp;") || !ContainsSubstring("llama"));
    CHECK_THAT(svg, !ContainsSubstring("nan") && !ContainsSubstring("inf\""));
  }
  CHECK_THAT(read_file(scratch / "new/folder/timeline.svg"),
             ContainsSubstring("without HOP-B") && ContainsSubstring("with HOP-B in 4 slices"));
}

void check_refused(const std::vector<BadInput>& cases) {
  helix::test::check_refused(HELIX_PLAN, "helix-plan", cases);
}

const std::string kLlama = "--model llama-3.1-8b ";

TEST_CASE("bad input gives one clear error and a non-zero exit") {
  const ScratchDirectory files;
  check_refused({
      {"", {"--model", "required"}},
      {"--model gpt-17", {"gpt-17", "llama-3.1-405b"}},
      {kLlama + "--frontier=5", {"--frontier takes no value, and is given '5'; give --frontier alone"}},
      {kLlama + "--replicas=no", {"--replicas takes no value, and is given 'no'"}},
      {"--model /nowhere/config.json", {"/nowhere/config.json", "no such file"}},
      {"--model " + files.write("model.json", "{\"model_type\": \"llama\""), {"model.json", "JSON"}},
      {"--model " + files.write("rnn.json", "{\"model_type\": \"rnn\"}"), {"rnn.json", "rnn"}},
      {kLlama + "--hardware abacus", {"abacus", "h200", "gb200"}},
      {kLlama + "--hardware /nowhere.json", {"/nowhere.json", "No such file"}},
      {kLlama + "--gpus 0", {"--gpus", "0"}},
      {kLlama + "--gpus 99999999", {"--gpus", "99999999"}},
      {kLlama + "--gpus four", {"--gpus", "four"}},
      {kLlama + "--context 0", {"--context", "0"}},
      {kLlama + "--context 99999999999999999", {"--context"}},
      {kLlama + "--batch -1", {"--batch", "-1"}},
      {kLlama + "--ttl-ms 0", {"--ttl-ms", "0", "positive"}},
      {kLlama + "--ttl-ms nan", {"--ttl-ms", "nan", "positive"}},
      {kLlama + "--ttl-ms 0.0001", {"0.0001 ms", "fastest"}},
      {kLlama + "--kv-dtype fp3", {"--kv-dtype", "fp3", "bf16"}},
      {kLlama + "--kv-dtype fp8_ds_mla", {"fp8_ds_mla", "no latent attention"}},
      {kLlama + "--weight-dtype fp8_ds_mla", {"--weight-dtype", "fp8_ds_mla"}},
      {kLlama + "--weight-dtype f32", {"h200", "32 bits"}},
      {kLlama + "--strategies luck", {"--strategies", "luck"}},
      {kLlama + "--unheard-of", {"--unheard-of"}},
      {"--model llama-3.1-405b --gpus 1", {"fits", "879", "126.9", "more GPUs"}},
      {kLlama + "--context 4000000000 --gpus 8", {"fits"}},
      {"--check " + kFourGpuResults + " --model llama-3.1-8b", {"--check", "--model"}},
      {"--check " + kFourGpuResults + " --gpus 8", {"--check", "--gpus"}},
      {"--check " + kFourGpuResults + " --context 1M", {"--check", "--context"}},
      {"--check " + kFourGpuResults + " --frontier", {"--check", "--frontier"}},
      {kLlama + "--json /nowhere/plan.json", {"/nowhere/plan.json", "written"}},
      {kLlama + "--pictures /proc/none", {"/proc/none"}},
      {kLlama + "--batch 64 --max-batch 8", {"--batch", "--max-batch"}},
      {kLlama + "--json /tmp/helix-plan.out --csv /tmp/../tmp/helix-plan.out", {"--json and --csv are both"}},
      {"--model \"$(printf 'a\\nb\\033[31m')\"", {R"("a\nb\x1b[31m")"}},
  });
}

TEST_CASE("an output that would replace an input or another output is refused, and changes nothing") {
  const ScratchDirectory files;
  const std::string tiny = std::string(HELIX_TEST_DATA) + "/llama-tiny/config.json";
  const std::string config = files.write("config.json", read_file(tiny));
  const std::string machine = files.write("machine.json", R"({"based_on": "h200"})");
  const std::string results = files.write("results.json", read_file(kOneGpuResults));
  const std::string folder = files.path().string();
  const std::string link = (files / "link.json").string();
  std::filesystem::create_hard_link(config, link);
  const std::string plan = "--gpus 1 --context 1024 --model ";
  check_refused({
      {plan + config + " --json " + config, {"--model and --json are both " + config, "a file of its own"}},
      {plan + folder + " --csv " + config, {"--model and --csv are both"}},
      {plan + config + " --csv " + link, {"--model and --csv are both"}},
      {plan + config + " --hardware " + machine + " --json " + folder + "/../" +
           files.path().filename().string() + "/machine.json",
       {"--hardware and --json are both"}},
      {plan + config + " --calibrate " + results + " --csv " + results, {"--calibrate and --csv are both"}},
      {plan + config + " --pictures " + folder + "/pp --csv " + folder + "/pp/frontier.svg",
       {"--csv and frontier.svg of --pictures are both"}},
      {plan + config + " --pictures " + folder + "/pp --json " + folder + "/pp",
       {"--json and --pictures are both"}},
  });
  CHECK(read_file(config) == read_file(tiny));
  CHECK(read_file(machine) == R"({"based_on": "h200"})");
  CHECK(read_file(results) == read_file(kOneGpuResults));
  CHECK_FALSE(std::filesystem::exists(files / "pp"));
  CHECK(run_plan(plan + config + " --json /dev/null --csv /dev/null").exit_code == 0);
}

TEST_CASE("a description of hardware that is broken or absurd gives one clear error") {
  const ScratchDirectory files;
  const auto machine = [&](const std::string& name, const std::string& text) {
    return kLlama + "--hardware " + files.write(name + ".json", text);
  };
  const std::string deep(100, '[');
  check_refused({
      {machine("truncated", R"({"name": "x", "memory_gb": 1)"), {"truncated.json", "JSON"}},
      {machine("empty", ""), {"empty.json", "JSON"}},
      {machine("bytes", std::string("\x00\xff\x1b[31m", 7)), {"bytes.json", "JSON"}},
      {machine("deep", deep), {"deep.json", "nested"}},
      {machine("twice", R"({"name": "x", "name": "y"})"), {"twice.json", "'name'", "twice"}},
      {machine("list", "[]"), {"list.json", "object", "array"}},
      {machine("unknown", R"({"based_on": "h200", "memory": 1})"), {"unknown.json", "'memory'"}},
      {machine("preset", R"({"based_on": "abacus"})"), {"preset.json: based_on", "abacus", "h200"}},
      {machine("nothing", "{}"), {"nothing.json", "memory_gb", "missing", "based_on"}},
      {machine("named", R"({"name": "z"})"), {"named.json", "\"memory_gb\" is missing"}},
      {machine("memory", R"({"memory_gb": 9})"), {"memory.json", "\"read_gb_per_s\" is missing"}},
      {machine("slow", R"({"memory_gb": 9, "read_gb_per_s": 9})"), {"slow.json", "\"peaks\" is missing"}},
      {machine("text", R"({"based_on": "h200", "memory_gb": "much"})"), {"memory_gb", "number", "string"}},
      {machine("negative", R"({"based_on": "h200", "memory_gb": -1})"),
       {"negative.json: memory_gb: is -1; it must be positive"}},
      {machine("part", R"({"based_on": "h200", "usable_memory_fraction": 2})"),
       {"part.json", "usable_memory_fraction is 2"}},
      {machine("zero", R"({"based_on": "h200", "read_gb_per_s": 0})"),
       {"zero.json", "read_gb_per_s", "positive"}},
      {machine("tiny", R"({"based_on": "h200", "peaks": [{"bits": 16, "tflops": 1e-308}]})"),
       {"tflops", "1e-308"}},
      {machine("huge", R"({"based_on": "h200", "memory_gb": 1e300})"), {"memory_gb", "1e+300"}},
      {machine("curve", R"({"based_on": "h200", "attention_gb_per_s": [[2, 1], [1, 1]]})"),
       {"curve.json", "attention_gb_per_s", "sort"}},
      {machine("pair", R"({"based_on": "h200", "read_gb_per_s": [[2]]})"), {"read_gb_per_s", "pairs"}},
      {machine("domain", R"({"based_on": "h200", "nvlink_domain": 1.5})"), {"nvlink_domain", "1.5"}},
      {machine("link", R"({"based_on": "h200", "inside": {"latency_us": 1}})"), {"inside", "gb_per_s"}},
      {machine("collective",
               R"({"based_on": "h200", "measured": [{"collective": "hug", "ranks": 2, "points": []}]})"),
       {"'hug'", "all_reduce"}},
      {machine(
           "ranks",
           R"({"based_on": "h200", "measured": [{"collective": "send", "ranks": 1, "points": [[1, 1]]}]})"),
       {"send", "1 ranks"}},
      {machine("repeated",
               R"({"based_on": "h200", "measured": [{"collective": "send", "ranks": 2, "points": [[1, 1]]},
                                                {"collective": "send", "ranks": 2, "points": [[2, 2]]}]})"),
       {"send over 2 ranks", "twice"}},
      {machine("overheads", R"({"based_on": "h200", "overheads": {"per_operator_us": -1}})"),
       {"overheads.json: overheads: per_operator_us: is -1; it must not be negative"}},
      {machine("early", R"({"based_on": "h200", "outside": {"latency_us": -2, "gb_per_s": 1}})"),
       {"early.json: outside: latency_us: is -2; it must not be negative"}},
      {machine("still", R"({"based_on": "h200", "inside": {"latency_us": 2, "gb_per_s": 0}})"),
       {"still.json: inside: gb_per_s: is 0; it must be positive"}},
      {machine("alone", R"({"name": "my-cluster", "based_on": "h200", "nvlink_domain": 0})"),
       {"alone.json: hardware my-cluster: nvlink_domain is 0"}},
  });
  const auto failure =
      failure_of([] { plan_cli::parse_hardware(R"({"based_on": "h200", "peaks": []})", "no-peaks.json"); });
  REQUIRE(failure);
  CHECK(failure->code == ErrorCode::invalid_file);
  CHECK(failure->says("no-peaks.json: hardware no-peaks.json: no throughput"));
}

TEST_CASE("results of benchmarks that are broken or no results give one clear error") {
  const ScratchDirectory files;
  const std::string results = read_file(kFourGpuResults);
  check_refused({
      {kLlama + "--calibrate " + files.write("no-results.json", "{}"), {"no-results.json", "benchmarks"}},
      {kLlama + "--calibrate " + files.write("none.json", R"({"benchmarks": []})"),
       {"none.json", "succeeded"}},
      {kLlama + "--calibrate " + files.write("cut.json", results.substr(0, results.size() / 2)),
       {"cut.json", "JSON"}},
      {kLlama + "--calibrate " +
           files.write("other.json", R"({"benchmarks": [{"name": "sort/1", "us": 3}]})"),
       {"other.json: neither reads nor collectives to calibrate with", "bench/run_gpu.sh"}},
      {kLlama + "--calibrate " +
           files.write("zero-time.json", R"({"benchmarks": [{"name": "rms_norm/1", "bytes": 8,
         "read_bytes/s": 0}]})"),
       {"zero-time.json: case 'rms_norm/1': its counter \"read_bytes/s\""}},
      {"--check " + files.write("wild.json",
                                R"({"benchmarks": [{"name": "decode_layer/kvp:x/tpa:1/batch:8", "us": 3}]})"),
       {"decode_layer", "kvp"}},
      {"--check " + files.write("heads.json",
                                R"({"benchmarks": [{"name": "partial_attention/batch:8/queries:1", "us": 3,
         "bytes/s": 4, "read_bytes/s": 4}]})"),
       {"partial_attention", "heads"}},
      {"--check " +
           files.write("hop.json",
                       R"({"benchmarks": [{"name": "decode_layer/kvp:1/tpa:1/layers:2/batch:8/context:99",
         "us": 3, "read_bytes/s": 4, "bytes": 9}, {"name": "rms_norm/1", "us": 2, "bytes": 8, "read_bytes/s": 9}]})"),
       {"hop.json", "decode_layer", "hop_b"}},
      {"--check " +
           files.write("odd.json", R"({"benchmarks": [{"name": "exchange/kvp:2/tokens:1/heads:129/dim:128",
         "us": 9, "bytes": 9e4}, {"name": "exchange/kvp:2/tokens:2/heads:128/dim:128", "us": 9, "bytes": 9e4}]})"),
       {"odd.json: case 'exchange/kvp:2/tokens:1/heads:129/dim:128': ", "129"}},
  });
  const Run one = run_plan("--check " + files.write("one.json", R"({"benchmarks": [
         {"name": "exchange/kvp:2/tokens:1/heads:128/dim:128", "us": 9, "bytes": 33280}]})"));
  INFO(one.output);
  CHECK(one.exit_code == 0);
  CHECK_THAT(one.output, ContainsSubstring("1 of 1 rows"));
}

TEST_CASE("counts may have suffixes and exponents, and a wrong one is named") {
  const Run run = run_plan(kLlama + "--context 128K --gpus 8e0 --max-batch 0.5K --top 1");
  INFO(run.output);
  CHECK(run.exit_code == 0);
  CHECK_THAT(run.output, ContainsSubstring("context 131072 tokens"));
  check_refused({{kLlama + "--context 128kB", {"--context", "'128kB' is no count"}},
                 {kLlama + "--context 1e40", {"--context", "'1e40' is too large"}},
                 {kLlama + "--gpus 1.5", {"--gpus", "'1.5' is not whole"}},
                 {kLlama + "--gpus -8", {"--gpus", "-8"}},
                 {kLlama + "--max-bach 8", {"--max-bach is unknown; did you mean --max-batch?"}}});
}

TEST_CASE("the version is one line") {
  const Run run = run_plan("--version");
  CHECK(run.exit_code == 0);
  CHECK_THAT(run.output, Catch::Matchers::StartsWith("helix-plan ") && ContainsSubstring("CUDA: "));
}

TEST_CASE("errors go to standard error alone") {
  const Run run = run_command("sh -c '" HELIX_PLAN " --model gpt-17 2> /dev/null'");
  CHECK(run.exit_code == 1);
  CHECK(run.output.empty());
}

TEST_CASE("helix-decode under the planner's topology gives the golden tokens on 1, 2 and 4 ranks") {
  for (const std::string name : {"llama-tiny", "deepseek-tiny", "deepseek-v2-tiny"}) {
    const std::string folder = std::string(HELIX_TEST_DATA) + "/" + name;
    const json golden = json::parse(read_file(folder + "/golden.json"));
    const ScratchDirectory scratch;
    write_file(scratch / "prompts.json", golden.at("prompt").dump());
    const std::string arguments =
        " --model " + folder +
        " --topology auto --kv-dtype f32 --activation f32 --ignore-eos --max-new-tokens 24 --prompts " +
        (scratch / "prompts.json").string() + " --json " + (scratch / "report.json").string();
    const auto check = [&](int ranks, const std::string& command) {
      const Run run = run_command(command);
      INFO(name << ", " << ranks << " ranks\n" << run.output);
      REQUIRE(run.exit_code == 0);
      const json report = json::parse(read_file(scratch / "report.json"));
      CHECK(report.at("topology").at("world_size") == ranks);
      for (std::size_t i = 0; i < golden.at("greedy").size(); ++i) {
        CHECK(report.at("sequences")[i].at("tokens") == golden.at("greedy")[i]);
      }
    };
    for (const int ranks : {1, 2, 4})
      check(ranks, HELIX_DECODE + arguments + " --ranks " + std::to_string(ranks));
#ifdef HELIX_MPIRUN
    check(4, HELIX_MPIRUN " " HELIX_DECODE + arguments);
#endif
  }
}

TEST_CASE("helix-decode refuses an automatic topology beside a given one, and ranks that it cannot have") {
  const std::string decode =
      std::string(HELIX_DECODE) + " --prompt-ids 1,2,3 --model " + HELIX_TEST_DATA + "/llama-tiny ";
  const auto fails_with = [&](const std::string& arguments, const std::string& words) {
    const Run run = run_command(decode + arguments);
    INFO(arguments << "\n" << run.output);
    CHECK(run.exit_code == 1);
    CHECK_THAT(run.output, ContainsSubstring(words));
  };
  fails_with("--topology auto --ranks 4 --kvp 2", "--kvp");
  fails_with("--ranks 4", "--topology auto");
  fails_with("--topology auto --ranks 0", "--ranks");
  fails_with("--topology auto --ranks 7",
             "no topology of 7 ranks is legal for this model; the nearest number that has one is 8");
}

TEST_CASE("output that cannot be written is an error and leaves no half of a file") {
  const ScratchDirectory scratch;
  const std::string plan = "$P --model llama-3.1-8b ";
  const auto run_script = [](const std::string& script) {
    return run_command("sh -c '" + replaced(script, "$P", HELIX_PLAN) + "'", 60);
  };
  for (const std::string size :
       {"--top 1 ", "--top 1000 --frontier "}) {  // within the stream's buffer, and beyond it
    const Run lost = run_script(plan + size + "> /dev/full");
    CHECK(lost.exit_code == 1);
    CHECK(lost.output == "helix-plan: standard output cannot be written: No space left on device\n");
  }
  const std::string folder = (scratch / "out").string();
  std::filesystem::create_directory(folder);
  for (const char* option : {"--json ", "--csv ", "--pictures "}) {
    // No block may be written: write() fails as on a full disk.
    const Run full = run_script("trap \"\" XFSZ; ulimit -f 0; " + plan + option + folder +
                                (std::string(option) == "--pictures " ? "" : "/file"));
    INFO(full.output);
    CHECK(full.exit_code == 1);
    CHECK_THAT(full.output, ContainsSubstring("cannot be written"));
    CHECK(std::filesystem::is_empty(folder));
  }
  const Run early = run_script(plan + "--pictures /dev/null/pictures");
  CHECK(early.exit_code == 1);
  CHECK_THAT(early.output, ContainsSubstring("/dev/null/pictures"));
}

TEST_CASE("files that wait or claim absurd sizes are refused") {
  const ScratchDirectory scratch;
  const std::string fifo = (scratch / "fifo.json").string();
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  for (const std::string option : {"--hardware ", "--calibrate ", "--check "}) {
    const Run run = run_plan((option == "--check " ? "" : "--model llama-3.1-8b ") + option + fifo);
    INFO(run.output);
    CHECK(run.exit_code == 1);
    CHECK_THAT(run.output, ContainsSubstring("a FIFO"));
  }
  const auto calibrate = [&](const std::string& name) {
    write_file(scratch / "bench.json", R"({"benchmarks":[{"name":")" + name +
                                           R"(","us":1,"all_reduce_us":1,"exchange_us":1,"bytes":1}]})");
    return run_plan("--model llama-3.1-8b --calibrate " + (scratch / "bench.json").string());
  };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"decode_layer/kvp:1099511627776/tpa:1099511627776/batch:1", "not a whole number of 1 to 65536"},
      {"decode_layer/kvp:65536/tpa:65536/batch:1", "kvp * tpa is 4294967296"},
      {"decode_layer/kvp:2/tpa:2/batch:1099511627776", "not a whole number of 1 to 1048576"},
      {"exchange/kvp:4294967298", "not a whole number of 1 to 65536"}};
  for (const auto& [name, says] : cases) {
    const Run run = calibrate(name);
    INFO(run.output);
    CHECK(run.exit_code == 1);
    CHECK_THAT(run.output, ContainsSubstring(says));
  }
  // Each case that is predicted is left out of its own calibration.
  std::string many;
  for (int i = 1; i <= 13'000; ++i) {
    const std::string number = std::to_string(i);
    many += std::string(many.empty() ? "" : ",") + R"({"name":"exchange/kvp:2/heads:128/dim:128/tokens:)" +
            number + R"(","us":20,"bytes":)" + number + "e5}";
  }
  write_file(scratch / "many.json", R"({"benchmarks":[)" + many + "]}");
  const Run run = run_plan("--check " + (scratch / "many.json").string());
  CHECK(run.exit_code == 1);
  CHECK_THAT(run.output,
             ContainsSubstring("many.json: its case 'exchange/kvp:2/heads:128/dim:128/tokens:2001' "
                               "is one of more than 2000; give the results"));
}

}  // namespace
