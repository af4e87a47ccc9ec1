// SPDX-License-Identifier: Apache-2.0
// KvLayout: which KVP rank owns a token, and where it lies there (invariant 2).
#pragma once

#include <cstdint>

#include <helix/error.hpp>
#include <helix/host_device.hpp>
#include <helix/integers.hpp>
#include <helix/limits.hpp>
#include <helix/range.hpp>

namespace helix {

/// Range of tokens of a sequence: positions, or tokens of one rank where a name says local.
using TokenRange = Range;

namespace detail {

/// KvLayout::length() in integers of type Int, which must hold all intermediate values.
template <class Int>
HELIX_HOST_DEVICE constexpr std::int64_t owned_tokens(Int tokens, Int period, Int chunk, Int kvp_rank) {
  const Int rest = tokens % period - kvp_rank * chunk;
  const Int partial = rest < 0 ? 0 : (rest > chunk ? chunk : rest);
  return std::int64_t{tokens / period * chunk + partial};
}

}  // namespace detail

/// Block-cyclic split of a sequence over KVP ranks in chunks of `chunk` tokens. The owner is a function of
/// the global position alone, so prefill, decode, draft tokens and transfers agree without a counter. Local
/// positions are compact: rank r's tokens of a sequence of S tokens lie at 0 .. length(S, r) - 1 (invariant
/// 3). Independent of the page size.
class KvLayout {
 public:
  /// A layout over `kvp` ranks in chunks of `chunk` tokens.
  /// @throws Error(invalid_argument) unless kvp is in [1, kMaxRanks] and chunk in [1, kMaxTokens].
  constexpr KvLayout(std::int64_t kvp, std::int64_t chunk) : kvp_(kvp), chunk_(chunk) {
    HELIX_EXPECTS(kvp >= 1 && kvp <= kMaxRanks && chunk >= 1 && chunk <= kMaxTokens,
                  ErrorCode::invalid_argument, "KvLayout: kvp is ", kvp, ", chunk is ", chunk,
                  "; kvp must be in [1, ", kMaxRanks, "], chunk in [1, ", kMaxTokens, "]");
  }

  /// A layout that nobody has given: one rank owns all, but operations refuse a KV view with it.
  static constexpr KvLayout unset() {
    KvLayout layout(1, 1);
    layout.chunk_ = -1;
    return layout;
  }
  constexpr bool is_set() const { return chunk_ > 0; }

  HELIX_HOST_DEVICE constexpr std::int64_t kvp() const { return kvp_; }
  HELIX_HOST_DEVICE constexpr std::int64_t chunk() const { return chunk_; }
  /// Tokens after which ownership repeats: chunk * KVP.
  HELIX_HOST_DEVICE constexpr std::int64_t period() const { return chunk_ * kvp_; }

  /// KVP rank that stores global position `position` (>= 0).
  HELIX_HOST_DEVICE constexpr std::int64_t owner(std::int64_t position) const {
    return (position / chunk_) % kvp_;
  }

  /// Local position of global `position` on its owner.
  HELIX_HOST_DEVICE constexpr std::int64_t local(std::int64_t position) const {
    return (position / period()) * chunk_ + position % chunk_;
  }

  /// Tokens that `kvp_rank` owns of the first `num_tokens` global positions; 0 for num_tokens <= 0. Also the
  /// causal bound of a query: at global position p it reads local positions [0, length(p + 1, kvp_rank))
  /// (invariant 4).
  HELIX_HOST_DEVICE constexpr std::int64_t length(std::int64_t num_tokens, std::int64_t kvp_rank) const {
    if (num_tokens <= 0) return 0;
    if (kvp_ == 1) return num_tokens;
    // Kernels take this path: on a GPU a 64-bit division costs ten 32-bit ones.
    if (num_tokens <= INT32_MAX && period() <= INT32_MAX) {
      return detail::owned_tokens(static_cast<std::int32_t>(num_tokens), static_cast<std::int32_t>(period()),
                                  static_cast<std::int32_t>(chunk_), static_cast<std::int32_t>(kvp_rank));
    }
    return detail::owned_tokens(num_tokens, period(), chunk_, kvp_rank);
  }

  /// Pages of `page_tokens` local tokens that `kvp_rank` needs for the first `num_tokens` global positions.
  HELIX_HOST_DEVICE constexpr std::int64_t pages(std::int64_t num_tokens, std::int64_t kvp_rank,
                                                 std::int64_t page_tokens) const {
    return ceil_div(length(num_tokens, kvp_rank), page_tokens);
  }

  /// Local positions on `kvp_rank` that a query at global `position` reads: [length(position + 1 - window),
  /// length(position + 1)), or from 0 without a window (invariant 4). Empty for padding (-1).
  HELIX_HOST_DEVICE constexpr TokenRange visible(std::int64_t position, std::int64_t window,
                                                 std::int64_t kvp_rank) const {
    if (position < 0) return {0, 0};
    return {window > 0 ? length(position + 1 - window, kvp_rank) : std::int64_t{0},
            length(position + 1, kvp_rank)};
  }

  /// Global position of `local_position` on `kvp_rank`; the inverse of (owner, local).
  HELIX_HOST_DEVICE constexpr std::int64_t global(std::int64_t kvp_rank, std::int64_t local_position) const {
    return (local_position / chunk_) * period() + kvp_rank * chunk_ + local_position % chunk_;
  }

  /// Local positions on `kvp_rank` of the global span `span`: one contiguous run, because local indexing is
  /// compact.
  HELIX_HOST_DEVICE constexpr TokenRange local_range(TokenRange span, std::int64_t kvp_rank) const {
    return {length(span.begin, kvp_rank), length(span.end, kvp_rank)};
  }

  /// Calls `visit(TokenRange global, int64 local_begin)` for each maximal owned run of `span`, in order: at
  /// most one a chunk, without a loop over tokens. With kvp == 1 the span is one run.
  template <class Visit>
  constexpr void for_each_owned_range(TokenRange span, std::int64_t kvp_rank, Visit&& visit) const {
    if (kvp_ == 1) {
      if (span.size() > 0) visit(span, span.begin);
      return;
    }
    std::int64_t position = span.begin;
    if (const std::int64_t behind = position % period() - kvp_rank * chunk_; behind < 0) {
      position -= behind;  // before this rank's chunk of the period
    } else if (behind >= chunk_) {
      position += period() - behind;  // past it: the chunk of the next period
    }
    while (position < span.end) {
      const std::int64_t chunk_end = position - position % chunk_ + chunk_;
      const TokenRange run{position, smaller(chunk_end, span.end)};
      visit(run, local(position));
      position = chunk_end - chunk_ + period();
    }
  }

  friend constexpr bool operator==(const KvLayout&, const KvLayout&) = default;

 private:
  std::int64_t kvp_;
  std::int64_t chunk_;
};

}  // namespace helix
