// SPDX-License-Identifier: Apache-2.0
// How many tokens of a sequence a rank may hold, so that attention kernels can count them, and the KV tiles
// of a launch, in 32 bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include <helix/backend/batch.hpp>
#include <helix/error.hpp>
#include <helix/kv_format.hpp>

namespace helix::cuda {

/// Most local tokens of a sequence; one KV tile more still fits in an int.
inline constexpr std::int64_t kMaxLocalTokens = std::numeric_limits<std::int32_t>::max() - 1023;

inline constexpr int kMinKvTileTokens = 16;  ///< Fewest tokens of a KV tile of any kernel.
/// Most empty KV tiles that the schedule adds to a query tile's own.
inline constexpr int kMaxPaddingTiles = 6;

/// The pages that a sequence may have, and the tokens that they hold, at most 2^31 * 2^24. Kernels are chosen
/// and launched by these and not by Batch::lengths_host, because a captured launch is replayed with longer
/// sequences.
inline std::int64_t most_pages(const KvView& kv) {
  return kv.page_begins == nullptr ? kv.max_pages : kv.num_pages;
}
inline std::int64_t page_list_tokens(const KvView& kv) {
  return most_pages(kv) * kv.format.page_tokens;
}

/// The most tokens that a sequence has on this rank, as far as the host knows: by the pages, and by
/// Batch::lengths_host where it is given.
inline std::int64_t most_local_tokens(const Batch& batch, const KvView& kv) {
  const std::int64_t most = page_list_tokens(kv);
  if (batch.lengths_host.empty()) return most;
  const auto longest = std::max_element(batch.lengths_host.begin(), batch.lengths_host.end());
  return std::min(most, kv.layout.length(*longest, kv.kvp_rank));
}

/// Throws Error(unsupported) if a sequence of the batch may have `most` tokens on this rank, and that is more
/// than kMaxLocalTokens.
inline void check_local_tokens(std::int64_t most, const KvView& kv) {
  HELIX_EXPECTS(most <= kMaxLocalTokens, ErrorCode::unsupported, "partial_attention: a sequence may have ",
                most, " tokens on KVP rank ", kv.kvp_rank, " (", most_pages(kv), " pages of ",
                kv.format.page_tokens, "); GPU kernels count up to ", kMaxLocalTokens,
                ": use a larger KVP, or say by shorter rows of the page table or by the batch's "
                "lengths_host that sequences are shorter");
}

/// Most query tiles of a launch for which an int can count the KV tiles, with `kv_heads` KV heads and
/// sequences of up to `most` tokens.
inline std::int64_t most_counted_query_tiles(std::int64_t most, std::int64_t kv_heads) {
  const std::int64_t tiles = most / kMinKvTileTokens + 2 + kMaxPaddingTiles;
  return std::numeric_limits<std::int32_t>::max() / tiles / kv_heads;
}

}  // namespace helix::cuda
