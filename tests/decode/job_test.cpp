// SPDX-License-Identifier: Apache-2.0
// Sampling options and penalties on the command line, and the values taken from the checkpoint when the
// command line has none.
#include "cli/job.hpp"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cli/options.hpp"
#include "cli/warnings.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"
#include "support/process.hpp"

namespace helix::test {
namespace {

using decode::Options;
using decode::Penalties;

Options options_of(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "helix-decode");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const std::optional<Options> options =
      decode::parse_options(static_cast<int>(arguments.size()), argv.data());
  REQUIRE(options);
  return *options;
}

/// llama-tiny with `generation_config` as its generation_config.json, or without that file.
class Model {
 public:
  /// `more_config` holds further members of config.json, each followed by a comma. `eos_ids` replaces its 2.
  explicit Model(const std::string& generation_config, const std::string& more_config = "",
                 const std::string& eos_ids = "2") {
    const std::filesystem::path original = std::filesystem::path(HELIX_TEST_DATA) / "llama-tiny";
    std::string config = read_file(original / "config.json");
    const std::string eos = R"("eos_token_id": )";
    config.replace(config.find(eos), eos.size() + 1, eos + eos_ids);
    config.insert(config.find('{') + 1, more_config);
    write_file(scratch_ / "config.json", config);
    std::filesystem::create_symlink(original / "model.safetensors", scratch_ / "model.safetensors");
    if (!generation_config.empty()) write_file(scratch_ / "generation_config.json", generation_config);
  }

  decode::Job job(const std::vector<std::string>& more) const {
    return job(more, *decode::make_thread_launcher());
  }
  decode::Job job(const std::vector<std::string>& more, const decode::Launcher& launcher) const {
    std::vector<std::string> arguments = {"--model", scratch_.path().string(), "--device", "cpu"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return decode::Job(options_of(arguments), launcher);
  }

 private:
  ScratchDirectory scratch_;
};

/// Eight processes, with the given number on each machine.
class Machines : public decode::Launcher {
 public:
  explicit Machines(int num_local_ranks) : num_local_ranks_(num_local_ranks) {}

  bool has_processes() const override { return true; }
  int rank() const override { return 0; }
  int size() const override { return 8; }
  int num_local_ranks() const override { return num_local_ranks_; }
  std::int64_t rank_memory() const override { return 1000; }
  std::string describe_devices(const Topology&, const decode::LaunchOptions&) const override { return ""; }
  decode::GenerationResult run(const decode::Checkpoint&, const decode::ModelConfig&, const Topology&,
                               const decode::GenerationRequest&, const decode::LaunchOptions&) override {
    return {};
  }
  std::string fail(std::string_view) noexcept override { return ""; }

 protected:
  std::vector<std::string> gather_texts(const std::string& mine) override { return {mine}; }

 private:
  int num_local_ranks_;
};

std::string field_of(const decode::Job& job, std::string_view name) {
  for (const decode::JobField& field : job.fields("a processor")) {
    if (field.name == name) return field.value;
  }
  return "";
}

/// Whether a line of the job's warnings has `part`.
bool warns_of(const decode::Job& job, const std::string& part) {
  const auto launcher = decode::make_thread_launcher();
  const std::vector<std::string> lines =
      decode::warnings(*launcher, job.checkpoint, job.config, job.defaults, *job.topo, job.options.request,
                       job.launch, job.plan);
  return std::ranges::any_of(lines,
                             [&](const std::string& line) { return line.find(part) != std::string::npos; });
}

const std::string kGenerationConfig =
    R"({"eos_token_id":[3,5],"do_sample":true,"temperature":0.5,"top_p":0.75,"top_k":7,)"
    R"("min_p":0.125,"repetition_penalty":1.5})";

}  // namespace

TEST_CASE("each option of draws and penalties comes to its own member", "[quick]") {
  const Options options = options_of({"--model",
                                      "m",
                                      "--prompt-ids",
                                      "1",
                                      "--temperature",
                                      "0.5",
                                      "--top-p",
                                      "0.75",
                                      "--min-p",
                                      "0.125",
                                      "--top-k",
                                      "7",
                                      "--seed",
                                      "9",
                                      "--repetition-penalty",
                                      "1.5",
                                      "--presence-penalty",
                                      "0.25",
                                      "--frequency-penalty",
                                      "-2"});
  CHECK(options.request.sampling ==
        SamplingConfig{.temperature = 0.5f, .top_p = 0.75f, .min_p = 0.125f, .top_k = 7, .seed = 9});
  CHECK(options.request.penalties == Penalties{.repetition = 1.5f, .presence = 0.25f, .frequency = -2.0f});
  CHECK(options.given_sampling.size() == 7);

  const Options none = options_of({"--model", "m", "--prompt-ids", "1", "--seed", "9"});
  CHECK(none.request.sampling == SamplingConfig{.seed = 9});
  CHECK(none.request.penalties == Penalties{});
  CHECK(none.given_sampling.empty());
}

TEST_CASE("requests of --serve have generation_config.json's defaults where the command line has none",
          "[quick]") {
  const Model model(kGenerationConfig);
  const decode::Job job = model.job({"--serve", "--seed", "9"});
  CHECK(job.config.eos_ids == std::vector<std::int64_t>{3, 5});
  CHECK(job.options.request.sampling ==
        SamplingConfig{.temperature = 0.5f, .top_p = 0.75f, .min_p = 0.125f, .top_k = 7, .seed = 9});
  CHECK(job.options.request.penalties == Penalties{.repetition = 1.5f});

  const decode::Job given = model.job({"--serve", "--presence-penalty", "0.25", "--top-p", "0.5"});
  CHECK(given.config.eos_ids == std::vector<std::int64_t>{3, 5});
  CHECK(given.options.request.sampling ==
        SamplingConfig{.temperature = 0.5f, .top_p = 0.5f, .min_p = 0.125f, .top_k = 7});
  CHECK(given.options.request.penalties == Penalties{.repetition = 1.5f, .presence = 0.25f});
  const decode::Job greedy = model.job({"--serve", "--temperature", "0"});
  CHECK(greedy.options.request.sampling.temperature == 0.0f);
}

TEST_CASE("values of generation_config.json have the limits of the command line, where they take effect",
          "[quick]") {
  struct Case {
    const char* key;
    const char* value;
    std::vector<std::string> replacement;
    const char* says;
  };
  const std::vector<Case> cases = {
      {"temperature", "-1", {"--temperature", "0.5"}, "temperature is -1; it must be finite and at least 0"},
      {"top_p", "0", {"--top-p", "0.5"}, "top_p is 0; it must be in (0, 1]"},
      {"min_p", "2", {"--min-p", "0.5"}, "min_p is 2; it must be in [0, 1]"},
      {"top_k", "-1", {"--top-k", "5"}, "top_k is -1; it must be at least 0"},
      {"repetition_penalty", "0", {"--repetition-penalty", "1.5"}, "repetition_penalty is 0; it must be in"}};
  for (const auto& [key, value, replacement, says] : cases) {
    const Model model(std::string(R"({"do_sample":true,")") + key + "\":" + value + "}");
    const auto failure = failure_of([&] { model.job({"--serve"}); });
    REQUIRE(failure);
    INFO(failure->what);
    CHECK(failure->code == ErrorCode::invalid_file);
    CHECK(failure->says(std::string("generation_config.json: ") + says));
    std::vector<std::string> replaced = replacement;
    replaced.emplace_back("--serve");
    CHECK_NOTHROW(model.job(replaced));
    CHECK_NOTHROW(model.job({"--prompt-ids", "1"}));
  }
  const Model wide(R"({"do_sample":true,"temperature":150,"top_p":1e-7})");
  CHECK(wide.job({"--serve"}).options.request.sampling ==
        SamplingConfig{.temperature = 150.0f, .top_p = 1e-7f});
}

TEST_CASE("prompts of the command line end where generation_config.json says, and are greedy", "[quick]") {
  const decode::Job job = Model(kGenerationConfig).job({"--prompt-ids", "1"});
  CHECK(job.config.eos_ids == std::vector<std::int64_t>{3, 5});
  CHECK(job.options.request.sampling == SamplingConfig{});
  CHECK(job.options.request.penalties == Penalties{});
}

TEST_CASE("a repetition_penalty that the prompts of the command line do not take gives a warning",
          "[quick]") {
  const auto warns = [](const char* penalty, const std::vector<std::string>& options) {
    const decode::Job job = Model(std::string(R"({"repetition_penalty":)") + penalty + "}").job(options);
    return warns_of(job, std::string("give --repetition-penalty ") + penalty);
  };
  CHECK(warns("1.5", {"--prompt-ids", "1"}));
  CHECK_FALSE(warns("1.5", {"--prompt-ids", "1", "--repetition-penalty", "1.25"}));
  CHECK_FALSE(warns("1.5", {"--serve"}));
  CHECK_FALSE(warns("1", {"--prompt-ids", "1"}));
  CHECK_FALSE(warns("0", {"--prompt-ids", "1"}));  // no value of the option
}

TEST_CASE("a warning about ids that end no sequence names the file that they come from", "[quick]") {
  const std::vector<std::string> ids = {"--prompt-ids", "1"};
  const std::string fault = "config.json: eos_token_id 600 is outside";
  const decode::Job own = Model(R"({"eos_token_id":[3,600]})").job(ids);
  CHECK(warns_of(own, "/generation_" + fault));
  const decode::Job without = Model("{}", "", "600").job(ids);
  CHECK(warns_of(without, "/" + fault));
  const decode::Job alone = Model("", "", "[2, 600]").job(ids);
  CHECK(warns_of(alone, "/" + fault));
}

TEST_CASE("without generation_config.json, or its ids, sequences end where config.json says", "[quick]") {
  for (const char* const text : {"", "{}", R"({"eos_token_id":null})"}) {
    const decode::Job job = Model(text).job({"--serve"});
    CHECK(job.config.eos_ids == std::vector<std::int64_t>{2});
    CHECK(job.options.request.sampling == SamplingConfig{});
    CHECK(job.options.request.penalties == Penalties{});
  }
}

TEST_CASE("config.json's keys of generation count where there is no generation_config.json", "[quick]") {
  const std::string keys = R"("repetition_penalty": 1.5, "do_sample": true, "temperature": 0.25,)";
  const decode::Job alone = Model("", keys).job({"--serve"});
  CHECK(alone.options.request.penalties == Penalties{.repetition = 1.5f});
  CHECK(alone.options.request.sampling.temperature == 0.25f);
  const decode::Job beside = Model("{}", keys).job({"--serve"});
  CHECK(beside.options.request.penalties == Penalties{});
  CHECK(beside.options.request.sampling == SamplingConfig{});
}

TEST_CASE("room for requests follows from the model and the options", "[quick]") {
  const Model model("");
  CHECK(model.job({"--serve"}).options.request.serving ==
        decode::ServeLimits{.max_sequences = 8, .max_tokens = 8192, .kv_tokens = 8 * 8192});
  CHECK(model.job({"--serve", "--max-sequences", "3", "--context", "1K"}).options.request.serving ==
        decode::ServeLimits{.max_sequences = 3, .max_tokens = 1024, .kv_tokens = 3 * 1024});
  CHECK(model.job({"--serve", "--context", "1K", "--kv-tokens", "2K"}).options.request.serving ==
        decode::ServeLimits{.max_sequences = 8, .max_tokens = 1024, .kv_tokens = 2048});
  CHECK_FALSE(model.job({"--prompt-ids", "1"}).options.request.serving);
}

TEST_CASE("the cores of a machine are shared by the ranks on it, not by those of all machines", "[quick]") {
  const Model model("");
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const std::vector<std::string> eight = {"--prompt-ids", "1", "--kvp", "4", "--tpa", "2"};
  for (const int ranks : {1, 2, 8}) {
    const decode::Job job = model.job(eight, Machines(ranks));
    CHECK(job.launch.rank_memory == 1000);
    CHECK(decode::threads_per_rank(job.launch, *job.topo) == std::max(1, cores / ranks));
  }
  const decode::Job threads = model.job(eight);
  CHECK(threads.launch.rank_memory == 0);
  CHECK(decode::threads_per_rank(threads.launch, *threads.topo) == std::max(1, cores / 8));
  std::vector<std::string> given = eight;
  given.insert(given.end(), {"--threads", "3"});
  const decode::Job three = model.job(given, Machines(1));
  CHECK(decode::threads_per_rank(three.launch, *three.topo) == 3);
}

TEST_CASE("processes whose model routes to experts must compute with the same kernels", "[quick]") {
  const auto options_for = [](const char* model) {
    return options_of({"--model", (std::filesystem::path(HELIX_TEST_DATA) / model).string(), "--device",
                       "cpu", "--prompt-ids", "1"});
  };
  const auto launcher = decode::make_thread_launcher();
  CHECK(field_of(decode::Job(options_for("deepseek-tiny"), *launcher), "kernels for") == "a processor");
  CHECK(field_of(decode::Job(options_for("llama-tiny"), *launcher), "kernels for").empty());
}

TEST_CASE("processes take the prompts that the least memory has room for, where no option says", "[quick]") {
  const Model model("");
  decode::Job job = model.job({"--prompt-ids", "1"});
  CHECK(job.room() == decode::PromptRoom{.tokens = 256, .can_expand = true});
  CHECK(field_of(job, "--prefill-tokens") == "auto");
  job.set_room({.tokens = 100, .can_expand = false});
  CHECK(job.options.request.prefill_tokens == 100);
  CHECK(job.options.request.mla_prefill == MlaForm::absorbed);
  CHECK(job.room() == decode::PromptRoom{.tokens = 100, .can_expand = false});
  CHECK(field_of(job, "--prefill-tokens") == "auto");  // what the process was started with
  CHECK(field_of(job, "--mla-prefill") == "auto");

  decode::Job given = model.job({"--prompt-ids", "1", "--prefill-tokens", "256"});
  CHECK(field_of(given, "--prefill-tokens") == "256");
  given.set_room({.tokens = 100, .can_expand = false});
  CHECK(given.options.request.prefill_tokens == 256);
  CHECK(given.options.request.mla_prefill == MlaForm::automatic);

  // The plan uses the agreed room.
  std::string prompt = "1";
  for (int i = 1; i < 256; ++i) prompt += ",1";
  decode::Job longer = model.job({"--prompt-ids", prompt});
  const std::int64_t before = longer.plan[0].workspace_bytes;
  longer.set_room({.tokens = 16, .can_expand = true});
  CHECK(longer.plan[0].workspace_bytes < before);
}

}  // namespace helix::test
