// SPDX-License-Identifier: Apache-2.0
// The penalties that follow from the tokens of a prompt and its output.
#include "generate/token_counts.hpp"

#include <cstdint>
#include <vector>

#include "support/catch.hpp"

namespace helix::test {
namespace {

using decode::Penalties;
using decode::TokenCounts;

/// The penalties at row 4 after `prompt` and `output`.
std::vector<LogitPenalty> penalties_of(const Penalties& penalties, const std::vector<std::int32_t>& prompt,
                                       const std::vector<std::int32_t>& output) {
  TokenCounts counts(penalties, prompt);
  for (const std::int32_t token : output) counts.add(token);
  std::vector<LogitPenalty> all;
  counts.append_penalties(4, all);
  return all;
}

using Expected = std::vector<LogitPenalty>;

}  // namespace

TEST_CASE("repetition is of prompt and output, presence and frequency are of the output", "[quick]") {
  const Penalties all{.repetition = 1.5f, .presence = 0.5f, .frequency = 0.25f};
  CHECK(penalties_of(all, {1, 1, 2}, {3, 3}) ==
        Expected{{4, 1, 1.5f, 0.0f}, {4, 2, 1.5f, 0.0f}, {4, 3, 1.5f, 1.0f}});
  CHECK(penalties_of(all, {1, 1, 2}, {3, 1, 3, 3}) ==
        Expected{{4, 1, 1.5f, 0.75f}, {4, 2, 1.5f, 0.0f}, {4, 3, 1.5f, 1.25f}});
  CHECK(penalties_of({.repetition = 1.5f}, {1, 1, 2}, {3, 3}) ==
        Expected{{4, 1, 1.5f, 0.0f}, {4, 2, 1.5f, 0.0f}, {4, 3, 1.5f, 0.0f}});
  CHECK(penalties_of({.presence = 0.5f}, {1, 1, 2}, {3, 3}) == Expected{{4, 3, 1.0f, 0.5f}});
  CHECK(penalties_of({.frequency = 0.25f}, {1, 1, 2}, {3, 3}) == Expected{{4, 3, 1.0f, 0.5f}});
}

TEST_CASE("a sequence without penalties keeps no counts", "[quick]") {
  CHECK(penalties_of({}, {1, 1, 2}, {3, 3}).empty());
}

TEST_CASE("penalties of several sequences stand behind each other", "[quick]") {
  TokenCounts counts({.presence = 0.5f}, {});
  counts.add(3);
  Expected penalties{{0, 7, 1.0f, 0.25f}};
  counts.append_penalties(1, penalties);
  CHECK(penalties == Expected{{0, 7, 1.0f, 0.25f}, {1, 3, 1.0f, 0.5f}});
}

}  // namespace helix::test
