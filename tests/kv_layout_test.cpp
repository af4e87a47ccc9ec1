// SPDX-License-Identifier: Apache-2.0
// KvLayout: published partitions, and a walk over every token for KVP 1..8, chunk 1..64 and sequences below
// 700.
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include <helix/error.hpp>
#include <helix/kv_layout.hpp>

#include "support/catch.hpp"

namespace {

using helix::Error;
using helix::KvLayout;
using helix::TokenRange;

constexpr std::int64_t kTokens = 700;

/// Tokens of each rank, counted from 1 as in the published tables.
std::vector<std::vector<std::int64_t>> tokens_by_rank(std::int64_t num_tokens, std::int64_t chunk,
                                                      std::int64_t kvp) {
  const KvLayout layout(kvp, chunk);
  std::vector<std::vector<std::int64_t>> tokens(static_cast<std::size_t>(kvp));
  for (std::int64_t p = 0; p < num_tokens; ++p)
    tokens[static_cast<std::size_t>(layout.owner(p))].push_back(p + 1);
  for (std::int64_t r = 0; r < kvp; ++r) {
    CHECK(layout.length(num_tokens, r) ==
          static_cast<std::int64_t>(tokens[static_cast<std::size_t>(r)].size()));
  }
  return tokens;
}

}  // namespace

TEST_CASE("published partitions are reproduced") {
  using Table = std::vector<std::vector<std::int64_t>>;
  CHECK(tokens_by_rank(13, 2, 4) == Table{{1, 2, 9, 10}, {3, 4, 11, 12}, {5, 6, 13}, {7, 8}});
  CHECK(tokens_by_rank(12, 4, 2) == Table{{1, 2, 3, 4, 9, 10, 11, 12}, {5, 6, 7, 8}});
  CHECK(tokens_by_rank(12, 4, 4) == Table{{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10, 11, 12}, {}});
  CHECK(tokens_by_rank(10, 4, 4) == Table{{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10}, {}});
  const KvLayout layout(4, 16);
  for (std::int64_t p = 0; p < 80; ++p) CHECK(layout.owner(p) == (p < 64 ? p / 16 : 0));
}

TEST_CASE("the first decoded token goes where its position says, not to rank 0") {
  constexpr KvLayout layout(4, 32);
  static_assert(layout.owner(100) == 3);
  static_assert(layout.local(100) == 4);
  static_assert(layout.length(100, 3) == 4 && layout.length(101, 3) == 5);
  CHECK(layout.owner(100) == 3);
}

TEST_CASE("causal bounds of several queries use global positions") {
  const KvLayout layout(4, 1);
  std::vector<std::int64_t> bounds;
  for (std::int64_t position = 944; position < 948; ++position)
    bounds.push_back(layout.length(position + 1, 1));
  CHECK(bounds == std::vector<std::int64_t>{236, 237, 237, 237});
  // Counting back from the shard's own length is a mistake: it would give 234, 235, 236, 237.
  CHECK(layout.length(948, 1) - 3 != bounds.front());
}

TEST_CASE("every token lies on one rank at one compact local position") {
  std::vector<std::int64_t> lengths;
  for (std::int64_t kvp = 1; kvp <= 8; ++kvp) {
    for (std::int64_t chunk = 1; chunk <= 64; ++chunk) {
      const KvLayout layout(kvp, chunk);
      std::int64_t mistakes = 0;
      // Walk the sequence knowing only that chunks are dealt to the ranks in turn.
      lengths.assign(static_cast<std::size_t>(kvp), 0);
      std::int64_t rank = 0;
      std::int64_t left_in_chunk = chunk;
      for (std::int64_t p = 0; p < kTokens; ++p) {
        std::int64_t& length = lengths[static_cast<std::size_t>(rank)];
        mistakes += layout.owner(p) != rank;
        mistakes += layout.local(p) != length;
        mistakes += layout.global(rank, length) != p;
        ++length;
        // Every prefix: this is also the causal bound of the query at p, and the shard of a sequence of p + 1
        // tokens.
        for (std::int64_t r = 0; r < kvp; ++r) {
          mistakes += layout.length(p + 1, r) != lengths[static_cast<std::size_t>(r)];
        }
        if (--left_in_chunk == 0) {
          left_in_chunk = chunk;
          rank = (rank + 1) % kvp;
        }
      }
      CAPTURE(kvp, chunk);
      CHECK(mistakes == 0);
      CHECK(layout.period() == kvp * chunk);
    }
  }
}

TEST_CASE("owned ranges visit what a loop over tokens visits, in maximal runs") {
  for (std::int64_t kvp : {1, 2, 3, 4, 8}) {
    for (std::int64_t chunk : {1, 2, 3, 7, 16}) {
      const KvLayout layout(kvp, chunk);
      std::int64_t mistakes = 0;
      for (std::int64_t begin = 0; begin < 70; ++begin) {
        for (std::int64_t end = begin; end < 140; end += (end - begin < 8 ? 1 : 5)) {
          for (std::int64_t r = 0; r < kvp; ++r) {
            std::vector<std::tuple<std::int64_t, std::int64_t>> expected;
            for (std::int64_t p = begin; p < end; ++p) {
              if (layout.owner(p) == r) expected.emplace_back(p, layout.local(p));
            }
            std::vector<std::tuple<std::int64_t, std::int64_t>> visited;
            std::int64_t previous_end = -1;
            layout.for_each_owned_range({begin, end}, r, [&](TokenRange run, std::int64_t local_begin) {
              mistakes += run.size() <= 0;
              mistakes += run.begin == previous_end;  // adjacent runs must be one run
              previous_end = run.end;
              for (std::int64_t i = 0; i < run.size(); ++i)
                visited.emplace_back(run.begin + i, local_begin + i);
            });
            mistakes += visited != expected;
            const TokenRange local = layout.local_range({begin, end}, r);
            mistakes += local.size() != static_cast<std::int64_t>(expected.size());
            mistakes += !expected.empty() && local.begin != std::get<1>(expected.front());
          }
        }
      }
      CAPTURE(kvp, chunk);
      CHECK(mistakes == 0);
    }
  }
}

TEST_CASE("very long sequences do not overflow") {
  constexpr std::int64_t kLong = std::int64_t{1} << 53;
  for (const KvLayout& layout :
       {KvLayout(8, 16), KvLayout(7, 3), KvLayout(1, 1), KvLayout(3, std::int64_t{1} << 40)}) {
    CAPTURE(layout.kvp(), layout.chunk());
    for (const std::int64_t p : {kLong, kLong + 1, kLong + 12345}) {
      const std::int64_t r = layout.owner(p);
      CHECK(layout.global(r, layout.local(p)) == p);
      CHECK(layout.length(p + 1, r) == layout.local(p) + 1);
      std::int64_t total = 0;
      for (std::int64_t i = 0; i < layout.kvp(); ++i) total += layout.length(p, i);
      CHECK(total == p);
    }
  }
}

TEST_CASE("few tokens in chunks of any size lie on the first rank") {
  for (const std::int64_t chunk : {std::int64_t{1} << 30, std::int64_t{1} << 31, std::int64_t{1} << 40}) {
    const KvLayout layout(4, chunk);
    CAPTURE(chunk);
    CHECK(layout.length(100, 0) == 100);
    CHECK(layout.length(100, 3) == 0);
  }
}

TEST_CASE("a query sees the tokens of its window, or all up to itself, where each rank has them") {
  for (const auto& [kvp, chunk] : {std::pair{1, 4}, std::pair{2, 1}, std::pair{3, 4}}) {
    const KvLayout layout(kvp, chunk);
    for (const std::int64_t window : {0, 1, 2, 5, 40}) {
      for (std::int64_t position = -1; position < 30; ++position) {
        for (std::int64_t rank = 0; rank < kvp; ++rank) {
          CAPTURE(kvp, chunk, window, position, rank);
          std::int64_t hidden = 0;  // this rank's tokens before the window
          std::int64_t seen = 0;
          for (std::int64_t p = 0; p <= position; ++p) {
            if ((p / chunk) % kvp != rank) continue;
            const bool is_hidden = window > 0 && p <= position - window;
            ++(is_hidden ? hidden : seen);
          }
          CHECK(layout.visible(position, window, rank) == TokenRange{hidden, hidden + seen});
        }
      }
    }
  }
}

TEST_CASE("no tokens, or fewer than none, are no tokens") {
  CHECK(KvLayout(1, 16).length(-1, 0) == 0);
  CHECK(KvLayout(1, 16).length(std::numeric_limits<std::int64_t>::min(), 0) == 0);
  const KvLayout layout(4, 16);
  for (std::int64_t r = 0; r < 4; ++r) {
    CHECK(layout.length(0, r) == 0);
    CHECK(layout.length(-1, r) == 0);  // the lower bound of a sliding window may be negative
    CHECK(layout.length(std::numeric_limits<std::int64_t>::min(), r) == 0);
    int visits = 0;
    layout.for_each_owned_range({64, 64}, r, [&](TokenRange, std::int64_t) { ++visits; });
    CHECK(visits == 0);
  }
}

TEST_CASE("a layout that nobody has given says so") {
  CHECK_FALSE(KvLayout::unset().is_set());
  CHECK(KvLayout(1, 1).is_set());
}

TEST_CASE("the layout is usable in constant expressions and refuses sizes out of range") {
  constexpr KvLayout layout(4, 2);
  static_assert(layout.owner(12) == 2 && layout.local(12) == 2 && layout.global(2, 2) == 12);
  static_assert(layout.length(13, 0) == 4 && layout.length(13, 2) == 3 && layout.length(13, 3) == 2);
  static_assert(layout.local_range({4, 13}, 2) == TokenRange{0, 3});
  static_assert(layout.period() == 8 && layout == KvLayout(4, 2) && !(layout == KvLayout(2, 4)));
  constexpr std::int64_t owned = [] {
    std::int64_t sum = 0;
    KvLayout(4, 2).for_each_owned_range({3, 13}, 1, [&](TokenRange run, std::int64_t) { sum += run.size(); });
    return sum;
  }();
  static_assert(owned == 3);
  using Sizes = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [kvp, chunk] : {Sizes{0, 1}, Sizes{1, 0}, Sizes{-1, 4}, Sizes{4, -1}, Sizes{65537, 1},
                                   Sizes{4, std::int64_t{1} << 62}, Sizes{1, (std::int64_t{1} << 40) + 1}}) {
    try {
      KvLayout(kvp, chunk);
      FAIL("no Error was thrown");
    } catch (const Error& error) {
      CHECK(error.code() == helix::ErrorCode::invalid_argument);
      CHECK(std::string(error.what()) == "KvLayout: kvp is " + std::to_string(kvp) + ", chunk is " +
                                             std::to_string(chunk) +
                                             "; kvp must be in [1, 65536], chunk in [1, 1099511627776]");
    }
  }
}
