// SPDX-License-Identifier: Apache-2.0
// Names ranks in error messages; the list of ranks must not be empty.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>

#include <helix/error.hpp>

namespace helix::comm {

/// The failure of a job that had no memory left for a message that names the rank.
inline constexpr const char* kUnnamedFailure =
    "a rank of the job has failed; no memory was left to say which";

/// Most ranks that a message names, so that what follows them fits in the messages between ranks.
inline constexpr std::size_t kMostNamed = 16;

/// "rank 2", "ranks 2, 3" or, of more than kMostNamed, "ranks 1, 2, ..., 16 and 283 more" (all 16 in full).
/// @throws Error(internal) if there are none: such a message would name nobody.
inline std::string rank_names(std::span<const int> ranks) {
  HELIX_EXPECTS(!ranks.empty(), ErrorCode::internal, "a message about missing ranks has none to name");
  std::string text = (ranks.size() == 1 ? "rank " : "ranks ") + std::to_string(ranks.front());
  const std::size_t num_named = std::min(ranks.size(), kMostNamed);
  for (const int rank : ranks.subspan(1, num_named - 1)) text.append(", ").append(std::to_string(rank));
  if (num_named < ranks.size()) text.append(message({" and ", ranks.size() - num_named, " more"}));
  return text;
}

}  // namespace helix::comm
