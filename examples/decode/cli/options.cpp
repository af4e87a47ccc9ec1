// SPDX-License-Identifier: Apache-2.0
// Command line and token files of helix-decode.
#include "cli/options.hpp"

#include <charconv>
#include <cstdint>
#include <string_view>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <helix/error.hpp>

#include "cli/command_line.hpp"
#include "cli/counts.hpp"
#include "files/token_lists.hpp"
#include "generate/request_plan.hpp"

namespace helix::decode {

namespace {

void parse_hop_b(const std::string& text, GenerationRequest& request) {
  if (text == "auto") {
    request.hop_b_slices = 0;
  } else if (text == "off") {
    request.hop_b_slices = 1;
  } else {
    int slices = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), slices);
    HELIX_EXPECTS(code == std::errc() && end == text.data() + text.size() && text.front() != '0' &&
                      slices >= 1 && slices <= 64,
                  ErrorCode::invalid_argument, "--hop-b is '", text,
                  "'; give a number of slices in [1, 64], auto or off");
    request.hop_b_slices = slices;
  }
}

/// Parses the seed itself, because CLI11 would accept -1 and 2^64 as the largest value.
void parse_seed(const std::string& text, std::uint64_t& seed) {
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), seed);
  HELIX_EXPECTS(code == std::errc() && end == text.data() + text.size(), ErrorCode::invalid_argument,
                "--seed is '", text, "'; give a whole number of 0 to 2^64 - 1");
}

/// Option texts that are parsed after all options are known.
struct OptionTexts {
  std::string model;
  std::vector<std::string> prompt_ids;
  std::string prompts_file;
  std::string teacher_file;
  std::string hop_b = "auto";
  std::string seed = "0";
  std::string device = "auto";
  std::string activation = "auto";
  std::string cuda_graphs = "on";
  std::string peer_memory = "auto";
  std::string topology = "given";
  std::string prefill_tokens = "auto";
  std::string mla_prefill = "auto";
  std::string json;
};

void add_prompt_options(CLI::App& app, GenerationRequest& request, OptionTexts& texts) {
  app.add_option("--prompt-ids", texts.prompt_ids, "token ids \"1,2,3\"; repeat for a batch")
      ->allow_extra_args(false);
  app.add_option("--prompts", texts.prompts_file, "JSON file: array of arrays of token ids");
  as_count(app.add_option("--max-new-tokens", request.max_new_tokens,
                          "tokens to generate per sequence; with --serve, the default of max_tokens"))
      ->capture_default_str();
  app.add_flag("--ignore-eos", request.ignore_eos, "continue after an end-of-sequence token");
}

void add_topology_options(CLI::App& app, Options& options, OptionTexts& texts) {
  app.add_option(
         "--topology", texts.topology,
         "given: the widths below; auto: the planner's fastest topology of one replica, for the launcher's "
         "processes or --ranks, else for at most one rank per visible GPU, or one rank on the CPU")
      ->check(CLI::IsMember({"given", "auto"}))
      ->capture_default_str();
  as_count(
      app.add_option("--ranks", options.num_ranks,
                     "with --topology auto: number of ranks; under a launcher its processes are the ranks"))
      ->check(CLI::Range(1, 32768));
  app.add_option("--kvp", options.topology.kvp, "KV-parallel width of attention")->capture_default_str();
  app.add_option("--tpa", options.topology.tpa, "tensor-parallel width of attention")->capture_default_str();
  app.add_option("--tpf", options.topology.tpf, "tensor-parallel width of the FFN; 0: kvp * tpa / ep")
      ->capture_default_str();
  app.add_option("--ep", options.topology.ep, "expert-parallel width of the FFN")->capture_default_str();
  app.add_option("--pp", options.topology.pp, "pipeline stages")->capture_default_str();
  app.add_option("--dp", options.topology.dp, "replicas; the batch is split over them")
      ->capture_default_str();
}

void add_step_options(CLI::App& app, Options& options, OptionTexts& texts) {
  GenerationRequest& request = options.request;
  as_count(app.add_option("--chunk", request.chunk,
                          "consecutive tokens that one KVP rank owns before the next rank's turn"))
      ->capture_default_str();
  as_count(app.add_option("--page-tokens", request.page_tokens, "tokens per KV page"))->capture_default_str();
  as_count(app.add_option("--draft-tokens", request.draft_tokens,
                          "query tokens per sequence and step, up to 64; drafts come from --teacher-force"))
      ->capture_default_str();
  app.add_option(
      "--teacher-force", texts.teacher_file,
      "JSON file: a list of token ids per sequence, fed in place of drawn tokens; with --draft-tokens "
      "proposed as drafts");
  app.add_option(
      "--kv-dtype", options.kv_dtype_name,
      "f32, f16, bf16, fp8_e4m3 or, for MLA, fp8_ds_mla; default: the checkpoint's; f32 with --verify");
  app.add_option(
         "--hop-b", texts.hop_b,
         "number of slices of the batch whose exchange overlaps attention: 1 to 64, auto, or off (1); "
         "over peer memory a step is always one slice")
      ->capture_default_str();
  app.add_option("--temperature", request.sampling.temperature, "0: greedy")->capture_default_str();
  app.add_option("--top-p", request.sampling.top_p, "nucleus probability in (0, 1]")->capture_default_str();
  app.add_option("--min-p", request.sampling.min_p,
                 "drops tokens less likely than this times the likeliest, in [0, 1]")
      ->capture_default_str();
  app.add_option("--top-k", request.sampling.top_k, "keeps the k likeliest tokens; 0: all")
      ->capture_default_str();
  app.add_option("--seed", texts.seed, "seed of the draws")->type_name("UINT")->capture_default_str();
  app.add_option("--repetition-penalty", request.penalties.repetition,
                 "divides the logits of tokens that occur in the prompt or the output")
      ->capture_default_str();
  app.add_option("--presence-penalty", request.penalties.presence,
                 "is subtracted from the logits of tokens that occur in the output")
      ->capture_default_str();
  app.add_option("--frequency-penalty", request.penalties.frequency,
                 "is subtracted once for each occurrence in the output")
      ->capture_default_str();
  as_count(
      app.add_option("--synthetic-context", request.synthetic_context,
                     "fills the KV cache with this many generated tokens instead of computing a prompt"));
  app.add_option(
         "--prefill-tokens", texts.prefill_tokens,
         "most prompt tokens per step: a COUNT, or auto: on GPUs with room for it 2048, or 4096 for models "
         "with experts without --serve; else 256")
      ->capture_default_str();
  app.add_option(
         "--mla-prefill", texts.mla_prefill,
         "how prompts attend in models with latent attention: absorbed: in the latent space; expanded: "
         "with keys and values of each head, which need memory; auto: whichever takes less time")
      ->check(CLI::IsMember({"auto", "absorbed", "expanded"}))
      ->capture_default_str();
}

void add_serve_options(CLI::App& app, Options& options) {
  app.add_flag(
      "--serve", options.serve,
      "takes requests as lines of JSON from standard input and writes events to standard output; see "
      "docs/decoding.md");
  as_count(app.add_option("--max-sequences", options.serve_limits.max_sequences,
                          "with --serve: requests per replica that run concurrently, up to 4096"))
      ->capture_default_str();
  as_count(
      app.add_option(
          "--context", options.serve_limits.max_tokens,
          "with --serve: most tokens of a prompt and its output together; 0: 8192, or the model's limit if "
          "that is less"))
      ->capture_default_str();
  as_count(
      app.add_option(
          "--kv-tokens", options.serve_limits.kv_tokens,
          "with --serve: capacity of a replica's KV cache in tokens; 0: --max-sequences times --context"))
      ->capture_default_str();
}

/// Checks --serve against the options that it excludes.
void check_serve(const CLI::App& app, const Options& options) {
  for (const char* with : {"--max-sequences", "--context", "--kv-tokens"}) {
    HELIX_EXPECTS(options.serve || app.count(with) == 0, ErrorCode::invalid_argument, with,
                  " is given, which only --serve takes: add --serve, or drop it");
  }
  for (const char* without : {"--prompt-ids", "--prompts", "--teacher-force", "--draft-tokens",
                              "--synthetic-context", "--verify", "--json", "--ignore-eos"}) {
    HELIX_EXPECTS(!options.serve || app.count(without) == 0, ErrorCode::invalid_argument, without,
                  " is given beside --serve, whose requests come from standard input: drop one of them");
  }
}

/// Checks --plan-only, which generates nothing, against the options that it excludes.
void check_plan_only(const CLI::App& app, const Options& options) {
  for (const char* without : {"--verify", "--json"}) {
    HELIX_EXPECTS(!options.is_plan_only || app.count(without) == 0, ErrorCode::invalid_argument, without,
                  " is given beside --plan-only, which generates nothing: drop one of them");
  }
}

/// Refuses options that would have no effect: sampling options in greedy decoding, prompt options without
/// prompts, and options of another device than the chosen one.
void check_use(const CLI::App& app, const Options& options, const std::string& device) {
  const bool draws = options.serve || options.request.sampling.temperature > 0.0f;
  const std::string greedy =
      app.count("--temperature") > 0 ? "with --temperature 0" : "without --temperature";
  for (const char* draw : {"--top-p", "--min-p", "--top-k"}) {
    HELIX_EXPECTS(draws || app.count(draw) == 0, ErrorCode::invalid_argument, draw, " is given, but ", greedy,
                  " the likeliest token is taken: give one above 0, or drop ", draw);
  }
  for (const char* prompt : {"--prefill-tokens", "--mla-prefill"}) {
    HELIX_EXPECTS(options.request.synthetic_context == 0 || app.count(prompt) == 0,
                  ErrorCode::invalid_argument, prompt,
                  " is given beside --synthetic-context, which takes no prompt: drop one of them");
  }
  const auto check_device = [&](const char* option, const char* needed) {
    HELIX_EXPECTS(device == "auto" || device == needed || app.count(option) == 0, ErrorCode::invalid_argument,
                  option, " is given, which only --device ", needed, " takes: drop one of them");
  };
  check_device("--cuda-graphs", "cuda");
  check_device("--peer-memory", "cuda");
  check_device("--threads", "cpu");
  check_device("--tuning", "cpu");
}

void add_device_options(CLI::App& app, Options& options, OptionTexts& texts) {
  app.add_option(
         "--device", texts.device,
         "auto: cuda if it is built in and GPUs are visible (under mpirun, one for each process of the "
         "machine), else cpu")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option(
         "--activation", texts.activation,
         "element type of activations; f16 on GPUs only. auto: on GPUs the checkpoint's type, or bf16 if "
         "that "
         "is fp8; on the CPU bf16 if the checkpoint is bf16 and every rank's hardware multiplies bf16, else "
         "f32; with --verify f32. On the CPU bf16 only rounds the inputs of products with bf16 weights")
      ->check(CLI::IsMember({"auto", "f32", "bf16", "f16"}))
      ->capture_default_str();
  app.add_option("--cuda-graphs", texts.cuda_graphs,
                 "on GPUs: capture decode steps and replay them for steps of equal shapes")
      ->check(CLI::IsMember({"on", "off"}))
      ->capture_default_str();
  app.add_option(
         "--peer-memory", texts.peer_memory,
         "whether ranks on GPUs write into each other's memory. auto: if each has a GPU of its own. NCCL "
         "connects GPUs that do not reach each other")
      ->check(CLI::IsMember({"auto", "on", "off"}))
      ->capture_default_str();
  app.add_option(
         "--timeout", options.timeout_seconds,
         "seconds that a rank waits for another one, and --serve, at the end, for a client that reads "
         "nothing")
      ->check(CLI::Range(1, 86400))
      ->capture_default_str();
  app.add_option("--threads", options.num_threads,
                 "CPU: threads per rank; 0: the machine's cores shared by its ranks")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--tuning", options.tuning,
                 "CPU: which variants the kernels use, \"kernel=variant,...\", instead of the fastest by "
                 "measurement; the report of --json names both");
}

/// Checks --topology, --ranks and the widths, which exclude each other.
void check_topology(const CLI::App& app, const Options& options) {
  for (const char* width : {"--kvp", "--tpa", "--tpf", "--ep", "--pp", "--dp"}) {
    HELIX_EXPECTS(!options.is_topology_auto || app.count(width) == 0, ErrorCode::invalid_argument, width,
                  " is given, which --topology auto chooses: drop one of them");
  }
  HELIX_EXPECTS(options.is_topology_auto || options.num_ranks == 0, ErrorCode::invalid_argument,
                "--ranks is ", options.num_ranks,
                ", which only --topology auto takes: give it, or drop --ranks");
}

void parse_prefill(const std::string& text, Options& options) {
  options.is_prefill_auto = text == "auto";
  if (options.is_prefill_auto) return;
  try {
    options.request.prefill_tokens = parse_count(text);
  } catch (const Error& error) {
    throw Error(ErrorCode::invalid_argument, "--prefill-tokens: ", error.what(), ", or auto");
  }
}

Device parse_device(const std::string& text) {
  if (text == "auto") return automatic_device();
  return text == "cuda" ? Device::cuda : Device::cpu;
}

/// Reads prompts and continuations from the command line or from files.
void read_tokens(const OptionTexts& texts, GenerationRequest& request) {
  HELIX_EXPECTS(texts.prompt_ids.empty() || texts.prompts_file.empty(), ErrorCode::invalid_argument,
                "--prompt-ids and --prompts exclude each other; give one");
  for (std::size_t i = 0; i < texts.prompt_ids.size(); ++i) {
    request.prompts.push_back(parse_ids(texts.prompt_ids[i], fmt::format("--prompt-ids {}", i)));
  }
  if (!texts.prompts_file.empty()) request.prompts = read_token_lists(texts.prompts_file);
  HELIX_EXPECTS(texts.prompts_file.empty() || !request.prompts.empty(), ErrorCode::invalid_argument,
                texts.prompts_file, ": holds no prompts; expected an array of arrays of token ids");
  if (texts.teacher_file.empty()) return;
  request.teacher = read_token_lists(texts.teacher_file);
  HELIX_EXPECTS(!request.teacher.empty(), ErrorCode::invalid_argument,
                "--teacher-force: ", texts.teacher_file,
                " holds no list of token ids; give one for each sequence");
}

void check_values(const Options& options) {
  const GenerationRequest& request = options.request;
  check_sizes(request);
  HELIX_EXPECTS(request.synthetic_context == 0 || request.prompts.empty(), ErrorCode::invalid_argument,
                "--synthetic-context fills the cache instead of a prompt; drop --prompt-ids and --prompts");
  HELIX_EXPECTS(options.kv_dtype_name.empty() || parse_dtype(options.kv_dtype_name),
                ErrorCode::invalid_argument, "--kv-dtype is '", options.kv_dtype_name,
                "'; give f32, f16, bf16, fp8_e4m3 or fp8_ds_mla");
  check_sampling(request.sampling);
  check_penalties(request.penalties);
}

}  // namespace

void add_fields(JobFields& fields, const Options& options) {
  // A structured binding of all members: a new member does not compile until someone decides here whether it
  // must agree.
  [[maybe_unused]] const auto& [model, prompts_file, teacher_file, request, topology, is_topology_auto,
                                num_ranks, is_prefill_auto, is_mla_prefill_auto, kv_dtype_name, device,
                                peer_memory, activation, is_plan_only, verify, given_sampling, serve,
                                serve_limits, timeout_seconds, tuning, num_threads, json] = options;
  fields.push_back({"--plan-only", is_plan_only ? "on" : "off"});
  fields.push_back({"--verify", verify ? "on" : "off"});
  // How often a rank shows that it lives follows from its timeout, and must suit those of the others.
  fields.push_back({"--timeout", std::to_string(timeout_seconds)});
  fields.push_back({"--activation", activation ? std::string(to_string(*activation)) : "auto"});
}

Device named_device(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::string_view text = argv[i];
    if (text == "--device" && i + 1 < argc) {
      text = argv[i + 1];
    } else if (text.starts_with("--device=")) {
      text.remove_prefix(std::string_view("--device=").size());
    } else {
      continue;
    }
    if (text == "cuda") return Device::cuda;
    if (text == "cpu") return Device::cpu;
  }
  return automatic_device();
}

TokenIds parse_ids(const std::string& text, const std::string& what) {
  HELIX_EXPECTS(!text.empty(), ErrorCode::invalid_argument, what, " is empty; give ids as \"1,2,3\"");
  TokenIds ids;
  for (std::size_t at = 0; at <= text.size();) {
    const std::string part = text.substr(at, text.find(',', at) - at);
    at += part.size() + 1;
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
  return ids;
}

std::optional<Options> parse_options(int argc, char** argv) {
  Options options;
  OptionTexts texts;
  CLI::App app("Decodes a Hugging Face Llama or DeepSeek checkpoint under a Helix topology.", "helix-decode");
  app.add_option("--model", texts.model, "checkpoint directory (config.json and safetensors)")->required();
  add_prompt_options(app, options.request, texts);
  add_topology_options(app, options, texts);
  add_step_options(app, options, texts);
  add_serve_options(app, options);
  add_device_options(app, options, texts);
  app.add_flag("--plan-only", options.is_plan_only, "print the memory plan of each rank and stop");
  app.add_flag("--verify", options.verify, "run one rank too and compare token by token");
  app.add_option("--json", texts.json, "write the report to this file");
  app.footer(kCountsHelp);
  if (!parse_command_line(app, argc, argv)) return std::nullopt;

  options.model = texts.model;
  options.prompts_file = texts.prompts_file;
  options.teacher_file = texts.teacher_file;
  options.json = texts.json;
  options.device = parse_device(texts.device);
  options.activation = parse_dtype(texts.activation);  // empty for "auto"
  HELIX_EXPECTS(options.device == Device::cuda || options.activation != DType::f16,
                ErrorCode::invalid_argument, "--activation is ", texts.activation,
                "; the CPU has f32 and bf16: give one of them, or --device cuda");
  options.request.cuda_graphs = texts.cuda_graphs == "on";
  options.is_mla_prefill_auto = texts.mla_prefill == "auto";
  options.request.mla_prefill = texts.mla_prefill == "absorbed"   ? MlaForm::absorbed
                                : texts.mla_prefill == "expanded" ? MlaForm::expanded
                                                                  : MlaForm::automatic;
  options.peer_memory = texts.peer_memory == "on"    ? PeerMemory::on
                        : texts.peer_memory == "off" ? PeerMemory::off
                                                     : PeerMemory::automatic;
  options.is_topology_auto = texts.topology == "auto";
  check_topology(app, options);
  check_serve(app, options);
  check_plan_only(app, options);
  for (const char* option : {"--temperature", "--top-p", "--min-p", "--top-k", "--repetition-penalty",
                             "--presence-penalty", "--frequency-penalty"})
    if (app.count(option) > 0) options.given_sampling.insert(option);
  parse_hop_b(texts.hop_b, options.request);
  parse_seed(texts.seed, options.request.sampling.seed);
  parse_prefill(texts.prefill_tokens, options);
  read_tokens(texts, options.request);
  check_values(options);
  check_use(app, options, texts.device);
  return options;
}

}  // namespace helix::decode
