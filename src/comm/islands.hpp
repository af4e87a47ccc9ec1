// SPDX-License-Identifier: Apache-2.0
// Islands: groups of ranks of a job in which every rank reaches every other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace helix::comm {

/// The island of a rank that does not even reach itself.
inline constexpr int kNoIsland = -1;

/// Returns the island of each of `count` ranks, named by its lowest rank. In rank order, each rank joins the
/// first island whose ranks it all reaches, and which all reach it; `reaches(from, to)` need not be
/// transitive. Ranks that know the same reach compute the same islands.
template <class Reaches>
std::vector<int> islands_of(std::size_t count, const Reaches& reaches) {
  std::vector<std::vector<std::size_t>> islands;
  std::vector<int> names(count, kNoIsland);
  for (std::size_t rank = 0; rank < count; ++rank) {
    if (!reaches(rank, rank)) continue;
    const auto takes = [&](const std::vector<std::size_t>& island) {
      return std::all_of(island.begin(), island.end(),
                         [&](std::size_t member) { return reaches(rank, member) && reaches(member, rank); });
    };
    auto island = std::find_if(islands.begin(), islands.end(), takes);
    if (island == islands.end()) island = islands.insert(islands.end(), std::vector<std::size_t>());
    island->push_back(rank);
    names[rank] = static_cast<int>(island->front());
  }
  return names;
}

/// Whether all `ranks` are in the same island. `islands` is indexed by rank.
inline bool is_in_one_island(std::span<const int> islands, std::span<const int> ranks) {
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    const int island = islands[static_cast<std::size_t>(rank)];
    return island != kNoIsland && island == islands[static_cast<std::size_t>(ranks.front())];
  });
}

/// Whether some island has at least two ranks.
inline bool has_pair(std::span<const int> islands) {
  for (std::size_t rank = 0; rank < islands.size(); ++rank) {
    // An island is named by its lowest rank.
    if (islands[rank] != kNoIsland && islands[rank] != static_cast<int>(rank)) return true;
  }
  return false;
}

}  // namespace helix::comm
