// SPDX-License-Identifier: Apache-2.0
// HostCall: a call of the hosts of a group, which processes tell each other first, so that differing calls
// are detected.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <helix/error.hpp>

namespace helix::comm {

/// A host's call, sent as its bytes.
struct HostCall {
  std::uint64_t group = 0;       // number of the group, by next_group(); 0: the root
  std::uint64_t last_group = 0;  // largest number of a group that this rank knows
  std::uint32_t is_split = 0;
  std::int32_t color = 0;
  std::int32_t key = 0;
  std::uint32_t unused = 0;
  std::uint64_t bytes = 0;     // of a window
  std::uint64_t multiple = 0;  // of its stride
  std::uint64_t stride = 0;    // for this rank's device

  std::string describe() const {
    if (is_split != 0) return "split";
    return "allocate_window of " + std::to_string(bytes) + " bytes in multiples of " +
           std::to_string(multiple);
  }
};

/// @throws Error(invalid_argument) unless all ranks make the same call on the same group. Ranks that are in
/// several groups together may come with different ones.
inline void expect_equal(std::span<const HostCall> calls, std::span<const int> root_ranks) {
  const HostCall& first = calls.front();
  for (std::size_t i = 1; i < calls.size(); ++i) {
    const HostCall& call = calls[i];
    HELIX_EXPECTS(call.group == first.group, ErrorCode::invalid_argument, "ranks disagree: rank ",
                  root_ranks[0], " calls ", first.describe(), " on one group, rank ", root_ranks[i],
                  " calls ", call.describe(),
                  " on another; all must make these calls in the same order over all groups");
    HELIX_EXPECTS(
        call.is_split == first.is_split && call.bytes == first.bytes && call.multiple == first.multiple,
        ErrorCode::invalid_argument, "ranks disagree: rank ", root_ranks[0], " calls ", first.describe(),
        ", rank ", root_ranks[i], " calls ", call.describe(),
        "; all must make the same calls in the same order with the same sizes");
  }
}

/// The number of the groups that a split with these calls makes; each rank then knows it as its last. So two
/// ranks never are in two groups of one number.
inline std::uint64_t next_group(std::span<const HostCall> calls) {
  std::uint64_t last = 0;
  for (const HostCall& call : calls) last = std::max(last, call.last_group);
  return last + 1;
}

}  // namespace helix::comm
