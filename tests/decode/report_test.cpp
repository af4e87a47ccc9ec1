// SPDX-License-Identifier: Apache-2.0
// The comparison that --verify makes.
#include "cli/report.hpp"

#include <vector>

#include "support/catch.hpp"
#include "support/failure.hpp"

namespace helix::test {
namespace {

using decode::GenerationResult;
using decode::TokenIds;

GenerationResult result_of(const std::vector<TokenIds>& sequences) {
  GenerationResult result;
  for (const TokenIds& tokens : sequences)
    result.sequences.push_back({.prompt = {1}, .tokens = tokens, .logits_first8 = {}, .logits_norm = {}});
  return result;
}

}  // namespace

TEST_CASE("verification names the first sequence and step that differ, with both tokens", "[quick]") {
  const GenerationResult one_rank = result_of({{3, 4, 5}, {6, 7}});
  CHECK_NOTHROW(check_same_tokens(result_of({{3, 4, 5}, {6, 7}}), one_rank));
  const auto message = [&](const std::vector<TokenIds>& sequences) {
    const Failure failure = required_failure([&] { check_same_tokens(result_of(sequences), one_rank); });
    CHECK(failure.code == ErrorCode::internal);
    return failure.what;
  };
  using Catch::Matchers::EndsWith;
  CHECK_THAT(message({{3, 4, 5}, {6, 8}}),
             EndsWith("sequence 1 differs at step 1: token 8, one rank gives 7"));
  CHECK_THAT(message({{3, 9, 5}, {8, 7}}),
             EndsWith("sequence 0 differs at step 1: token 9, one rank gives 4"));
  CHECK_THAT(message({{3, 4}, {6, 7}}), EndsWith("sequence 0 differs at step 2: token -1, one rank gives 5"));
  CHECK_THAT(message({{3, 4, 5}, {6, 7, 2}}),
             EndsWith("sequence 1 differs at step 2: token 2, one rank gives -1"));
  CHECK_THAT(message({{3, 4, 5}}), EndsWith("1 sequences, one rank gives 2"));
  CHECK_THAT(message({{3, 4, 5}, {6, 7}, {}}), EndsWith("3 sequences, one rank gives 2"));
}

}  // namespace helix::test
