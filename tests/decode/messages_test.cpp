// SPDX-License-Identifier: Apache-2.0
// The programs' advice is correct: every option that their sources mention exists. What
// docs/troubleshooting.md quotes is what the programs print.
#include <algorithm>
#include <cctype>
#include <cstddef>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace helix::test {
namespace {

using Catch::Matchers::ContainsSubstring;

std::set<std::string> options_in(const std::string& text) {
  static const std::regex kOption("--[a-z][a-z0-9]*([-_][a-z0-9]*)*");
  std::set<std::string> options;
  for (std::sregex_iterator match(text.begin(), text.end(), kOption), end; match != end; ++match) {
    const bool is_variable = match->str().find('_') != std::string::npos;  // --depth_
    if (!is_variable) options.insert(match->str());
  }
  return options;
}

/// Options that the sources in `folder` mention and `known` lacks, as "file: option".
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

/// The lines of the page's fenced blocks that begin with ```kind.
std::vector<std::string> fenced_lines(const std::string& page, const std::string& kind) {
  std::vector<std::string> lines;
  std::stringstream in(page);
  bool is_inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("```")) {
      is_inside = !is_inside && line == "```" + kind;
    } else if (is_inside) {
      lines.push_back(line);
    }
  }
  return lines;
}

/// Whether `text` has a line that contains the parts of `line` between "..." in this order.
bool says(const std::string& text, const std::string& line) {
  std::string pattern;
  for (std::size_t at = 0; at < line.size(); ++at) {
    if (line.compare(at, 3, "...") == 0) {
      pattern += ".*";
      at += 2;
      continue;
    }
    if (std::ispunct(static_cast<unsigned char>(line[at]))) pattern += '\\';
    pattern += line[at];
  }
  std::stringstream in(text);
  for (std::string said; std::getline(in, said);) {
    if (std::regex_match(said, std::regex(pattern))) return true;
  }
  return false;
}

/// The string literals of a source, without its comments; adjacent literals are joined, others are on lines
/// of their own. `is_cpp`: comments begin with two slashes and single quotes enclose characters; otherwise
/// comments begin with # and single quotes enclose strings.
std::string literals_of(const std::string& source, bool is_cpp) {
  std::string literals;
  bool is_adjacent = false;  // to the literal before
  for (std::size_t at = 0; at < source.size(); ++at) {
    const char c = source[at];
    const bool is_separator =
        is_cpp && c == '\'' && at > 0 && std::isalnum(static_cast<unsigned char>(source[at - 1]));
    if ((c == '"' || c == '\'') && !is_separator) {
      const bool is_string = c == '"' || !is_cpp;
      if (is_string && !is_adjacent) literals += '\n';
      for (++at; at < source.size() && source[at] != c; ++at) {
        if (is_string) literals += source[at];
        if (source[at] == '\\' && ++at < source.size() && is_string) literals += source[at];
      }
      is_adjacent = is_string;
    } else if (is_cpp ? source.compare(at, 2, "//") == 0 : c == '#') {
      at = std::min(source.find('\n', at), source.size());
    } else if (!std::isspace(static_cast<unsigned char>(c))) {
      is_adjacent = false;
    }
  }
  return literals;
}

/// All string literals of the sources.
std::string source_texts() {
  const std::filesystem::path root = HELIX_SOURCE_DIR;
  std::string texts = literals_of(read_file(root / "CMakeLists.txt"), false) +
                      literals_of(read_file(root / "cmake/helix-config.cmake.in"), false);
  for (const char* folder : {"include", "src", "cuda", "examples"}) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root / folder)) {
      const std::string extension = entry.path().extension();
      const bool is_cpp =
          extension == ".hpp" || extension == ".cpp" || extension == ".cu" || extension == ".cuh";
      if (is_cpp || extension == ".py" || extension == ".sh")
        texts += literals_of(read_file(entry.path()), is_cpp);
    }
  }
  return texts;
}

}  // namespace

TEST_CASE("the commands of the troubleshooting page say what it quotes", "[quick]") {
  const std::string page = read_file(HELIX_SOURCE_DIR "/docs/troubleshooting.md");
  int num_commands = 0;
  Run run;
  for (std::string line : fenced_lines(page, "console")) {
    INFO(line << "\n" << run.output);
    if (!line.starts_with("$ ")) {
      CHECK(says(run.output, line));
      continue;
    }
    line.erase(0, 2);
    const bool is_decode = line.starts_with("helix-decode ");
    REQUIRE((is_decode || line.starts_with("helix-plan ")));
    line.replace(0, line.find(' '), is_decode ? HELIX_DECODE : HELIX_PLAN);
    run = run_command("sh -c 'cd " HELIX_SOURCE_DIR " && exec " + line + "'");
    ++num_commands;
  }
  CHECK(num_commands > 10);
  CHECK_FALSE(says("helix-decode: ok\n", "helix-decode: not ok"));
}

TEST_CASE("the messages that the troubleshooting page quotes are in the sources", "[quick]") {
  const std::string texts = source_texts();
  const std::regex value("<[^>]*>");
  int num_parts = 0;
  for (const std::string& line :
       fenced_lines(read_file(HELIX_SOURCE_DIR "/docs/troubleshooting.md"), "text")) {
    for (std::sregex_token_iterator part(line.begin(), line.end(), value, -1), end; part != end; ++part) {
      const std::string words = part->str();
      if (words.size() < 5) continue;  // any text has those
      INFO(line << "\n'" << words << "'");
      const bool is_in_sources = texts.find(words) != std::string::npos;
      CHECK(is_in_sources);
      ++num_parts;
    }
  }
  CHECK(num_parts > 40);
  CHECK(texts.find("words that no source says") == std::string::npos);
  CHECK(texts.find("SPDX-License-Identifier") == std::string::npos);  // comments do not count
  CHECK(literals_of("f(\"a \"\n  \"b\", 1'000, '\"', \"c\");  // \"d\"\n", true) == "\na b\nc");
  CHECK(literals_of("f('a \"b\"')  # 'c'\n", false) == "\na \"b\"");
}

TEST_CASE("every option that a program's sources name is one of its options", "[quick]") {
  const std::filesystem::path examples = std::filesystem::path(HELIX_SOURCE_DIR) / "examples";
  const std::set<std::string> decode = options_in(run_command(HELIX_DECODE " --help").output);
  const std::set<std::string> plan = options_in(run_command(HELIX_PLAN " --help").output);
  REQUIRE((decode.contains("--kvp") && plan.contains("--ttl-ms") && !decode.contains("--ttl-ms")));
  CHECK(unknown_options(examples / "decode", decode) == std::set<std::string>{});
  CHECK(unknown_options(examples / "plan", plan) == std::set<std::string>{});
  // Negative control: the planner's sources mention options that the decoder does not have.
  CHECK(unknown_options(examples / "plan", decode).contains("options.cpp: --ttl-ms"));
}

TEST_CASE("the page on decoding has every option, and no other", "[quick]") {
  const std::set<std::string> options = options_in(run_command(HELIX_DECODE " --help").output);
  // Options of chat, which runs the program, and of the example that passes options to it.
  const std::set<std::string> chat{"--raw", "--stats", "--max-tokens", "--system", "--special"};
  std::set<std::string> described = options_in(read_file(HELIX_SOURCE_DIR "/docs/decoding.md"));
  CHECK(std::ranges::includes(described, options));
  for (const std::string& option : chat) described.erase(option);
  CHECK(described == options);
}

TEST_CASE("an unknown command or option of the scripts is one line that names what was meant", "[quick]") {
  struct Case {
    const char* arguments;
    const char* says;
  };
  for (const Case& bad :
       {Case{"run.sh decoed", "run.sh: 'decoed' is no command; did you mean decode?"},
        Case{"run.sh Plan", "run.sh: 'Plan' is no command; did you mean plan?"},
        Case{"run.sh caht", "run.sh: 'caht' is no command; did you mean chat?"},
        Case{"run.sh xyz", "run.sh: 'xyz' is no command; give chat, decode, plan or bench"},
        Case{"run.sh --model m", "run.sh: '--model' is no command; did you mean decode --model?"},
        Case{"test.sh --ful", "test.sh: --ful is unknown; see ./test.sh --help"},
        Case{"test.sh --sanitize all", "test.sh: --sanitize is 'all'; give asan, ubsan or tsan"},
        Case{"tests/fuzz/run.sh --help", "usage: tests/fuzz/run.sh [SECONDS [TARGET...]]"},
        Case{"test.sh --full --quick",
             "test.sh: --full cannot be given with --quick, --sanitize or --arm64, which build the quick "
             "tests "
             "alone"}}) {
    const Run run = run_command(std::string(HELIX_SOURCE_DIR "/") + bad.arguments);
    INFO(bad.arguments << "\n" << run.output);
    CHECK(run.exit_code == 2);
    CHECK_THAT(run.output, ContainsSubstring(bad.says));
    CHECK(std::count(run.output.begin(), run.output.end(), '\n') == 1);
  }
}

}  // namespace helix::test
