// SPDX-License-Identifier: Apache-2.0
// helix-decode as a user runs it: output, JSON, exit codes, and one clear error for each bad input.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include <nlohmann/json.hpp>

#include <helix/cpu/backend.hpp>
#include <helix/version.hpp>

#include "cli/launch_cuda.hpp"
#include "decode/golden.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"

namespace helix::test {
namespace {

using Catch::Matchers::ContainsSubstring;

/// Runs `prefix helix-decode arguments`.
Run run_decode(const std::string& arguments, const std::string& prefix = "") {
  return run_command(prefix + " " HELIX_DECODE " " + arguments);
}

std::string model_option(const std::string& name) {
  return "--model " + (data_directory() / name).string() + " ";
}

/// The report of a short decode of llama-tiny, whose weights are bf16.
nlohmann::json short_report(const std::string& arguments, const std::string& prefix = "") {
  const ScratchDirectory scratch;
  const auto report = scratch / "report.json";
  const Run run = run_decode(model_option("llama-tiny") + "--prompt-ids 1,2,3 --max-new-tokens 4 --json " +
                                 report.string() + " " + arguments,
                             prefix);
  INFO(run.output);
  REQUIRE(run.exit_code == 0);
  return nlohmann::json::parse(read_file(report));
}

/// Sends the golden prompts of llama-tiny as requests; the expected tokens come back as events after "ready".
void check_serving(const std::string& options, const std::string& prefix) {
  const ReferenceModel model("llama-tiny");
  const Golden golden = model.golden();
  const ScratchDirectory scratch;
  std::ofstream requests(scratch / "requests");
  for (std::size_t i = 0; i < golden.prompts.size(); ++i) {
    requests << nlohmann::json{{"id", std::to_string(i)},
                               {"prompt", golden.prompts[i]},
                               {"max_tokens", golden.greedy[i].size()},
                               {"ignore_eos", true}}
             << "\n";
  }
  requests << "{\"id\":\"bad\",\"prompt\":[512]}";  // without a line end
  requests.close();
  const std::string messages = (scratch / "messages").string();
  const Run run = run_command("sh -c '" + prefix + " " HELIX_DECODE " " + model_option("llama-tiny") +
                              options + " --serve --activation f32 --kv-dtype f32 < " +
                              (scratch / "requests").string() + " 2> " + messages + "'");
  INFO(run.output << read_file(messages));
  REQUIRE(run.exit_code == 0);
  CHECK_THAT(read_file(messages), !ContainsSubstring("warning"));
  std::map<std::string, decode::TokenIds> tokens;
  int num_errors = 0;
  std::stringstream lines(run.output);
  std::string line;
  REQUIRE(std::getline(lines, line));
  CHECK(nlohmann::json::parse(line).at("event") == "ready");
  while (std::getline(lines, line)) {
    const auto event = nlohmann::json::parse(line);
    if (event.at("event") == "token") tokens[event.at("id")].push_back(event.at("token"));
    num_errors += event.at("event") == "error";
  }
  CHECK(num_errors == 1);
  for (std::size_t i = 0; i < golden.greedy.size(); ++i) CHECK(tokens[std::to_string(i)] == golden.greedy[i]);
}

}  // namespace

TEST_CASE("requests come from standard input and events go to standard output", "[quick]") {
  check_serving("", "");
  check_serving("--kvp 2 --tpa 2 --max-sequences 2 --context 0.5K", "");
}

TEST_CASE("activations are bf16 where the hardware multiplies it, and as the command line says", "[quick]") {
  const std::string best = cpu::has_bf16_products() ? "bf16" : "f32";
  const std::string without = "env HELIX_BF16_DOTS=0 HELIX_AMX=0";
  CHECK(short_report("").at("activation") == best);
  CHECK(short_report("--kvp 2").at("activation") == best);
  CHECK(short_report("--verify").at("activation") == "f32");
  CHECK(short_report("--activation f32").at("activation") == "f32");
  CHECK(short_report("", without).at("activation") == "f32");
  const auto emulated = short_report("--activation bf16", without);
  CHECK(emulated.at("activation") == "bf16");
  const auto tuned = short_report("--activation bf16 --tuning linear.*=plain").at("tuning");
  CHECK(tuned.at("linear.bf16_dots.rows1") == nlohmann::json{{"variant", "plain"}, {"source", "fixed"}});
}

TEST_CASE("without a GPU the device is the CPU, and the report says what was chosen", "[quick]") {
  const auto report = short_report("");
  CHECK(report.at("device") == "cpu");
  CHECK(report.at("prefill_tokens") == 256);
  CHECK(short_report("--device cpu").at("device") == "cpu");
  CHECK(short_report("--device auto --prefill-tokens 1K").at("prefill_tokens") == 1024);
  CHECK(short_report("--topology auto").at("topology").at("world_size") == 1);
}

TEST_CASE("counts may have suffixes and exponents", "[quick]") {
  const Run run =
      run_decode(model_option("llama-tiny") +
                 "--synthetic-context 128K --max-new-tokens 1e1 --chunk 0.25K --page-tokens 64 --plan-only");
  INFO(run.output);
  CHECK(run.exit_code == 0);
  CHECK_THAT(run.output, ContainsSubstring("note: 131072 tokens"));
}

TEST_CASE("both programs say their version and what is built in", "[quick]") {
  const Run run = run_decode("--version");
  CHECK(run.exit_code == 0);
  const std::string version = std::to_string(HELIX_VERSION_MAJOR) + "." +
                              std::to_string(HELIX_VERSION_MINOR) + "." + std::to_string(HELIX_VERSION_PATCH);
  CHECK_THAT(run.output, Catch::Matchers::StartsWith("helix-decode " + version + " (CUDA: ") &&
                             ContainsSubstring("MPI: ") && Catch::Matchers::EndsWith(")\n"));
}

TEST_CASE("replicas without a sequence and plans beyond memory are warnings", "[quick]") {
  const auto warnings_of = [](const std::string& arguments) {
    const ScratchDirectory scratch;
    const std::string file = (scratch / "err").string();
    const Run run = run_command("sh -c '" HELIX_DECODE " " + model_option("llama-tiny") + arguments + " 2> " +
                                file + "'");
    INFO(run.output);
    CHECK(run.exit_code == 0);
    CHECK_THAT(run.output, !ContainsSubstring("warning"));
    return read_file(file);
  };
  CHECK(warnings_of("--prompt-ids 1,2 --prompt-ids 3 --dp 2 --max-new-tokens 2") == "");
  CHECK(warnings_of("--prompt-ids 1,2 --prompt-ids 3 --dp 3 --max-new-tokens 2") ==
        "warning: 1 of 3 replicas have no sequence: --dp is 3 and there are 2 sequences; give more prompts "
        "or a "
        "smaller --dp\n");
  const std::string memory = warnings_of("--synthetic-context 64G --plan-only");
  CHECK_THAT(memory, Catch::Matchers::StartsWith("warning: the plan takes 64.00 TiB of this machine") &&
                         ContainsSubstring("are available") && ContainsSubstring("--kv-dtype"));
  CHECK(std::count(memory.begin(), memory.end(), '\n') == 1);
}

TEST_CASE("one rank has nothing to be verified with, which is a warning", "[quick]") {
  const std::string arguments = model_option("llama-tiny") + "--prompt-ids 1,2,3 --max-new-tokens 2 --verify";
  const Run alone = run_decode(arguments);
  INFO(alone.output);
  CHECK(alone.exit_code == 0);
  CHECK_THAT(alone.output,
             ContainsSubstring("warning: --verify compares with one rank, and there is no other") &&
                 !ContainsSubstring("verified"));
  const Run two = run_decode(arguments + " --kvp 2");
  INFO(two.output);
  CHECK_THAT(two.output, ContainsSubstring("verified: 2 ranks") && !ContainsSubstring("warning"));
}

TEST_CASE("weights that config.json has no use for, and what the rope does not take, are warnings",
          "[quick]") {
  const ScratchDirectory scratch;
  std::filesystem::copy_file(data_directory() / "llama-tiny" / "model.safetensors",
                             scratch / "model.safetensors");
  nlohmann::json config =
      nlohmann::json::parse(read_file((data_directory() / "llama-tiny" / "config.json").string()));
  config["num_hidden_layers"] = 1;
  config["rope_parameters"]["attn_factor"] = 2;
  std::ofstream(scratch / "config.json") << config;
  const Run run = run_decode("--model " + (scratch / "").string() + " --prompt-ids 1 --max-new-tokens 1");
  CHECK(run.exit_code == 0);
  CHECK_THAT(run.output, ContainsSubstring("warning: 9 of 21 tensors are not used, the first of them "
                                           "'model.layers.1.input_layernorm.weight'"));
  CHECK_THAT(run.output,
             ContainsSubstring("config.json: the rope does not take 1 of its keys, the first of them "
                               "'attn_factor'"));
}

TEST_CASE("a plan beyond all of the machine's memory is refused before it takes any", "[quick]") {
  const Run run = run_decode(model_option("llama-tiny") + "--device cpu --synthetic-context 64G --kvp 8");
  INFO(run.output);
  CHECK(run.exit_code == 1);
  CHECK_THAT(run.output,
             ContainsSubstring("memory a rank") &&
                 ContainsSubstring("helix-decode: the plan takes 64.00 TiB of this machine's memory, of "
                                   "which it, or its container, gives ") &&
                 ContainsSubstring("--kv-dtype") && !ContainsSubstring("warning"));
}

TEST_CASE("the report holds topology, sequences, memory, timing and exchange", "[quick]") {
  const ScratchDirectory scratch;
  const auto report = scratch / "report.json";
  const Run run = run_decode(model_option("llama-tiny") +
                             "--prompt-ids \"1, 2,3\" --prompt-ids 4,5 --max-new-tokens 5 --ignore-eos --kvp "
                             "2 --tpa 2 --chunk 1 --verify --json " +
                             report.string());
  INFO(run.output);
  REQUIRE(run.exit_code == 0);
  CHECK_THAT(run.output, ContainsSubstring("verified") && ContainsSubstring("tokens/s"));
  CHECK_THAT(run.output, !ContainsSubstring("\r"));  // no progress bar into a pipe
  const auto json = nlohmann::json::parse(read_file(report));
  CHECK(json.at("topology").at("kvp") == 2);
  CHECK(json.at("topology").at("tpf") == 4);
  REQUIRE(json.at("sequences").size() == 2);
  CHECK(json.at("sequences")[0].at("prompt") == std::vector<int>{1, 2, 3});
  CHECK(json.at("sequences")[1].at("tokens").size() == 5);
  CHECK(json.at("sequences")[1].at("logits_first8").size() == 2);
  CHECK(json.at("sequences")[1].at("logits_first8")[1].size() == 8);
  CHECK(json.at("sequences")[1].at("logits_norm").size() == 5);
  REQUIRE(json.at("memory").at("ranks").size() == 4);
  for (const auto& rank : json.at("memory").at("ranks")) {
    CHECK(rank.at("weights_bytes") > 0);
    CHECK(rank.at("weights_in_place_bytes") > 0);
    CHECK(rank.at("weights_copied_bytes") > 0);  // the columns of down_proj
    CHECK(rank.at("weights_bytes").get<std::int64_t>() ==
          rank.at("weights_in_place_bytes").get<std::int64_t>() +
              rank.at("weights_copied_bytes").get<std::int64_t>());
    CHECK(rank.at("kv_bytes") > 0);
    CHECK(rank.at("workspace_bytes") > 0);
    CHECK(rank.at("resident_bytes") > 0);
  }
  CHECK(json.at("timing").at("ttl_ms").at("median") > 0.0);
  CHECK(json.at("timing").at("tokens_per_s") > 0.0);
  CHECK(json.at("exchange").at("bytes_per_rank_per_layer") == 2 * 4 * (64 * 4 + 4) / 2);
  CHECK(json.at("captured_steps") == 0);  // the CPU has no graphs
}

TEST_CASE("plan-only prints the memory of each rank and generates nothing", "[quick]") {
  const Run run = run_decode(model_option("deepseek-tiny") + "--prompt-ids 1,2,3 --kvp 4 --ep 2 --plan-only");
  INFO(run.output);
  CHECK(run.exit_code == 0);
  CHECK_THAT(run.output, ContainsSubstring("memory a rank (4 ranks)") &&
                             ContainsSubstring("are used in the checkpoint's files") &&
                             !ContainsSubstring("sequence 0"));
  for (const std::string with : {"--verify", "--json plan.json"}) {
    const Run both = run_decode(model_option("deepseek-tiny") + "--prompt-ids 1,2,3 --plan-only " + with);
    CHECK(both.exit_code == 1);
    CHECK_THAT(both.output, ContainsSubstring(" is given beside --plan-only"));
  }
}

TEST_CASE("a checkpoint that shrinks while it is used ends the program with one line", "[quick]") {
  const ScratchDirectory scratch;
  for (const char* name : {"config.json", "model.safetensors"})
    std::filesystem::copy_file(data_directory() / "llama-tiny" / name, scratch / name);
  const std::string file = (scratch / "model.safetensors").string();
  // The file shrinks during the run: the plan is printed some milliseconds before the weights are loaded.
  const std::string plan = (scratch / "plan").string();
  std::string many_prompts;  // seconds of work even on a fast machine
  for (int i = 0; i < 16; ++i) many_prompts += " --prompt-ids 1,2,3";
  const Run run = run_command("sh -c '" HELIX_DECODE " --model " + scratch.path().string() + many_prompts +
                              " --max-new-tokens 8000 --ignore-eos > " + plan + " & while ! test -s " + plan +
                              "; do sleep 0.02; done; sleep 0.3; truncate -s 4096 " + file + "; wait $!'");
  INFO(run.output);
  CHECK(run.exit_code == 1);
  CHECK_THAT(run.output,
             Catch::Matchers::StartsWith("helix-decode: " + file + ": ") && ContainsSubstring("shrank"));
  CHECK(std::count(run.output.begin(), run.output.end(), '\n') == 1);
}

TEST_CASE("prompts, teacher and drafts come from files", "[quick]") {
  const ScratchDirectory scratch;
  const Golden golden = ReferenceModel("llama-tiny").golden();
  write_file(scratch / "prompts.json", nlohmann::json(golden.prompts).dump());
  write_file(scratch / "drafts.json", nlohmann::json(golden.greedy).dump());
  const Run run =
      run_decode(model_option("llama-tiny") +
                 "--kvp 2 --kv-dtype f32 --activation f32 --ignore-eos --max-new-tokens 24 --draft-tokens 4 "
                 "--prompts " +
                 (scratch / "prompts.json").string() + " --teacher-force " +
                 (scratch / "drafts.json").string() + " --json " + (scratch / "report.json").string());
  INFO(run.output);
  REQUIRE(run.exit_code == 0);
  const auto json = nlohmann::json::parse(read_file(scratch / "report.json"));
  for (std::size_t s = 0; s < golden.greedy.size(); ++s) {
    CHECK(json.at("sequences")[s].at("tokens").get<decode::TokenIds>() == golden.greedy[s]);
  }
}

TEST_CASE("streams that nobody reads, and files beyond their limit, end no run by a signal", "[quick]") {
  const ScratchDirectory scratch;
  const std::string pipe = (scratch / "pipe").string();
  const std::string report = (scratch / "report.json").string();
  // Descriptor 6 is a pipe whose reader has gone.
  const std::string before = "mkfifo " + pipe + "; sleep 60 < " + pipe + " & exec 6> " + pipe +
                             "; kill $!; wait; " HELIX_DECODE " " + model_option("llama-tiny") +
                             "--prompt-ids 1,2,3 --max-new-tokens 2 ";
  const auto status_of = [&](const std::string& limit, const std::string& rest) {
    std::filesystem::remove(pipe);
    const Run run = run_command("bash -c '" + limit + before + rest + "; echo status $?'");
    INFO(run.output);
    const auto at = run.output.find("status ");
    REQUIRE(at != std::string::npos);
    return std::stoi(run.output.substr(at + 7));
  };
  CHECK(status_of("", "--dp 2 --json " + report + " 2>&6") == 0);  // loses a warning
  CHECK(nlohmann::json::parse(read_file(report)).at("sequences").size() == 1);
  CHECK(status_of("", ">&6") == 1);
  CHECK(status_of("ulimit -f 0; ", "--json " + (scratch / "large.json").string()) == 1);
}

namespace {

void check_refused(const std::vector<BadInput>& cases) {
  helix::test::check_refused(HELIX_DECODE, "helix-decode", cases);
}

const std::string kIds = " --prompt-ids 1,2,3 ";

}  // namespace

TEST_CASE("bad input gives one clear error and a non-zero exit", "[quick]") {
  const ScratchDirectory scratch;
  write_file(scratch / "bad.json", "{\"a\": 1}");
  write_file(scratch / "empty.json", "[]");
  std::vector<BadInput> cases = {
      {model_option("llama-tiny") + kIds + "--teacher-force " + (scratch / "empty.json").string(),
       {"--teacher-force", "empty.json holds no list"}},
      {"", {"--model"}},
      {model_option("llama-tiny") + "--prompt-ids 1,x,3", {"'x'", "token id"}},
      {model_option("llama-tiny") + "--prompt-ids 1,600", {"600", "[0, 512)"}},
      {model_option("llama-tiny") + "--prompt-ids -3", {"-3"}},
      {model_option("llama-tiny") + "--prompt-ids 1,2,", {"'' is not a token id"}},
      {model_option("llama-tiny") + "--prompt-ids ,1", {"'' is not a token id"}},
      {model_option("llama-tiny"), {"no prompts"}},
      {model_option("llama-tiny") + "--prompts " + (scratch / "empty.json").string(),
       {"empty.json: holds no prompts"}},
      {model_option("llama-tiny") + kIds + "--kvp nan", {"--kvp is nan", "a whole number"}},
      {model_option("llama-tiny") + kIds + "--kvp 99999999999", {"--kvp is 99999999999", "a whole number"}},
      {model_option("llama-tiny") + kIds + "--temperature 8E", {"--temperature is 8E", "a number"}},
      {model_option("llama-tiny") + kIds + "--temperature 0x10", {"--temperature is 0x10", "decimal"}},
      {model_option("llama-tiny") + kIds + "--kvp 3", {"num_query_heads 8", "3"}},
      {model_option("llama-tiny") + kIds + "--tpa 4", {"2 KV heads", "TPA 4"}},
      {model_option("llama-tiny") + kIds + "--kvp 0", {"0"}},
      {model_option("llama-tiny") + kIds + "--kvp 1000000000 --tpa 1000000000", {"1000000000"}},
      {model_option("deepseek-tiny") + kIds + "--tpa 2", {"TPA"}},
      {model_option("llama-tiny") + kIds + "--ep 2 --kvp 2", {"EP"}},
      {model_option("llama-tiny") + kIds + "--max-new-tokens 9000", {"8192"}},
      {model_option("llama-tiny") + kIds + "--chunk 0", {"chunk is 0"}},
      {model_option("llama-tiny") + kIds + "--page-tokens -1", {"page_tokens is -1"}},
      {model_option("llama-tiny") + kIds + "--page-tokens 0", {"page_tokens is 0"}},
      {model_option("llama-tiny") + kIds + "--max-new-tokens 9223372036854775807", {"9223372036854775807"}},
      {model_option("llama-tiny") + kIds + "--kv-dtype int8", {"int8"}},
      {model_option("llama-tiny") + kIds + "--hop-b many", {"many"}},
      {model_option("llama-tiny") + kIds + "--top-p 1.5", {"1.5"}},
      {model_option("llama-tiny") + kIds + "--top-k -1", {"top_k is -1"}},
      {model_option("llama-tiny") + kIds + "--min-p 2", {"min_p is 2"}},
      {model_option("llama-tiny") + kIds + "--temperature nan", {"temperature is nan"}},
      {model_option("llama-tiny") + kIds + "--kvp 010", {"--kvp is 010; write whole numbers in decimal"}},
      {model_option("llama-tiny") + kIds + "--tpa 0x2", {"--tpa is 0x2"}},
      {model_option("llama-tiny") + kIds + "--kvp +010", {"--kvp is +010; write whole numbers in decimal"}},
      {model_option("llama-tiny") + kIds + "--kvp +0x2", {"--kvp is +0x2; write whole numbers in decimal"}},
      {model_option("llama-tiny") + kIds + "--kvp +2", {"--kvp is +2; write whole numbers in decimal"}},
      {model_option("llama-tiny") + kIds + "--tpa ' 02'", {"--tpa is  02; write whole numbers in decimal"}},
      {model_option("llama-tiny") + kIds + "--dp -010", {"--dp is -010; write whole numbers in decimal"}},
      {model_option("llama-tiny") + kIds + "--seed 18446744073709551616",
       {"--seed is '18446744073709551616'; give a whole number of 0 to 2^64 - 1"}},
      {model_option("llama-tiny") + kIds + "--seed -1", {"--seed is '-1'"}},
      {model_option("llama-tiny") + kIds + "--repetition-penalty 0", {"repetition_penalty is 0"}},
      {model_option("llama-tiny") + kIds + "--serve", {"--prompt-ids", "--serve"}},
      {model_option("llama-tiny") + kIds + "--context 1K", {"--context", "--serve"}},
      {model_option("llama-tiny") + "--serve --context 9000", {"context is 9000", "8192"}},
      {model_option("llama-tiny") + "--serve --context 1K --kv-tokens 512", {"kv_tokens is 512", "1024"}},
      {model_option("llama-tiny") + "--serve --prefill-tokens 1M", {"max_sequences is 8", "1048576"}},
      {model_option("llama-tiny") + kIds + "--draft-tokens 4", {"--teacher-force"}},
      {model_option("llama-tiny") + kIds + "--device tpu", {"--device"}},
      {model_option("llama-tiny") + kIds + "--cuda-graphs maybe", {"--cuda-graphs"}},
      {model_option("llama-tiny") + kIds + "--mla-prefill latent", {"--mla-prefill"}},
      {model_option("llama-tiny") + kIds + "--peer-memory maybe", {"--peer-memory"}},
      {model_option("llama-tiny") + kIds + "--activation f16", {"f16", "--device cuda"}},
      {model_option("llama-tiny") + kIds + "--tuning linear.bf16.rows1=best",
       {"has no variant \"best\"", "plain"}},
      {model_option("llama-tiny") + kIds + "--tuning attention", {"kernel=variant"}},
      {model_option("llama-tiny") + kIds + "--no-such-option", {"--no-such-option is unknown; see --help"}},
      {"--max-token 5", {"--max-token is unknown; did you mean --max-new-tokens?"}},
      {model_option("llama-tiny") + kIds + "--max_new_tokens=5",
       {"--max_new_tokens is unknown; did you mean"}},
      {model_option("llama-tiny") + kIds + "7", {"'7' belongs to no option"}},
      {model_option("llama-tiny") + kIds + "--max-new-tokens 12x",
       {"--max-new-tokens: '12x' is no count", "128K"}},
      {model_option("llama-tiny") + kIds + "--max-new-tokens 1.5", {"--max-new-tokens: '1.5' is not whole"}},
      {model_option("llama-tiny") + kIds + "--max-new-tokens 1e30",
       {"--max-new-tokens: '1e30' is too large"}},
      {model_option("llama-tiny") + kIds + "--max-new-tokens -4", {"max_new_tokens is -4"}},
      {model_option("llama-tiny") + kIds + "--prefill-tokens many",
       {"--prefill-tokens: 'many' is no count", "auto"}},
      {model_option("llama-tiny") + kIds + "--prompts " + (scratch / "bad.json").string(), {"exclude"}},
      {model_option("llama-tiny") + "--prompts " + (scratch / "bad.json").string(), {"bad.json", "array"}},
      {model_option("llama-tiny") + "--prompts " + (scratch / "none.json").string(), {"none.json"}},
      {model_option("llama-tiny") + kIds + "--synthetic-context 10", {"--synthetic-context"}},
      {model_option("llama-tiny") + "--synthetic-context 10 --prefill-tokens 64",
       {"--prefill-tokens is given beside --synthetic-context"}},
      {model_option("deepseek-tiny") + "--synthetic-context 10 --mla-prefill absorbed",
       {"--mla-prefill is given beside --synthetic-context"}},
      {model_option("llama-tiny") + kIds + "--hop-b 010", {"--hop-b is '010'"}},
      {model_option("llama-tiny") + kIds + "--kvp 2 --kvp 4", {"--kvp is given twice (2, 4); give it once"}},
      {model_option("llama-tiny") + kIds + "--chunk 16 --chunk=32 --chunk 64",
       {"--chunk is given 3 times (16, 32, 64); give it once"}},
      {model_option("llama-tiny") + kIds + "--json /nonexistent/report.json", {"/nonexistent/report.json"}},
      {model_option("llama-tiny") + kIds + "--mla-prefill expanded",
       {"--mla-prefill", "no latent attention"}},
      {model_option("llama-tiny") + kIds + "--device cuda --threads 2", {"--threads", "--device cpu"}},
      {model_option("llama-tiny") + kIds + "--device cuda --tuning attention.f32=auto",
       {"--tuning", "--device cpu"}},
      {model_option("llama-tiny") + kIds + "--device cpu --cuda-graphs on",
       {"--cuda-graphs", "--device cuda"}},
      {model_option("llama-tiny") + kIds + "--device cpu --peer-memory auto",
       {"--peer-memory", "--device cuda"}},
  };
  for (const char* flag : {"--ignore-eos=5", "--ignore-eos=banana", "--verify=-1", "--serve=no",
                           "--plan-only=0", "--plan-only=true", "--help=", "--version=1"}) {
    const std::string name = std::string(flag).substr(0, std::string(flag).find('='));
    cases.push_back({model_option("llama-tiny") + kIds + flag, {name + " takes no value, and is given '"}});
  }
  for (const char* draw : {"--top-p", "--min-p", "--top-k"})
    for (const char* greedy : {" 1", " 1 --temperature 0"})
      cases.push_back({model_option("llama-tiny") + kIds + draw + greedy, {draw, "--temperature"}});
  for (const char* option :
       {"--seed", "--temperature", "--top-k", "--min-p", "--presence-penalty", "--tpf", "--kvp", "--json",
        "--prompts", "--tuning", "--kv-dtype", "--hop-b", "--teacher-force", "--timeout"})
    cases.push_back({model_option("llama-tiny") + kIds + option + " \"\"", {option}});
  cases.push_back(
      {model_option("llama-tiny") + "--prompt-ids 1 --prompt-ids \"\"", {"--prompt-ids is empty"}});
  if (const std::string reason = decode::cuda_unavailable_reason(); !reason.empty())
    cases.push_back({model_option("llama-tiny") + kIds + "--device cuda", {"--device cuda: " + reason}});
  check_refused(cases);
}

TEST_CASE("a checkpoint that is missing or broken gives one clear error and a non-zero exit", "[quick]") {
  const ScratchDirectory scratch;
  const auto llama = data_directory() / "llama-tiny";
  const auto copy_model = [&](const std::string& name) {
    std::filesystem::create_directory(scratch / name);
    std::filesystem::copy_file(llama / "config.json", scratch / name / "config.json");
    std::filesystem::copy_file(llama / "model.safetensors", scratch / name / "model.safetensors");
    std::filesystem::permissions(scratch / name / "model.safetensors", std::filesystem::perms::owner_all);
    std::filesystem::permissions(scratch / name / "config.json", std::filesystem::perms::owner_all);
    return scratch / name;
  };
  const auto truncated = copy_model("truncated");
  std::filesystem::resize_file(truncated / "model.safetensors", 100000);
  const auto lying = copy_model("lying");
  {
    std::fstream file(lying / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    file.write("\xff\xff\xff\xff\xff\xff\xff\x7f", 8);
  }
  const auto headless = copy_model("headless");
  {
    std::string config = read_file(headless / "config.json");
    config.replace(config.find("\"num_attention_heads\": 8"), 24, "\"num_attention_heads\": 0");
    write_file(headless / "config.json", config);
  }
  const auto not_json = copy_model("not_json");
  write_file(not_json / "config.json", "{ \"model_type\": ");
  std::filesystem::create_directory(scratch / "empty");
  check_refused({
      {"--model " + (scratch / "missing").string() + kIds, {"missing"}},
      {"--model " + (scratch / "empty").string() + kIds,
       {"config.json: cannot open", "give the folder that holds config.json", "snapshots/<revision>"}},
      {"--model " + truncated.string() + kIds, {"model.safetensors"}},
      {"--model " + lying.string() + kIds, {"model.safetensors", "header"}},
      {"--model " + headless.string() + kIds, {"num_attention_heads", "0"}},
      {"--model " + not_json.string() + kIds, {"config.json"}},
  });
}

#ifdef HELIX_MPIRUN
TEST_CASE("four processes under mpirun serve what comes to the first", "[mpi]") {
  check_serving("--kvp 2 --tpa 2", HELIX_MPIRUN);
  check_serving("--kvp 2 --dp 2", HELIX_MPIRUN);
}

TEST_CASE("four processes under mpirun give the golden tokens", "[mpi]") {
  for (const std::string& name : kReferenceModels) {
    const ScratchDirectory scratch;
    const ReferenceModel model(name);
    const Golden golden = model.golden();
    write_file(scratch / "prompts.json", nlohmann::json(golden.prompts).dump());
    for (const TopologySpec& spec : Topology::legal_topologies(model.config.shape, 4)) {
      const Run run = run_decode(
          model_option(name) + "--kv-dtype f32 --activation f32 --ignore-eos --max-new-tokens 24 --kvp " +
              std::to_string(spec.kvp) + " --tpa " + std::to_string(spec.tpa) + " --ep " +
              std::to_string(spec.ep) + " --prompts " + (scratch / "prompts.json").string() + " --json " +
              (scratch / "report.json").string(),
          HELIX_MPIRUN);
      INFO(name << "\n" << run.output);
      REQUIRE(run.exit_code == 0);
      const auto json = nlohmann::json::parse(read_file(scratch / "report.json"));
      for (std::size_t s = 0; s < golden.greedy.size(); ++s) {
        CHECK(json.at("sequences")[s].at("tokens").get<decode::TokenIds>() == golden.greedy[s]);
      }
    }
  }
}

TEST_CASE("stages and replicas as processes give the golden tokens", "[mpi]") {
  const ScratchDirectory scratch;
  const Golden golden = ReferenceModel("llama-tiny").golden();
  write_file(scratch / "prompts.json", nlohmann::json(golden.prompts).dump());
  for (const char* widths : {"--pp 2 --kvp 2", "--dp 2 --tpa 2", "--pp 2 --dp 2"}) {
    const Run run =
        run_decode(model_option("llama-tiny") +
                       "--kv-dtype f32 --activation f32 --ignore-eos --max-new-tokens 24 --prompts " +
                       (scratch / "prompts.json").string() + " --json " + (scratch / "report.json").string() +
                       " " + widths,
                   HELIX_MPIRUN);
    INFO(run.output);
    REQUIRE(run.exit_code == 0);
    const auto json = nlohmann::json::parse(read_file(scratch / "report.json"));
    for (std::size_t s = 0; s < golden.greedy.size(); ++s) {
      CHECK(json.at("sequences")[s].at("tokens").get<decode::TokenIds>() == golden.greedy[s]);
    }
  }
}

TEST_CASE("a process's resident memory grows by its share of the KV only", "[mpi]") {
  const ScratchDirectory scratch;
  const auto memory_with_context = [&](int tokens) {
    const Run run = run_decode(model_option("llama-tiny") +
                                   "--kvp 4 --kv-dtype f32 --max-new-tokens 2 --synthetic-context " +
                                   std::to_string(tokens) + " --json " + (scratch / "report.json").string(),
                               HELIX_MPIRUN);
    INFO(run.output);
    REQUIRE(run.exit_code == 0);
    return nlohmann::json::parse(read_file(scratch / "report.json")).at("memory").at("ranks");
  };
  const auto small = memory_with_context(16384);
  const auto large = memory_with_context(16384 + 131072);
  for (std::size_t rank = 0; rank < 4; ++rank) {
    const double share = large[rank].at("kv_bytes").get<double>() - small[rank].at("kv_bytes").get<double>();
    const double growth =
        large[rank].at("resident_bytes").get<double>() - small[rank].at("resident_bytes").get<double>();
    INFO("rank " << rank << ": share " << share << ", growth " << growth);
    CHECK(share == 131072.0 / 4 * 2 * 2 * 2 * 64 * 4);  // layers, K and V, heads, head_dim, f32
    CHECK(std::abs(growth - share) < 0.1 * share);
  }
}

TEST_CASE("a bad configuration under mpirun ends all processes with one message", "[mpi]") {
  std::vector<BadInput> cases = {{"--kvp 2", {"the world has 4 ranks"}}};
  if (!decode::is_cuda_built())
    cases.push_back({"--kvp 4 --device cuda", {"--device cuda: " + decode::cuda_unavailable_reason()}});
  for (const auto& [arguments, parts] : cases) {
    const Run run = run_decode(model_option("llama-tiny") + "--prompt-ids 1,2,3 " + arguments, HELIX_MPIRUN);
    INFO(run.output);
    CHECK(run.exit_code != 0);
    CHECK_THAT(run.output, ContainsSubstring(parts.front()));
    CHECK(run.output.find(parts.front()) == run.output.rfind(parts.front()));
  }
}
#endif

}  // namespace helix::test
