// SPDX-License-Identifier: Apache-2.0
// Names ranks in error messages; the list of ranks must not be empty.
#pragma once

#include <span>
#include <string>

#include <helix/error.hpp>

namespace helix::comm {

/// The failure of a job that had no memory left for a message that names the rank.
inline constexpr const char* kUnnamedFailure =
    "a rank of the job has failed; no memory was left to say which";

/// "rank 2" or "ranks 2, 3". @throws Error(internal) if there are none: such a message would name nobody.
inline std::string rank_names(std::span<const int> ranks) {
  HELIX_EXPECTS(!ranks.empty(), ErrorCode::internal, "a message about missing ranks has none to name");
  std::string text = (ranks.size() == 1 ? "rank " : "ranks ") + std::to_string(ranks.front());
  for (const int rank : ranks.subspan(1)) text.append(", ").append(std::to_string(rank));
  return text;
}

}  // namespace helix::comm
