// SPDX-License-Identifier: Apache-2.0
// Ranks are grouped into islands in which every two ranks reach each other.
#include "comm/islands.hpp"

#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include "support/catch.hpp"

using helix::comm::has_pair;
using helix::comm::is_in_one_island;
using helix::comm::islands_of;
using helix::comm::kNoIsland;

namespace {

/// reach[from][to] is '1' if `from` reaches `to`.
std::vector<int> islands(const std::vector<std::string>& reach) {
  return islands_of(reach.size(), [&](std::size_t from, std::size_t to) { return reach[from][to] == '1'; });
}

}  // namespace

TEST_CASE("an island is named by its lowest rank, wherever its ranks are") {
  CHECK(islands({}).empty());
  CHECK(islands({"1"}) == std::vector<int>{0});
  CHECK(islands({"11", "11"}) == std::vector<int>{0, 0});
  CHECK(islands({"10", "01"}) == std::vector<int>{0, 1});
  // Two machines of four ranks each, whose ranks alternate.
  CHECK(islands({"10101010", "01010101", "10101010", "01010101", "10101010", "01010101", "10101010",
                 "01010101"}) == std::vector<int>{0, 1, 0, 1, 0, 1, 0, 1});
}

TEST_CASE("a rank that does not reach itself is of no island, and one that is not reached is alone") {
  CHECK(islands({"0"}) == std::vector<int>{kNoIsland});
  CHECK(islands({"111", "101", "111"}) == std::vector<int>{0, kNoIsland, 0});
  CHECK(islands({"110", "111", "111"}) == std::vector<int>{0, 0, 2});
}

TEST_CASE("where reach is not transitive, lower ranks choose first") {
  CHECK(islands({"1100", "1110", "0111", "0011"}) == std::vector<int>{0, 0, 2, 2});
  CHECK(islands({"1010", "0111", "1110", "0101"}) == std::vector<int>{0, 1, 0, 1});
}

TEST_CASE("every two ranks of an island reach each other, whatever the reach is") {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const std::size_t count = 1 + random() % 12;
    std::vector<std::string> reach(count, std::string(count, '0'));
    for (std::string& row : reach)
      for (char& bit : row) bit = random() % 8 != 0 ? '1' : '0';
    const std::vector<int> names = islands(reach);
    for (std::size_t a = 0; a < count; ++a) {
      CHECK((names[a] == kNoIsland) == (reach[a][a] == '0'));
      for (std::size_t b = 0; b < count; ++b)
        if (names[a] != kNoIsland && names[a] == names[b]) CHECK((reach[a][b] == '1' && reach[b][a] == '1'));
    }
  }
}

TEST_CASE("a group is inside an island or not") {
  const std::vector<int> names = {0, 1, 0, kNoIsland, 1, 1, kNoIsland};
  CHECK(is_in_one_island(names, std::vector<int>{0, 2}));
  CHECK(is_in_one_island(names, std::vector<int>{5, 1, 4}));
  CHECK(is_in_one_island(names, std::vector<int>{2}));
  CHECK_FALSE(is_in_one_island(names, std::vector<int>{0, 2, 1}));
  CHECK_FALSE(is_in_one_island(names, std::vector<int>{3}));
  CHECK_FALSE(is_in_one_island(names, std::vector<int>{3, 6}));
  CHECK_FALSE(is_in_one_island(names, std::vector<int>{0, 3}));
}

TEST_CASE("islands of one rank each make no pair") {
  CHECK_FALSE(has_pair(std::vector<int>{}));
  CHECK_FALSE(has_pair(std::vector<int>{0, 1, 2}));
  CHECK_FALSE(has_pair(std::vector<int>{kNoIsland, kNoIsland}));
  CHECK(has_pair(std::vector<int>{0, kNoIsland, 0}));
}
