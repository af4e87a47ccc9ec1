// SPDX-License-Identifier: Apache-2.0
// Command line and token files of helix-decode.
#include "options.hpp"

#include <charconv>
#include <fstream>
#include <iostream>
#include <limits>
#include <sstream>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <helix/error.hpp>

namespace helix::decode {

namespace {

/// A message that CLI11 found: an option that is unknown, missing or not a number.
[[noreturn]] void throw_usage(const CLI::ParseError& error) {
  throw Error(ErrorCode::invalid_argument, error.what(), "; see --help");
}

void parse_hop_b(const std::string& text, GenerationRequest& request) {
  if (text == "auto") {
    request.hop_b_slices = 0;
  } else if (text == "off") {
    request.hop_b_slices = 1;
  } else {
    int slices = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), slices);
    HELIX_EXPECTS(code == std::errc() && end == text.data() + text.size() && slices >= 1 && slices <= 64,
                  ErrorCode::invalid_argument, "--hop-b is '", text,
                  "'; give a number of slices in [1, 64], auto or off");
    request.hop_b_slices = slices;
  }
}

}  // namespace

TokenIds parse_ids(const std::string& text, const std::string& what) {
  TokenIds ids;
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    const std::size_t begin = part.find_first_not_of(" \t\n");
    const std::size_t last = part.find_last_not_of(" \t\n");
    const std::string number = begin == std::string::npos ? "" : part.substr(begin, last - begin + 1);
    std::int32_t id = 0;
    const auto [end, code] = std::from_chars(number.data(), number.data() + number.size(), id);
    HELIX_EXPECTS(!number.empty() && code == std::errc() && end == number.data() + number.size(),
                  ErrorCode::invalid_argument, what, ": '", part,
                  "' is not a token id; give ids as \"1,2,3\"");
    ids.push_back(id);
  }
  HELIX_EXPECTS(!ids.empty(), ErrorCode::invalid_argument, what, " is empty; give ids as \"1,2,3\"");
  return ids;
}

std::vector<TokenIds> read_token_lists(const std::filesystem::path& file) {
  std::ifstream in(file);
  HELIX_EXPECTS(in.good(), ErrorCode::io, file.string(), ": cannot be opened");
  const nlohmann::json json = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  HELIX_EXPECTS(json.is_array(), ErrorCode::invalid_file, file.string(),
                ": expected a JSON array of arrays of token ids");
  std::vector<TokenIds> lists;
  for (std::size_t i = 0; i < json.size(); ++i) {
    HELIX_EXPECTS(json[i].is_array(), ErrorCode::invalid_file, file.string(), ": entry ", i, " is ",
                  json[i].type_name(), ", not an array of token ids");
    TokenIds& ids = lists.emplace_back();
    for (const auto& value : json[i]) {
      HELIX_EXPECTS(value.is_number_integer() && value >= std::numeric_limits<std::int32_t>::min() &&
                        value <= std::numeric_limits<std::int32_t>::max(),
                    ErrorCode::invalid_file, file.string(), ": entry ", i, " holds ", value.dump(),
                    ", not a token id");
      ids.push_back(value.get<std::int32_t>());
    }
  }
  return lists;
}

std::optional<Options> parse_options(int argc, char** argv) {
  Options options;
  GenerationRequest& request = options.request;
  TopologySpec& topology = options.topology;
  std::vector<std::string> prompt_ids;
  std::string prompts_file;
  std::string teacher_file;
  std::string hop_b = "auto";
  std::string device = "cpu";
  std::string activation = "f32";
  std::string cuda_graphs = "on";
  std::string topology_choice = "given";
  std::string model;
  std::string json;

  CLI::App app("Decodes a Hugging Face Llama or DeepSeek checkpoint under a Helix topology.", "helix-decode");
  app.add_option("--model", model, "checkpoint directory (config.json and safetensors)")->required();
  app.add_option("--prompt-ids", prompt_ids, "token ids \"1,2,3\"; repeat for a batch")
      ->allow_extra_args(false);
  app.add_option("--prompts", prompts_file, "JSON file: array of arrays of token ids");
  app.add_option("--max-new-tokens", request.max_new_tokens, "tokens to generate a sequence")
      ->capture_default_str();
  app.add_flag("--ignore-eos", request.ignore_eos, "go on after an end-of-sequence token");
  app.add_option("--topology", topology_choice,
                 "given: by the widths below; auto: the planner's fastest for --ranks")
      ->check(CLI::IsMember({"given", "auto"}))
      ->capture_default_str();
  app.add_option("--ranks", options.num_ranks,
                 "of --topology auto: ranks of this process; under mpirun and torchrun their processes")
      ->check(CLI::Range(1, 65536));
  app.add_option("--kvp", topology.kvp, "KV-parallel width of attention")->capture_default_str();
  app.add_option("--tpa", topology.tpa, "tensor-parallel width of attention")->capture_default_str();
  app.add_option("--tpf", topology.tpf, "tensor-parallel width of the FFN; 0: N / ep")->capture_default_str();
  app.add_option("--ep", topology.ep, "expert-parallel width of the FFN")->capture_default_str();
  app.add_option("--pp", topology.pp, "pipeline stages")->capture_default_str();
  app.add_option("--dp", topology.dp, "replicas; the batch is split over them")->capture_default_str();
  app.add_option("--chunk", request.chunk, "tokens that stay together on a KVP rank")->capture_default_str();
  app.add_option("--page-tokens", request.page_tokens, "tokens a KV page")->capture_default_str();
  app.add_option("--draft-tokens", request.draft_tokens,
                 "query tokens a step; drafts come from --teacher-force")
      ->capture_default_str();
  app.add_option("--teacher-force", teacher_file,
                 "JSON file: array of continuations to feed, or with --draft-tokens to propose");
  app.add_option("--kv-dtype", options.kv_dtype_name,
                 "f32, f16, bf16 or fp8_e4m3; default: the checkpoint's");
  app.add_option("--hop-b", hop_b, "slices of the batch whose exchange overlaps attention, auto or off")
      ->capture_default_str();
  app.add_option("--device", device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--activation", activation, "of --device cuda: f32, bf16 or f16")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}))
      ->capture_default_str();
  app.add_option("--cuda-graphs", cuda_graphs,
                 "on or off: of --device cuda, replay decode steps of equal shapes from a captured one")
      ->check(CLI::IsMember({"on", "off"}))
      ->capture_default_str();
  app.add_option("--temperature", request.sampling.temperature, "0: greedy")->capture_default_str();
  app.add_option("--top-p", request.sampling.top_p, "nucleus probability in (0, 1]")->capture_default_str();
  app.add_option("--seed", request.sampling.seed, "of the draws")->capture_default_str();
  app.add_option("--synthetic-context", request.synthetic_context,
                 "tokens of generated KV instead of a prompt");
  app.add_option("--prefill-tokens", request.prefill_tokens, "most prompt tokens a step")
      ->capture_default_str();
  app.add_option("--threads", options.num_threads, "threads a rank; 0: the cores shared by the ranks")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_flag("--plan-only", options.is_plan_only, "print the memory plan of each rank and stop");
  app.add_flag("--verify", options.verify, "run one rank too and compare token by token");
  app.add_option("--json", json, "write the report to this file");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw_usage(error);
  }

  options.model = model;
  options.json = json;
  options.device = device == "cuda" ? Device::cuda : Device::cpu;
  options.activation = *parse_dtype(activation);
  HELIX_EXPECTS(options.device == Device::cuda || options.activation == DType::f32,
                ErrorCode::invalid_argument, "--activation is ", activation,
                "; the CPU has f32: drop it or give --device cuda");
  request.cuda_graphs = cuda_graphs == "on";
  options.is_topology_auto = topology_choice == "auto";
  for (const char* width : {"--kvp", "--tpa", "--tpf", "--ep", "--pp", "--dp"}) {
    HELIX_EXPECTS(!options.is_topology_auto || app.count(width) == 0, ErrorCode::invalid_argument, width,
                  " is given, which --topology auto chooses: drop one of them");
  }
  HELIX_EXPECTS(options.is_topology_auto || options.num_ranks == 0, ErrorCode::invalid_argument,
                "--ranks is ", options.num_ranks,
                ", which only --topology auto takes: give it, or drop --ranks");
  parse_hop_b(hop_b, request);
  HELIX_EXPECTS(prompt_ids.empty() || prompts_file.empty(), ErrorCode::invalid_argument,
                "--prompt-ids and --prompts exclude each other; give one");
  for (std::size_t i = 0; i < prompt_ids.size(); ++i) {
    request.prompts.push_back(parse_ids(prompt_ids[i], fmt::format("--prompt-ids {}", i)));
  }
  if (!prompts_file.empty()) request.prompts = read_token_lists(prompts_file);
  if (!teacher_file.empty()) request.teacher = read_token_lists(teacher_file);
  HELIX_EXPECTS(request.synthetic_context >= 0 && request.synthetic_context <= (std::int64_t{1} << 40),
                ErrorCode::invalid_argument, "--synthetic-context is ", request.synthetic_context,
                "; give tokens in [0, 2^40]");
  HELIX_EXPECTS(request.synthetic_context == 0 || request.prompts.empty(), ErrorCode::invalid_argument,
                "--synthetic-context fills the cache instead of a prompt; drop --prompt-ids and --prompts");
  HELIX_EXPECTS(options.kv_dtype_name.empty() || parse_dtype(options.kv_dtype_name),
                ErrorCode::invalid_argument, "--kv-dtype is '", options.kv_dtype_name,
                "'; give f32, f16, bf16 or fp8_e4m3");
  HELIX_EXPECTS(
      request.sampling.temperature >= 0.0f && request.sampling.top_p > 0.0f && request.sampling.top_p <= 1.0f,
      ErrorCode::invalid_argument, "--temperature is ", request.sampling.temperature,
      " (at least 0), --top-p is ", request.sampling.top_p, " (in (0, 1])");
  return options;
}

}  // namespace helix::decode
