// SPDX-License-Identifier: Apache-2.0
// Groups that are split off from other groups.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <helix/contract/communicator/guarded_bytes.hpp>

namespace helix::contract {

/// Ranks of one color form a group, ordered by (key, old rank). The groups work at the same time without
/// disturbing each other or the parent.
template <class Comm>
void split_contract(Comm& comm) {
  typename Comm::Stream stream;
  for (int num_colors = 1; num_colors <= comm.size(); ++num_colors) {
    const int color = comm.rank() % num_colors;
    Comm part =
        comm.split(color, comm.rank() / num_colors % 2);  // keys 0, 1, 0, 1 ...: old ranks break the ties
    std::vector<std::pair<int, int>> expected;            // (key, old rank)
    for (int r = color; r < comm.size(); r += num_colors) expected.emplace_back(r / num_colors % 2, r);
    std::sort(expected.begin(), expected.end());
    require(part.size() == static_cast<int>(expected.size()), "color ", color, " of ", num_colors, " has ",
            part.size(), " ranks, expected ", expected.size());
    const std::int64_t old_rank = comm.rank();
    std::vector<std::int64_t> members(expected.size());
    part.all_gather(&old_rank, members.data(), sizeof(std::int64_t), stream);
    std::vector<std::int64_t> everybody(static_cast<std::size_t>(comm.size()));
    comm.all_gather(&old_rank, everybody.data(), sizeof(std::int64_t), stream);
    stream.synchronize();
    require(members[static_cast<std::size_t>(part.rank())] == old_rank, "rank ", part.rank(),
            " of the part is not me");
    for (std::size_t i = 0; i < members.size(); ++i) {
      require(members[i] == expected[i].second, "member ", i, " of color ", color, " is rank ", members[i],
              ", expected ", expected[i].second);
    }
    for (int r = 0; r < comm.size(); ++r) {
      require(everybody[static_cast<std::size_t>(r)] == r, "the parent group mixes up rank ", r);
    }
    Comm part_of_part = part.split(0, 0);
    require(part_of_part.size() == part.size() && part_of_part.rank() == part.rank(),
            "a split of a split differs");
  }
}

}  // namespace helix::contract
