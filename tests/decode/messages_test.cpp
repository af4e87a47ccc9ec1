// SPDX-License-Identifier: Apache-2.0
// What the programs advise exists: every option that their sources name is an option of theirs, or of what
// starts them.
#include <algorithm>
#include <filesystem>
#include <regex>
#include <set>
#include <string>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace helix::test {
namespace {

using Catch::Matchers::Contains;

std::set<std::string> options_in(const std::string& text) {
  static const std::regex kOption("--[a-z][a-z0-9]*([-_][a-z0-9]*)*");
  std::set<std::string> options;
  for (std::sregex_iterator match(text.begin(), text.end(), kOption), end; match != end; ++match) {
    const bool is_variable = match->str().find('_') != std::string::npos;  // --depth_
    if (!is_variable) options.insert(match->str());
  }
  return options;
}

/// What `folder`'s sources name and `known` lacks, as "file: option".
std::set<std::string> unknown_options(const std::filesystem::path& folder,
                                      const std::set<std::string>& known) {
  std::set<std::string> unknown;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    const std::string extension = entry.path().extension().string();
    if (extension != ".cpp" && extension != ".hpp") continue;
    for (const std::string& option : options_in(read_file(entry.path()))) {
      if (!known.contains(option)) unknown.insert(entry.path().filename().string() + ": " + option);
    }
  }
  return unknown;
}

}  // namespace

TEST_CASE("every option that a program's sources name is one of its options", "[quick]") {
  const std::filesystem::path examples = std::filesystem::path(HELIX_SOURCE_DIR) / "examples";
  const std::set<std::string> decode = options_in(run_command(HELIX_DECODE " --help").output);
  const std::set<std::string> plan = options_in(run_command(HELIX_PLAN " --help").output);
  REQUIRE((decode.contains("--kvp") && plan.contains("--ttl-ms") && !decode.contains("--ttl-ms")));
  CHECK(unknown_options(examples / "decode", decode) == std::set<std::string>{});
  CHECK(unknown_options(examples / "plan", plan) == std::set<std::string>{});
  // A control: the planner's sources name options that the decoder does not have.
  CHECK(unknown_options(examples / "plan", decode).contains("options.cpp: --ttl-ms"));
}

TEST_CASE("an unknown command or option of the scripts is one line that names what was meant", "[quick]") {
  struct Case {
    const char* arguments;
    const char* says;
  };
  for (const Case& bad :
       {Case{"run.sh decoed", "run.sh: 'decoed' is no command; did you mean decode?"},
        Case{"run.sh Plan", "run.sh: 'Plan' is no command; did you mean plan?"},
        Case{"run.sh xyz", "run.sh: 'xyz' is no command; give decode, plan or bench"},
        Case{"run.sh --model m", "run.sh: '--model' is no command; did you mean decode --model?"},
        Case{"test.sh --ful", "test.sh: --ful is unknown; see ./test.sh --help"},
        Case{"test.sh --sanitize all", "test.sh: --sanitize is 'all'; give asan, ubsan or tsan"}}) {
    const Run run = run_command(std::string(HELIX_SOURCE_DIR "/") + bad.arguments);
    INFO(bad.arguments << "\n" << run.output);
    CHECK(run.exit_code == 2);
    CHECK_THAT(run.output, Contains(bad.says));
    CHECK(std::count(run.output.begin(), run.output.end(), '\n') == 1);
  }
}

}  // namespace helix::test
