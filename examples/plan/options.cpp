// SPDX-License-Identifier: Apache-2.0
// Command line of helix-plan.
#include "options.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <string_view>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <helix/error.hpp>

#include "cli/command_line.hpp"
#include "files/output_file.hpp"
#include "hardware_source.hpp"
#include "model_source.hpp"
#include "pictures.hpp"

namespace helix::plan_cli {
namespace {

using decode::as_count;

const std::map<std::string, double>& element_bits() {
  static const std::map<std::string, double> kBits{{"f32", 32}, {"bf16", 16}, {"f16", 16},
                                                   {"fp8", 8},  {"int8", 8},  {"nvfp4", 4.5},
                                                   {"fp4", 4},  {"int4", 4},  {"mxfp4", 4.25}};
  return kBits;
}

/// Cache rows that only latent attention has; their bits follow from the model.
constexpr std::string_view kMixedRows = "fp8_ds_mla";

std::vector<std::string> format_names() {
  std::vector<std::string> names;
  for (const auto& [name, bits] : element_bits()) names.push_back(name);
  return names;
}

std::vector<std::string> kv_format_names() {
  std::vector<std::string> names = format_names();
  names.emplace_back(kMixedRows);
  return names;
}

const std::map<std::string, plan::Strategy>& strategies() {
  static const std::map<std::string, plan::Strategy> kStrategies = [] {
    std::map<std::string, plan::Strategy> names;
    for (const plan::Strategy strategy : {plan::Strategy::helix, plan::Strategy::tensor_parallel,
                                          plan::Strategy::data_parallel_attention, plan::Strategy::medha}) {
      names[std::string(to_string(strategy))] = strategy;
    }
    return names;
  }();
  return kStrategies;
}

/// Option texts and numbers that are parsed after all options are known.
struct OptionTexts {
  std::int64_t context = 131072;
  std::int64_t batch = 0;
  double ttl_ms = 0;
  std::string weights = "bf16";
  std::string kv = "bf16";
  std::string activations = "bf16";
  std::string objective;
  std::string hop_b = "auto";
  std::string expert_hits = "expectation";
  std::vector<std::string> strategy_names;
  std::vector<std::string> calibrations;
  std::vector<std::string> checks;
  std::string json;
  std::string csv;
  std::string pictures;
};

void add_source_options(CLI::App& app, Options& options, OptionTexts& texts) {
  app.add_option("--model", options.model,
                 fmt::format("config.json, a folder with one, or a preset: {}",
                             fmt::join(plan::model_preset_names(), ", ")));
  app.add_option("--hardware", options.hardware,
                 fmt::format("JSON file (docs/planning.md) or a preset: {}",
                             fmt::join(plan::hardware_preset_names(), ", ")))
      ->capture_default_str();
  app.add_option("--calibrate", texts.calibrations,
                 "results of helix-bench-cuda that replace the machine's reads, overheads and collectives; "
                 "repeatable")
      ->allow_extra_args(false);
  app.add_option("--check", texts.checks,
                 "predict these results of helix-bench-cuda and compare, calibrated by --calibrate or "
                 "by themselves; repeatable")
      ->allow_extra_args(false);
}

void add_workload_options(CLI::App& app, Options& options, OptionTexts& texts) {
  as_count(app.add_option("--context", texts.context, "tokens of each sequence"))
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--weight-dtype", texts.weights, fmt::format("{}", fmt::join(format_names(), ", ")))
      ->check(CLI::IsMember(format_names()))
      ->capture_default_str();
  app.add_option("--kv-dtype", texts.kv,
                 fmt::format("as above, or {} for models with latent attention", kMixedRows))
      ->check(CLI::IsMember(kv_format_names()))
      ->capture_default_str();
  app.add_option("--activation-dtype", texts.activations, "as above; also the format of messages")
      ->check(CLI::IsMember(format_names()))
      ->capture_default_str();
  as_count(
      app.add_option("--step-tokens", options.workload.step_tokens, "query tokens per sequence and step"))
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--expert-hits", texts.expert_hits, "experts that a step reads: expectation or worst-case")
      ->check(CLI::IsMember({"expectation", "worst-case"}))
      ->capture_default_str();
}

void add_search_options(CLI::App& app, plan::SearchSpace& space, OptionTexts& texts) {
  as_count(app.add_option("--gpus", space.max_gpus,
                          "most GPUs; powers of two of GPUs and of pipeline stages are searched"))
      ->check(CLI::Range(1, 1 << 15))
      ->capture_default_str();
  as_count(app.add_option("--batch", texts.batch, "sequences; default: searched, powers of two"))
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24));
  as_count(app.add_option("--max-batch", space.max_batch, "largest batch of the search"))
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24))
      ->capture_default_str();
  app.add_option("--ttl-ms", texts.ttl_ms, "most milliseconds from one token of a sequence to the next");
  app.add_option("--objective", texts.objective,
                 "latency or throughput (tokens/s/GPU); default: throughput with --ttl-ms, else latency")
      ->check(CLI::IsMember({"latency", "throughput"}));
  app.add_option("--strategies", texts.strategy_names,
                 "strategies to search: helix and its baselines; default: all")
      ->check(CLI::IsMember(strategies()))
      ->delimiter(',');
  app.add_option("--hop-b", texts.hop_b, "overlap of attention and exchange: auto, off, or both to compare")
      ->check(CLI::IsMember({"auto", "off", "both"}))
      ->capture_default_str();
  app.add_flag("--replicas", space.has_replicas, "fill --gpus with replicas of smaller layouts");
  app.add_flag("--medha-duplicates-kv", space.medha_may_duplicate_kv,
               "also Medha layouts with more TPA ranks than KV heads, which its authors leave out");
}

void add_output_options(CLI::App& app, Options& options, OptionTexts& texts) {
  app.add_flag("--frontier", options.shows_frontier, "print tokens/s/user against tokens/s/GPU");
  app.add_option("--top", options.top, "layouts to print")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--json", texts.json, "write the plan to this file");
  app.add_option("--csv", texts.csv, "write every configuration that fits to this file");
  app.add_option("--pictures", texts.pictures,
                 "write roofline.svg, frontier.svg and timeline.svg to this folder");
}

/// Sets the range and the goal of the search.
void set_search(plan::SearchSpace& space, const OptionTexts& texts, bool has_ttl_limit) {
  if (texts.batch > 0) space.batches = {texts.batch};
  if (has_ttl_limit) {
    HELIX_EXPECTS(texts.ttl_ms > 0 && std::isfinite(texts.ttl_ms), ErrorCode::invalid_argument,
                  "--ttl-ms is ", texts.ttl_ms, "; give a positive number of milliseconds");
    space.ttl_limit = plan::milliseconds(texts.ttl_ms);
  }
  for (const std::string& name : texts.strategy_names) {
    const plan::Strategy strategy = strategies().at(name);
    if (std::ranges::find(space.strategies, strategy) == space.strategies.end())
      space.strategies.push_back(strategy);
  }
  if (texts.hop_b == "off") space.hop_b_slices = {1};
  if (texts.hop_b == "both") space.hop_b_slices = {0, 1};
  const bool is_throughput =
      texts.objective.empty() ? space.ttl_limit.has_value() : texts.objective == "throughput";
  space.objective = is_throughput ? plan::Objective::throughput : plan::Objective::latency;
}

/// Throws if an output would replace an input or another output.
void check_outputs(const Options& options) {
  std::vector<decode::NamedFile> others;
  const auto add = [&](const std::string& option, const std::filesystem::path& path) {
    if (!path.empty()) others.push_back({option, path});
  };
  add("--model", model_file(options.model));
  add("--hardware", hardware_file(options.hardware));
  for (const std::filesystem::path& file : options.calibrations) add("--calibrate", file);
  for (const std::filesystem::path& file : options.checks) add("--check", file);

  std::vector<decode::NamedFile> outputs;
  if (!options.json.empty()) outputs.push_back({"--json", options.json});
  if (!options.csv.empty()) outputs.push_back({"--csv", options.csv});
  if (!options.pictures.empty()) {
    outputs.push_back({"--pictures", options.pictures});
    for (const std::string_view name : kPictures)
      outputs.push_back({fmt::format("{} of --pictures", name), options.pictures / name});
  }
  for (const decode::NamedFile& output : outputs) {
    decode::check_replaces_none(output, others);
    others.push_back(output);
  }
}

}  // namespace

std::optional<Options> parse_options(int argc, char** argv) {
  Options options;
  OptionTexts texts;
  CLI::App app("Plans how to decode a model on GPUs: layouts, memory, and the time of a step.", "helix-plan");
  add_source_options(app, options, texts);
  add_workload_options(app, options, texts);
  add_search_options(app, options.space, texts);
  add_output_options(app, options, texts);
  // --check plans nothing.
  CLI::Option* const check = app.get_option("--check");
  for (CLI::Option* const other : app.get_options()) {
    const bool is_taken = other->check_name("--hardware") || other->check_name("--calibrate") ||
                          other->check_name("--help") || other == check;
    if (!is_taken) check->excludes(other);
  }
  app.get_option("--batch")->excludes(app.get_option("--max-batch"));
  app.footer(decode::kCountsHelp);
  if (!decode::parse_command_line(app, argc, argv)) return std::nullopt;

  HELIX_EXPECTS(!options.model.empty() || !texts.checks.empty(), ErrorCode::invalid_argument,
                "--model is required; see --help");
  options.calibrations.assign(texts.calibrations.begin(), texts.calibrations.end());
  options.checks.assign(texts.checks.begin(), texts.checks.end());
  options.json = texts.json;
  options.csv = texts.csv;
  options.pictures = texts.pictures;
  check_outputs(options);
  options.has_mixed_rows = texts.kv == kMixedRows;
  options.precision = {.weight_bits = element_bits().at(texts.weights),
                       .activation_bits = element_bits().at(texts.activations)};
  if (!options.has_mixed_rows) options.precision.kv_bits = element_bits().at(texts.kv);
  options.workload.context = plan::tokens(static_cast<double>(texts.context));
  if (texts.expert_hits == "worst-case") options.workload.expert_hits = plan::ExpertHits::worst_case;
  set_search(options.space, texts, app.count("--ttl-ms") > 0);
  return options;
}

}  // namespace helix::plan_cli
