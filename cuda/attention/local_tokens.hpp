// SPDX-License-Identifier: Apache-2.0
// How many tokens of a sequence a rank may hold, so that attention kernels can count them in 32 bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include <helix/backend/batch.hpp>
#include <helix/error.hpp>
#include <helix/kv_format.hpp>

namespace helix::cuda {

/// Local tokens of a sequence; a KV tile more still fits in an int.
inline constexpr std::int64_t kMaxLocalTokens = std::numeric_limits<std::int32_t>::max() - 1023;

/// Throws Error(unsupported) if a sequence of the batch may have more than kMaxLocalTokens on this rank, as
/// far as the host can know: by Batch::lengths_host, else by the pages that a sequence may have.
inline void check_local_tokens(const Batch& batch, const KvView& kv) {
  const std::int64_t pages = kv.page_begins == nullptr ? kv.max_pages : kv.num_pages;
  std::int64_t most = pages * kv.format.page_tokens;  // at most 2^31 * 2^24
  if (most <= kMaxLocalTokens) return;
  if (!batch.lengths_host.empty()) {
    const auto longest = std::max_element(batch.lengths_host.begin(), batch.lengths_host.end());
    most = kv.layout.length(*longest, kv.kvp_rank);
  }
  HELIX_EXPECTS(most <= kMaxLocalTokens, ErrorCode::unsupported, "partial_attention: a sequence may have ",
                most, " tokens on KVP rank ", kv.kvp_rank, " (", pages, " pages of ", kv.format.page_tokens,
                "); GPU kernels count up to ", kMaxLocalTokens,
                ": use a larger KVP, or say by shorter rows of the page table or by the batch's "
                "lengths_host that sequences are shorter");
}

}  // namespace helix::cuda
