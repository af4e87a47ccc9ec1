// SPDX-License-Identifier: Apache-2.0
// The tokens that decode steps feed: drawn tokens, a teacher's tokens, or drafts after a drawn token.
#include "generate/fed_tokens.hpp"

#include "support/catch.hpp"

namespace helix::test {

using decode::fed_tokens;
using decode::TokenIds;

TEST_CASE("drafts go on behind the pending token, as far as there are some and tokens are wanted",
          "[quick]") {
  decode::SequenceProgress sequence;
  sequence.index = 1;
  sequence.pending = 9;
  sequence.result.tokens = {8, 9};
  decode::GenerationRequest request;
  request.max_new_tokens = 7;
  CHECK(fed_tokens(request, sequence) == TokenIds{9});
  request.teacher = {{1, 2, 3, 4, 5, 6, 7}, {11, 12, 13, 14, 15, 16, 17}};
  CHECK(fed_tokens(request, sequence) == TokenIds{12});  // replaces the second token, which was drawn as 9
  request.draft_tokens = 4;
  CHECK(fed_tokens(request, sequence) == TokenIds{9, 13, 14, 15});
  request.max_new_tokens = 5;
  CHECK(fed_tokens(request, sequence) == TokenIds{9, 13, 14});
  request.max_new_tokens = 3;
  CHECK(fed_tokens(request, sequence) == TokenIds{9});
  request.max_new_tokens = 7;
  request.teacher[1].resize(3);
  CHECK(fed_tokens(request, sequence) == TokenIds{9, 13});
  request.teacher[1].clear();
  CHECK(fed_tokens(request, sequence) == TokenIds{9});
}

TEST_CASE("a teacher, drafts or penalties make a step wait for the tokens of the one before", "[quick]") {
  const decode::GenerationRequest plain;
  CHECK(decode::feeds_drawn_tokens(plain));
  decode::GenerationRequest request = plain;
  request.draft_tokens = 2;
  CHECK_FALSE(decode::feeds_drawn_tokens(request));
  request = plain;
  request.teacher = {{1}};
  CHECK_FALSE(decode::feeds_drawn_tokens(request));
  request = plain;
  request.penalties.frequency = 0.5f;
  CHECK_FALSE(decode::feeds_drawn_tokens(request));
}

}  // namespace helix::test
