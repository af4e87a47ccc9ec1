// SPDX-License-Identifier: Apache-2.0
// What the programs' command lines share: counts, misspelt names, and the arithmetic of warnings.
#include "cli/command_line.hpp"

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <helix/error.hpp>

#include "cli/counts.hpp"
#include "cli/warnings.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"

namespace helix::decode {
namespace {

using Catch::Matchers::ContainsSubstring;

std::string refusal(const std::string& text) {
  return helix::test::failure_message([&] { parse_count(text); });
}

}  // namespace

TEST_CASE("counts are exact whole numbers, K, M and G powers of 1024", "[quick]") {
  const std::vector<std::pair<const char*, std::int64_t>> cases = {
      {"0", 0},
      {"-3", -3},
      {"007", 7},
      {"131072", 131072},
      {"128K", 131072},
      {"128k", 131072},
      {"128Ki", 131072},
      {"1M", 1048576},
      {"2Mi", 2097152},
      {"1G", 1073741824},
      {"1.5K", 1536},
      {"0.5M", 524288},
      {"1e6", 1000000},
      {"1E6", 1000000},
      {"1e+6", 1000000},
      {"2.5e3", 2500},
      {"1.000", 1},
      {"10e0", 10},
      {"0e999999999999999999999", 0},
      {"9007199254740993", 9007199254740993},  // not representable as a double
      {"9223372036854775807", 9223372036854775807},
      {"-9223372036854775807", -9223372036854775807},
      {"8191.99993896484375P", -1},  // no suffix: refused below
  };
  for (const auto& [text, value] : cases) {
    INFO(text);
    if (std::string(text).ends_with('P')) {
      CHECK_THAT(refusal(text), ContainsSubstring("is no count"));
    } else {
      CHECK(parse_count(text) == value);
    }
  }
}

TEST_CASE("what is no count is refused with its text and one reason", "[quick]") {
  for (const char* text :
       {"",    "-",  "K",  "x",     "12x",  "1e",  "e6", "1e6K", "1 K", " 1",  "1 ",    "+1",
        "--1", "1.", ".5", "1.2.3", "0x10", "1KB", "1i", "1e-3", "nan", "inf", "1_000", "1,000"}) {
    INFO(text);
    CHECK_THAT(refusal(text), ContainsSubstring(std::string(text) + "' is no count"));
  }
  for (const char* text : {"0.5", "1.5", "1.0001K", "1.25e1"}) {
    INFO(text);
    CHECK_THAT(refusal(text), ContainsSubstring(std::string(text) + "' is not whole"));
  }
  for (const char* text :
       {"9223372036854775808", "99999999999999999999999999", "1e19", "1e999999999999999999999",
        "9007199254740992K", "8589934592G", "-9223372036854775808"}) {
    INFO(text);
    CHECK_THAT(refusal(text),
               ContainsSubstring(std::string(text) + "' is too large; at most 9223372036854775807"));
  }
}

TEST_CASE("a name that is nearly right finds the one that was meant", "[quick]") {
  const std::vector<std::string> names = {
      "--model", "--max-new-tokens", "--page-tokens", "--prompt-ids", "--prompts", "--kvp", "--tpa",
      "--tpf",   "--draft-tokens",   "--seed",        "--ignore-eos", "--topology"};
  const std::vector<std::pair<const char*, const char*>> cases = {{"--max-token", "--max-new-tokens"},
                                                                  {"--max-tokens", "--max-new-tokens"},
                                                                  {"--max_new_tokens", "--max-new-tokens"},
                                                                  {"-model", "--model"},
                                                                  {"--Model", "--model"},
                                                                  {"--modle", "--model"},
                                                                  {"--promt-ids", "--prompt-ids"},
                                                                  {"--prompt", "--prompts"},
                                                                  {"--kv", "--kvp"},
                                                                  {"--sede", "--seed"},
                                                                  {"--ignore-eo", "--ignore-eos"},
                                                                  {"--draft", ""},
                                                                  {"--no-such-option", ""},
                                                                  {"--", ""},
                                                                  {"-x", ""}};
  for (const auto& [wrong, meant] : cases) {
    INFO(wrong);
    CHECK(nearest_name(wrong, names) == meant);
  }
}

TEST_CASE("ranks on one GPU share its memory", "[quick]") {
  const std::vector<RankMemory> plan = {{.weights_bytes = 10, .kv_bytes = 20, .workspace_bytes = 30},
                                        {.weights_bytes = 1, .kv_bytes = 2, .workspace_bytes = 3},
                                        {.weights_bytes = 100}};
  using Bytes = std::map<int, std::int64_t>;
  CHECK(gpu_bytes(plan, {0, 0, 0}) == Bytes{{0, 166}});
  CHECK(gpu_bytes(plan, {0, 1, 0}) == Bytes{{0, 160}, {1, 6}});
  CHECK(gpu_bytes(plan, {0, 1, 2}) == Bytes{{0, 60}, {1, 6}, {2, 100}});
}

}  // namespace helix::decode
