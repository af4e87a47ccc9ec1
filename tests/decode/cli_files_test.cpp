// SPDX-License-Identifier: Apache-2.0
// helix-decode with output to failing disks and pipes, and with sizes beyond every limit: it prints one line
// and leaves no partial file.
#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace helix::test {
namespace {

using Catch::Matchers::ContainsSubstring;

const std::string kModel = "--model " HELIX_TEST_DATA "/llama-tiny ";
const std::string kRun = kModel + "--prompt-ids 1,2,3 --max-new-tokens 2 ";

/// Runs a line of shell script; $D stands for helix-decode.
Run run_script(const std::string& script) {
  return run_command("sh -c '" + replaced(script, "$D", HELIX_DECODE) + "'", 60);
}

bool is_one_error(const Run& run) {
  const auto first = run.output.find("helix-decode: ");
  return run.exit_code == 1 && first != std::string::npos &&
         run.output.find("helix-decode: ", first + 1) == std::string::npos;
}

std::vector<std::string> files_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

}  // namespace

TEST_CASE("standard output that cannot be written is an error", "[quick]") {
  for (const std::string& arguments :
       {kRun, kRun + "--plan-only", kRun + "--plan-only --dp 65536", std::string("--help")}) {
    const Run run = run_script("$D " + arguments + " > /dev/full");
    INFO(run.output);
    CHECK(is_one_error(run));
    CHECK_THAT(run.output, ContainsSubstring("standard output"));
  }
}

TEST_CASE("standard error that cannot be written takes only its messages", "[quick]") {
  for (const char* lost : {"2> /dev/full", "2>&-"}) {
    INFO(lost);
    CHECK(run_script(std::string("$D --nope ") + lost).exit_code == 1);
    const Run run = run_script("$D " + kRun + "--dp 2 " + lost);  // one replica has no sequence
    CHECK(run.exit_code == 0);
    CHECK_THAT(run.output, ContainsSubstring("tokens/s"));
  }
}

TEST_CASE("a server's standard streams may be closed or full", "[quick]") {
  const std::string request = "{\"id\":\"a\",\"prompt\":[1],\"max_tokens\":2}";
  const auto serve = [&](const std::string& streams) {
    const ScratchDirectory scratch;
    write_file(scratch / "in", request + "\n");
    return run_script("$D " + kModel + "--serve --device cpu < " + (scratch / "in").string() + " " + streams);
  };
  const Run closed = serve("2> /dev/null <&-");
  INFO(closed.output);
  CHECK(closed.exit_code == 0);
  CHECK_THAT(closed.output, ContainsSubstring("\"ready\"") && !ContainsSubstring("\"error\""));
  const Run silent = serve("2> /dev/full");
  CHECK(silent.exit_code == 0);
  CHECK_THAT(silent.output, ContainsSubstring("\"end\""));
  for (const char* lost : {"> /dev/full", ">&-"}) {
    const Run run = serve(std::string("3>&1 2>&3 ") + lost);
    INFO(run.output);
    CHECK(is_one_error(run));
    CHECK_THAT(run.output, ContainsSubstring("standard output cannot be written: "));
  }
  // A client that leaves is not an error.
  const Run left =
      run_script("{ $D " + kModel + "--serve --device cpu < /dev/null 2> /dev/null; echo $? >&2; } | true");
  CHECK(left.output == "0\n");
}

TEST_CASE("a server's threads have stacks that suffice, whatever ulimit -s says", "[quick]") {
  const ScratchDirectory scratch;
  write_file(scratch / "in", "{\"id\":\"a\",\"prompt\":[1],\"max_tokens\":2}\n");
  const Run run = run_script("ulimit -s 64; $D " + kModel + "--serve --device cpu --kvp 2 < " +
                             (scratch / "in").string());
  INFO(run.output);
  CHECK(run.exit_code == 0);
  CHECK_THAT(run.output, ContainsSubstring("\"end\""));
}

TEST_CASE("messages are one line, whatever they quote", "[quick]") {
  for (const auto& [arguments, says] :
       {std::pair<std::string, std::string>{"--model \"no${N}such\" --prompt-ids 1",
                                            "no\\nsuch: not a directory"},
        {kModel + "\"--a${N}b\"", "--a\\nb is unknown"},
        {kModel + "--prompt-ids \"1${N}2\"", "1\\n2"}}) {
    const Run run = run_script("N=\"\n\"; $D " + arguments);
    INFO(run.output);
    CHECK(is_one_error(run));
    CHECK_THAT(run.output, ContainsSubstring(says));
    CHECK(std::count(run.output.begin(), run.output.end(), '\n') == 1);
  }
}

TEST_CASE("a report is whole or not there", "[quick]") {
  const ScratchDirectory scratch;
  const std::filesystem::path folder = scratch / "out";
  std::filesystem::create_directory(folder);
  const std::string report = (folder / "report.json").string();
  const std::string to_report = kRun + "--json " + report;

  SECTION("a full disk leaves what was there") {
    // No block may be written: write() fails as on a full disk.
    const std::string full = "trap \"\" XFSZ; ulimit -f 0; $D " + to_report;
    const Run fresh = run_script(full);
    INFO(fresh.output);
    CHECK(is_one_error(fresh));
    CHECK_THAT(fresh.output, ContainsSubstring("report.json") && ContainsSubstring("cannot be written"));
    CHECK(files_in(folder).empty());
    write_file(report, "before");
    CHECK(is_one_error(run_script(full)));
    CHECK(read_file(report) == "before");
    CHECK(files_in(folder) == std::vector<std::string>{"report.json"});
  }
  SECTION("a file is replaced, through a link too, and keeps its mode") {
    write_file(report, "before");
    std::filesystem::permissions(report,
                                 std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
    std::filesystem::create_symlink(report, scratch / "link.json");
    const Run run = run_script("$D " + kRun + "--json " + (scratch / "link.json").string());
    INFO(run.output);
    CHECK(run.exit_code == 0);
    CHECK(std::filesystem::is_symlink(scratch / "link.json"));
    CHECK(nlohmann::json::parse(read_file(report)).contains("sequences"));
    CHECK(std::filesystem::status(report).permissions() ==
          (std::filesystem::perms::owner_read | std::filesystem::perms::owner_write));
    CHECK(files_in(folder) == std::vector<std::string>{"report.json"});
  }
  SECTION("pipes, terminals' devices and standard output are written as they are") {
    REQUIRE(::mkfifo((scratch / "fifo").c_str(), 0600) == 0);
    const Run fifo = run_script("cat " + (scratch / "fifo").string() + " & $D " + kRun + "--json " +
                                (scratch / "fifo").string() + " > /dev/null; wait");
    CHECK(fifo.exit_code == 0);
    CHECK(nlohmann::json::parse(fifo.output).contains("sequences"));
    CHECK(run_script("$D " + kRun + "--json /dev/null").exit_code == 0);
    const Run piped = run_script("$D " + kRun + "--json /dev/stdout | cat");
    CHECK_THAT(piped.output, ContainsSubstring("tokens/s") && ContainsSubstring("\"sequences\""));
    const Run redirected = run_script("$D " + kRun + "--json /dev/stdout > " + report);
    CHECK(redirected.exit_code == 0);
    CHECK_THAT(read_file(report), ContainsSubstring("memory a rank") && ContainsSubstring("tokens/s") &&
                                      ContainsSubstring("\"sequences\""));
    CHECK(is_one_error(run_script("$D " + kRun + "--json /dev/full")));
    // A deleted file has no name under which it could be replaced, and its link must not be replaced.
    const std::string removed = "exec > " + report + "; rm " + report + "; $D " + kRun + "--json /dev/stdout";
    CHECK(run_script(removed).exit_code == 0);
    CHECK(std::filesystem::is_symlink("/dev/stdout"));
  }
}

TEST_CASE("a link that leads nowhere stays what it is", "[quick]") {
  const ScratchDirectory scratch;
  for (const std::string& target : {(scratch / "gone.json").string(), std::string("/proc/self/fd/97")}) {
    const std::filesystem::path link = scratch / "link.json";
    std::filesystem::create_symlink(target, link);
    const Run run = run_script("$D " + kRun + "--json " + link.string());
    INFO(run.output);
    CHECK(is_one_error(run));
    CHECK_THAT(run.output, ContainsSubstring("link.json: is a link that leads nowhere"));
    CHECK(std::filesystem::is_symlink(link));
    std::filesystem::remove(link);
  }
}

TEST_CASE("a report that cannot be written is refused before the work", "[quick]") {
  const ScratchDirectory scratch;
  for (const auto& [path, says] :
       {std::pair<std::string, std::string>{(scratch / "none/report.json").string(), "there is no folder"},
        {(scratch / "").string(), "folder"},
        {"/proc/report.json", "/proc/report.json"},
        {(scratch / std::string(256, 'x')).string(), "File name too long"}}) {
    const Run run = run_script("$D " + kRun + "--json " + path);
    INFO(run.output);
    CHECK(is_one_error(run));
    CHECK_THAT(run.output, ContainsSubstring(says));
    CHECK_THAT(run.output, !ContainsSubstring("memory a rank"));
  }
}

TEST_CASE("a report may have a name as long as names can be", "[quick]") {
  const ScratchDirectory scratch;
  const std::filesystem::path report = scratch / std::string(255, 'x');
  const Run run = run_script("$D " + kRun + "--json " + report.string());
  INFO(run.output);
  CHECK(run.exit_code == 0);
  CHECK(std::filesystem::exists(report));
}

TEST_CASE("sizes beyond their limits are refused by name, value and limit", "[quick]") {
  struct Case {
    std::string arguments;
    std::vector<std::string> words;
  };
  const std::string huge = "9223372036854775807";
  const std::vector<Case> cases = {
      {"--prompt-ids 1 --chunk 4611686018427387904", {"chunk is 4611686018427387904", "[1, 2147483647]"}},
      {"--prompt-ids 1 --kvp 4 --chunk " + huge, {"chunk is " + huge}},
      {"--prompt-ids 1 --page-tokens " + huge, {"page_tokens is " + huge, "[1, 16777216]"}},
      {"--prompt-ids 1 --prefill-tokens " + huge, {"prefill_tokens is " + huge, "[1, 1048576]"}},
      {"--prompt-ids 1 --max-new-tokens " + huge, {"max_new_tokens is " + huge, "[1, 1099511627776]"}},
      {"--prompt-ids 1 --draft-tokens " + huge, {"draft_tokens is " + huge, "[1, 64]"}},
      {"--prompt-ids 1 --dp 1000000", {"1000000", "exceeds 65536 ranks"}},
      {"--prompt-ids 1 --dp 2147483647 --pp 2", {"exceeds 65536 ranks"}},
      {"--synthetic-context " + huge, {"synthetic_context is " + huge}},
      {"--synthetic-context 1099511627776", {"1099511627776 tokens", "at most 1099511627776"}},
      {"--synthetic-context 1099511627760", {"17179869184 pages of 64 tokens", "2147483647"}},
      {"--synthetic-context " + huge + " --topology auto --ranks 4", {"synthetic_context is " + huge}},
      {"--prompt-ids 1 --max-new-tokens " + huge + " --topology auto --ranks 4",
       {"max_new_tokens is " + huge}},
  };
  for (const Case& bad : cases) {
    const Run run = run_script("$D " + kModel + "--plan-only " + bad.arguments);
    INFO(bad.arguments << "\n" << run.output);
    CHECK(is_one_error(run));
    for (const std::string& word : bad.words) CHECK_THAT(run.output, ContainsSubstring(word));
  }
  const Run many = run_script("$D " + kModel + "--plan-only --prompt-ids 1 --dp 65536 | tail -n 3");
  CHECK_THAT(many.output, ContainsSubstring("208.16 GiB"));  // 65,536 times 3.25 MiB
}

TEST_CASE("a report that would replace a file of the run is refused, and changes nothing", "[quick]") {
  const ScratchDirectory scratch;
  const std::filesystem::path original = std::filesystem::path(HELIX_TEST_DATA) / "llama-tiny";
  const std::filesystem::path model = scratch / "model";
  std::filesystem::create_directory(model);
  for (const char* name : {"config.json", "model.safetensors"})
    std::filesystem::copy_file(original / name, model / name);
  write_file(model / "tokenizer.json", "{}");
  write_file(scratch / "prompts.json", "[[1, 2, 3]]");
  write_file(scratch / "teacher.json", "[[4, 5]]");
  std::filesystem::create_hard_link(model / "model.safetensors", scratch / "hard.json");
  std::filesystem::create_symlink(model / "model.safetensors", scratch / "soft.json");
  const std::string folder = scratch.path().string();
  const std::string run = "$D --model " + model.string() + " --max-new-tokens 2 --prompts " + folder +
                          "/prompts.json --teacher-force " + folder + "/teacher.json --json ";

  const std::vector<std::pair<std::string, std::string>> cases = {
      {"/model/config.json", "config.json of --model"},
      {"/model/../model/model.safetensors", "model.safetensors of --model"},
      {"/hard.json", "model.safetensors of --model"},
      {"/soft.json", "model.safetensors of --model"},
      {"/model/tokenizer.json", "tokenizer.json of --model"},
      {"/model/generation_config.json", "generation_config.json of --model"},  // there is none
      {"/model/model.safetensors.index.json", "model.safetensors.index.json of --model"},
      {"/prompts.json", "--prompts"},
      {"/teacher.json", "--teacher-force"}};
  for (const auto& [file, input] : cases) {
    const Run refused = run_script(run + folder + file);
    INFO(file << "\n" << refused.output);
    CHECK(is_one_error(refused));
    CHECK_THAT(refused.output, ContainsSubstring("helix-decode: " + input + " and --json are both " + folder +
                                                 file + "; give each a file of its own"));
  }
  CHECK(read_file(model / "config.json") == read_file(original / "config.json"));
  CHECK(read_file(model / "model.safetensors") == read_file(original / "model.safetensors"));
  CHECK(read_file(model / "tokenizer.json") == "{}");
  CHECK(read_file(scratch / "prompts.json") == "[[1, 2, 3]]");
  CHECK(read_file(scratch / "teacher.json") == "[[4, 5]]");
  CHECK(files_in(model).size() == 3);

  // A report beside them is none of these, even where it replaces an earlier one.
  for (int i = 0; i < 2; ++i) CHECK(run_script(run + (model / "report.json").string()).exit_code == 0);
}

TEST_CASE("files that never end or never begin are refused at once", "[quick]") {
  const ScratchDirectory scratch;
  REQUIRE(::mkfifo((scratch / "fifo").c_str(), 0600) == 0);
  const std::string fifo = (scratch / "fifo").string();
  for (const std::string& arguments :
       {kModel + "--prompts " + fifo, kModel + "--prompts /dev/zero", kRun + "--teacher-force " + fifo}) {
    const Run run = run_script("$D " + arguments);
    INFO(run.output);
    CHECK(is_one_error(run));
    CHECK_THAT(run.output, ContainsSubstring("not a regular file"));
  }
}

}  // namespace helix::test
