// SPDX-License-Identifier: Apache-2.0
// PageLedger: every call works out its demand on all ranks, checks it, and only then changes anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <string_view>
#include <vector>

#include <helix/integers.hpp>
#include <helix/limits.hpp>
#include <helix/page_ledger.hpp>

namespace helix {
namespace detail {

/// Fills the stack with n - 1, ..., 1, 0, so that 0 comes first.
inline void count_down(std::vector<std::int32_t>& numbers) {
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<std::int32_t>(numbers.size() - 1 - i);
  }
}

/// The largest S whose shards all fit. Rank 0 never holds fewer tokens than another rank.
inline std::int64_t tokens_that_fit(const PageLedgerSpec& spec) {
  const std::int64_t local = spec.num_pages * spec.page_tokens;
  const std::int64_t chunk = spec.layout.chunk();
  return local / chunk * spec.layout.period() + local % chunk;
}

/// FNV-1a hash of the sizes. Not a secret: it only tells apart caches whose ids were mixed up.
inline std::uint32_t fingerprint(const PageLedgerSpec& spec) {
  std::uint32_t hash = 2166136261u;
  for (const std::int64_t value : {spec.layout.kvp(), spec.layout.chunk(), spec.page_tokens, spec.num_pages,
                                   spec.max_sequences, spec.max_tokens, std::int64_t{spec.tag}}) {
    for (int byte = 0; byte < 8; ++byte) {
      hash = (hash ^ static_cast<std::uint32_t>(value >> (8 * byte) & 0xff)) * 16777619u;
    }
  }
  return hash;
}

/// Throws Error(invalid_argument) unless the size (called `name`) is in [smallest, largest].
inline void expect_range(std::string_view name, std::int64_t value, std::int64_t smallest,
                         std::int64_t largest) {
  HELIX_EXPECTS(value >= smallest && value <= largest, ErrorCode::invalid_argument, "the KV cache's ", name,
                " is ", value, "; it must be in [", smallest, ", ", largest, "]");
}

/// Throws Error(invalid_argument) unless all sizes are in range.
inline void check_sizes(const PageLedgerSpec& spec) {
  expect_range("kvp", spec.layout.kvp(), 1, kMaxRanks);
  expect_range("chunk", spec.layout.chunk(), 1, kMaxChunk);
  expect_range("page_tokens", spec.page_tokens, 1, kMaxPageTokens);
  expect_range("num_pages", spec.num_pages, 1, kMaxPages);
  expect_range("max_sequences", spec.max_sequences, 1, kMaxSequences);
  expect_range("num_pages * page_tokens", spec.num_pages * spec.page_tokens, 1,
               kMaxTokens / spec.layout.kvp());
  expect_range("max_tokens", spec.max_tokens, 0, kMaxTokens);
}

/// Reserves room for `size` pages, and for twice as many as before if it must, as push_back() does.
inline void ensure_capacity(std::vector<std::int32_t>& pages, std::size_t size) {
  if (pages.capacity() < size) pages.reserve(larger(size, 2 * pages.capacity()));
}

}  // namespace detail

inline PageLedger::PageLedger(const PageLedgerSpec& spec, std::int64_t kvp_rank)
    : spec_(spec), kvp_rank_(kvp_rank) {
  detail::check_sizes(spec);
  detail::expect_range("kvp_rank", kvp_rank, 0, spec.layout.kvp() - 1);

  if (spec_.max_tokens == 0) spec_.max_tokens = detail::tokens_that_fit(spec_);
  max_pages_ = larger<std::int64_t>(1, pages_of(spec_.max_tokens, 0));
  shared_unit_ = least_common_multiple(spec_.page_tokens, spec_.layout.chunk());
  // If the unit exceeds max_tokens nothing is ever shared, so its exact size does not matter.
  shared_unit_ =
      shared_unit_ > kMaxTokens / spec_.layout.kvp() ? kMaxTokens : shared_unit_ * spec_.layout.kvp();
  cache_ = detail::fingerprint(spec_);

  try {
    make_books();
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::capacity, "no memory to keep books of ", spec_.max_sequences, " sequences and ",
                spec_.num_pages, " pages a KVP rank; build the KV cache with fewer");
  }
}

inline void PageLedger::make_books() {
  const auto kvp = static_cast<std::size_t>(spec_.layout.kvp());
  sequences_.resize(static_cast<std::size_t>(spec_.max_sequences));
  free_slots_.resize(sequences_.size());
  detail::count_down(free_slots_);
  pools_.resize(kvp);
  for (Pool& pool : pools_) {
    pool.free.resize(static_cast<std::size_t>(spec_.num_pages));
    detail::count_down(pool.free);
    pool.use_count.assign(static_cast<std::size_t>(spec_.num_pages), 0);
  }
  demands_.resize(kvp);
  changes_.copies.reserve(sequences_.size());
  changes_.table.reserve(sequences_.size());
}

inline void PageLedger::expect_books() const {
  HELIX_EXPECTS(
      !pools_.empty(), ErrorCode::invalid_argument,
      "the books of this KV cache were moved from; use the cache or ledger that they were moved to");
}

inline std::size_t PageLedger::index_of(SequenceId id) const {
  expect_books();
  HELIX_EXPECTS(id.cache == cache_ && id.slot >= 0 && id.slot < spec_.max_sequences,
                ErrorCode::invalid_argument, "sequence (slot ", id.slot, ", generation ", id.generation,
                ") is not of this KV cache, which has slots 0 to ", spec_.max_sequences - 1,
                "; use ids that its add() or fork() returned");
  const auto index = static_cast<std::size_t>(id.slot);
  const Sequence& sequence = sequences_[index];
  HELIX_EXPECTS(sequence.is_live && sequence.generation == id.generation, ErrorCode::invalid_argument,
                "sequence (slot ", id.slot, ", generation ", id.generation, ") was released",
                sequence.is_live ? "; another one uses its slot now" : "");
  return index;
}

inline std::int64_t PageLedger::pages_needed(const KvLayout& layout, std::int64_t page_tokens,
                                             std::int64_t num_tokens, std::int64_t kvp_rank) {
  HELIX_EXPECTS(page_tokens >= 1 && page_tokens <= kMaxPageTokens && num_tokens >= 0 &&
                    num_tokens <= kMaxTokens && kvp_rank >= 0 && kvp_rank < layout.kvp(),
                ErrorCode::invalid_argument, "pages_needed: page_tokens is ", page_tokens, ", in [1, ",
                kMaxPageTokens, "]; num_tokens is ", num_tokens, ", in [0, ", kMaxTokens, "]; kvp_rank is ",
                kvp_rank, ", in [0, ", layout.kvp(), ")");
  return layout.pages(num_tokens, kvp_rank, page_tokens);
}

inline std::int64_t PageLedger::pages_needed(const KvLayout& layout, std::int64_t page_tokens,
                                             std::span<const std::int64_t> lengths) {
  std::int64_t pages = 0;  // of rank 0, which never holds fewer tokens than another
  for (const std::int64_t length : lengths)
    pages = saturating_sum(pages, pages_needed(layout, page_tokens, length, 0));
  return pages;
}

inline std::int64_t PageLedger::pages_of(std::int64_t num_tokens, std::size_t rank) const {
  return spec_.layout.pages(num_tokens, static_cast<std::int64_t>(rank), spec_.page_tokens);
}

/// Whether the next token of `rank` would go into a page that another sequence holds too.
inline bool PageLedger::must_copy_last_page(const Sequence& sequence, std::size_t rank) const {
  const std::int64_t local_length = spec_.layout.length(sequence.length, static_cast<std::int64_t>(rank));
  return local_length % spec_.page_tokens != 0 &&
         pools_[rank].use_count[static_cast<std::size_t>(sequence.pages[rank].back())] > 1;
}

/// Pages that growing to `new_length` takes on `rank`.
inline std::int64_t PageLedger::demand(const Sequence& sequence, std::size_t rank,
                                       std::int64_t new_length) const {
  const auto r = static_cast<std::int64_t>(rank);
  if (spec_.layout.length(new_length, r) <= spec_.layout.length(sequence.length, r)) return 0;
  return pages_of(new_length, rank) - static_cast<std::int64_t>(sequence.pages[rank].size()) +
         (must_copy_last_page(sequence, rank) ? 1 : 0);
}

inline void PageLedger::check_tokens(std::string_view operation, std::int64_t num_tokens) const {
  HELIX_EXPECTS(num_tokens >= 0, ErrorCode::invalid_argument, operation, ": a sequence cannot have ",
                num_tokens, " tokens");
  HELIX_EXPECTS(num_tokens <= spec_.max_tokens, ErrorCode::capacity, operation, ": a sequence of ",
                num_tokens, " tokens exceeds max_tokens ", spec_.max_tokens,
                " of the KV cache; build it with a larger max_tokens");
}

inline void PageLedger::check_free(std::string_view operation,
                                   std::span<const std::int64_t> demand_by_rank) const {
  for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
    const auto free = pages_free(static_cast<std::int64_t>(rank));
    HELIX_EXPECTS(demand_by_rank[rank] <= free, ErrorCode::capacity, operation, " needs ",
                  demand_by_rank[rank], " more pages on kvp_rank ", rank, " but ", free, " of ",
                  spec_.num_pages, " are free (", pages_used(static_cast<std::int64_t>(rank)),
                  " hold tokens, ", pools_[rank].reserved,
                  " are reserved); release or truncate sequences, or build the KV cache with more pages");
  }
}

inline std::size_t PageLedger::free_slot(std::string_view operation) const {
  expect_books();
  HELIX_EXPECTS(
      !free_slots_.empty(), ErrorCode::capacity, operation, ": all ", spec_.max_sequences,
      " sequences of the KV cache are in use; release one, or build it with a larger max_sequences");
  return static_cast<std::size_t>(free_slots_.back());
}

inline void PageLedger::set_reserved_pages(Sequence& sequence, std::size_t rank, std::int64_t count) {
  pools_[rank].reserved += count - sequence.reserved_pages[rank];
  sequence.reserved_pages[rank] = count;
}

/// Recomputes, after growth, the rest of the reservation. It never exceeds what was reserved, so it needs no
/// check.
inline void PageLedger::update_reservation(Sequence& sequence) {
  for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
    set_reserved_pages(sequence, rank, demand(sequence, rank, sequence.reserved_tokens));
  }
}

/// Length at which the first rank runs out of its pages; 0 while a rank has a page to copy first.
inline std::int64_t PageLedger::find_settled_length(const Sequence& sequence) const {
  std::int64_t settled = kMaxTokens;
  for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
    if (must_copy_last_page(sequence, rank)) return 0;
    const auto local_end = static_cast<std::int64_t>(sequence.pages[rank].size()) * spec_.page_tokens;
    settled = smaller(settled, spec_.layout.global(static_cast<std::int64_t>(rank), local_end));
  }
  return settled;
}

inline std::int32_t PageLedger::take_page(std::size_t rank) {
  Pool& pool = pools_[rank];
  const std::int32_t page = pool.free.back();
  pool.free.pop_back();
  pool.use_count[static_cast<std::size_t>(page)] = 1;
  return page;
}

inline void PageLedger::drop_page(std::size_t rank, std::int32_t page) {
  Pool& pool = pools_[rank];
  if (--pool.use_count[static_cast<std::size_t>(page)] == 0)
    pool.free.push_back(page);  // does not allocate: within the reserved capacity
}

inline SequenceId PageLedger::open(std::size_t slot) {
  Sequence& sequence = sequences_[slot];
  sequence.pages.resize(pools_.size());
  sequence.reserved_pages.resize(pools_.size());
  free_slots_.pop_back();
  sequence.is_live = true;
  return {cache_, static_cast<std::int32_t>(slot), sequence.generation};
}

inline SequenceId PageLedger::add(std::int64_t reserved_tokens) {
  check_tokens("add", reserved_tokens);
  const std::size_t slot = free_slot("add");
  for (std::size_t rank = 0; rank < pools_.size(); ++rank) demands_[rank] = pages_of(reserved_tokens, rank);
  check_free("add", demands_);
  const SequenceId id = open(slot);
  sequences_[slot].reserved_tokens = reserved_tokens;
  update_reservation(sequences_[slot]);
  return id;
}

inline void PageLedger::reserve(SequenceId id, std::int64_t total_tokens) {
  Sequence& sequence = sequences_[index_of(id)];
  check_tokens("reserve", total_tokens);
  if (total_tokens <= larger(sequence.length, sequence.reserved_tokens)) return;
  for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
    demands_[rank] = demand(sequence, rank, total_tokens) - sequence.reserved_pages[rank];
  }
  check_free("reserve", demands_);
  sequence.reserved_tokens = total_tokens;
  update_reservation(sequence);
}

inline void PageLedger::unreserve(SequenceId id) {
  Sequence& sequence = sequences_[index_of(id)];
  sequence.reserved_tokens = 0;
  update_reservation(sequence);
}

inline void PageLedger::count_demands(std::span<const SequenceId> ids, std::span<const std::int64_t> counts) {
  HELIX_EXPECTS(ids.size() == counts.size(), ErrorCode::invalid_argument, "append: ", ids.size(),
                " sequences but ", counts.size(), " counts");
  ++mark_;
  demands_.assign(demands_.size(), 0);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Sequence& sequence = sequences_[index_of(ids[i])];
    HELIX_EXPECTS(sequence.mark != mark_, ErrorCode::invalid_argument, "append: the sequence in slot ",
                  ids[i].slot, " appears twice");
    sequence.mark = mark_;
    HELIX_EXPECTS(counts[i] >= 0 && counts[i] <= kMaxTokens, ErrorCode::invalid_argument,
                  "append: the count is ", counts[i], " for the sequence in slot ", ids[i].slot);
    const std::int64_t new_length = sequence.length + counts[i];
    check_tokens("append", new_length);
    if (new_length <= sequence.settled_length) continue;
    for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
      demands_[rank] +=
          larger<std::int64_t>(0, demand(sequence, rank, new_length) - sequence.reserved_pages[rank]);
    }
  }
}

inline void PageLedger::make_room(std::span<const SequenceId> ids, std::span<const std::int64_t> counts) {
  changes_.copies.clear();
  changes_.table.clear();
  changes_.copies.reserve(ids.size());
  changes_.table.reserve(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Sequence& sequence = sequences_[index_of(ids[i])];
    if (sequence.length + counts[i] <= sequence.settled_length) continue;
    for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
      detail::ensure_capacity(sequence.pages[rank],
                              static_cast<std::size_t>(pages_of(sequence.length + counts[i], rank)));
    }
  }
}

inline void PageLedger::grow(Sequence& sequence, std::int32_t slot, std::int64_t new_length) {
  for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
    std::vector<std::int32_t>& pages = sequence.pages[rank];
    const bool is_this_rank = static_cast<std::int64_t>(rank) == kvp_rank_;
    if (demand(sequence, rank, new_length) == 0) continue;
    TableWrite write{slot, static_cast<std::int64_t>(pages.size()), pages_of(new_length, rank)};
    if (must_copy_last_page(sequence, rank)) {
      const PageCopy copy{pages.back(), take_page(rank)};
      drop_page(rank, copy.source);
      pages.back() = copy.target;
      --write.begin;
      if (is_this_rank) changes_.copies.push_back(copy);
    }
    while (static_cast<std::int64_t>(pages.size()) < write.end) pages.push_back(take_page(rank));
    if (is_this_rank) changes_.table.push_back(write);
  }
  sequence.length = new_length;
  update_reservation(sequence);
  sequence.settled_length = find_settled_length(sequence);
}

inline const PageLedger::Changes& PageLedger::append(std::span<const SequenceId> ids,
                                                     std::span<const std::int64_t> counts) {
  count_demands(ids, counts);
  check_free("append", demands_);
  make_room(ids, counts);

  // Nothing below throws.
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Sequence& sequence = sequences_[index_of(ids[i])];
    const std::int64_t new_length = sequence.length + counts[i];
    if (new_length <= sequence.settled_length) {
      sequence.length = new_length;
    } else {
      grow(sequence, ids[i].slot, new_length);
    }
  }
  return changes_;
}

inline void PageLedger::truncate(SequenceId id, std::int64_t new_length) {
  Sequence& sequence = sequences_[index_of(id)];
  HELIX_EXPECTS(new_length >= 0 && new_length <= sequence.length, ErrorCode::invalid_argument,
                "truncate: the new length ", new_length, " is not in [0, ", sequence.length,
                "], the sequence's length");
  for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
    std::vector<std::int32_t>& pages = sequence.pages[rank];
    const auto kept = static_cast<std::size_t>(pages_of(new_length, rank));
    while (pages.size() > kept) {
      drop_page(rank, pages.back());
      pages.pop_back();
    }
  }
  sequence.length = new_length;
  sequence.settled_length = 0;

  // The dropped pages refill the reservation, unless another sequence still holds them.
  bool is_covered = true;
  for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
    const std::int64_t more =
        demand(sequence, rank, sequence.reserved_tokens) - sequence.reserved_pages[rank];
    is_covered = is_covered && more <= pages_free(static_cast<std::int64_t>(rank));
  }
  if (!is_covered) sequence.reserved_tokens = 0;
  update_reservation(sequence);
}

inline SequenceId PageLedger::fork(SequenceId parent_id, std::int64_t prefix_tokens) {
  const Sequence& parent = sequences_[index_of(parent_id)];
  HELIX_EXPECTS(prefix_tokens >= 0 && prefix_tokens <= parent.length, ErrorCode::invalid_argument,
                "fork: the prefix of ", prefix_tokens, " tokens is not in [0, ", parent.length,
                "], the parent's length");
  const std::size_t slot = free_slot("fork");
  const std::int64_t shared_tokens = prefix_tokens / shared_unit_ * shared_unit_;
  for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
    demands_[rank] = pages_of(prefix_tokens, rank) - pages_of(shared_tokens, rank);
  }
  check_free("fork", demands_);
  changes_.copies.clear();
  changes_.table.clear();
  changes_.copies.reserve(static_cast<std::size_t>(demands_[static_cast<std::size_t>(kvp_rank_)]));
  Sequence& child = sequences_[slot];
  child.pages.resize(pools_.size());
  for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
    detail::ensure_capacity(child.pages[rank], static_cast<std::size_t>(pages_of(prefix_tokens, rank)));
  }

  const SequenceId id = open(slot);
  child.length = prefix_tokens;
  for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
    const auto num_pages = static_cast<std::size_t>(pages_of(prefix_tokens, rank));
    const auto num_shared = static_cast<std::size_t>(pages_of(shared_tokens, rank));
    const bool is_this_rank = static_cast<std::int64_t>(rank) == kvp_rank_;
    for (std::size_t i = 0; i < num_pages; ++i) {
      const std::int32_t source = parent.pages[rank][i];
      if (i < num_shared) {
        ++pools_[rank].use_count[static_cast<std::size_t>(source)];
        child.pages[rank].push_back(source);
      } else {
        child.pages[rank].push_back(take_page(rank));
        if (is_this_rank) changes_.copies.push_back({source, child.pages[rank].back()});
      }
    }
    if (is_this_rank && num_pages > 0) {
      changes_.table.push_back({id.slot, 0, static_cast<std::int64_t>(num_pages)});
    }
  }
  return id;
}

inline void PageLedger::release(SequenceId id) {
  Sequence& sequence = sequences_[index_of(id)];
  for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
    for (const std::int32_t page : sequence.pages[rank]) drop_page(rank, page);
    sequence.pages[rank].clear();
    set_reserved_pages(sequence, rank, 0);
  }
  sequence.length = 0;
  sequence.settled_length = 0;
  sequence.reserved_tokens = 0;
  sequence.is_live = false;
  ++sequence.generation;
  free_slots_.push_back(id.slot);
}

inline std::span<const std::int32_t> PageLedger::pages(SequenceId id, std::int64_t kvp_rank) const {
  pool_of("pages", kvp_rank);
  return sequences_[index_of(id)].pages[static_cast<std::size_t>(kvp_rank)];
}

inline std::span<const std::int32_t> PageLedger::pages(std::int32_t slot) const {
  expect_books();
  HELIX_EXPECTS(slot >= 0 && slot < spec_.max_sequences && sequences_[static_cast<std::size_t>(slot)].is_live,
                ErrorCode::invalid_argument, "pages: slot is ", slot,
                "; it must be that of a live sequence, in [0, ", spec_.max_sequences, ")");
  return sequences_[static_cast<std::size_t>(slot)].pages[static_cast<std::size_t>(kvp_rank_)];
}

inline bool PageLedger::is_shared(SequenceId id, TokenRange tokens) const {
  const Sequence& sequence = sequences_[index_of(id)];
  HELIX_EXPECTS(tokens.begin >= 0 && tokens.begin <= tokens.end && tokens.end <= sequence.length,
                ErrorCode::invalid_argument, "is_shared: tokens [", tokens.begin, ", ", tokens.end,
                ") leave the sequence of ", sequence.length, " tokens");
  for (std::size_t rank = 0; rank < pools_.size(); ++rank) {
    const TokenRange local = spec_.layout.local_range(tokens, static_cast<std::int64_t>(rank));
    if (local.size() <= 0) continue;
    for (std::int64_t i = local.begin / spec_.page_tokens; i <= (local.end - 1) / spec_.page_tokens; ++i) {
      const std::int32_t page = sequence.pages[rank][static_cast<std::size_t>(i)];
      if (pools_[rank].use_count[static_cast<std::size_t>(page)] > 1) return true;
    }
  }
  return false;
}

inline std::int64_t PageLedger::num_sequences() const {
  expect_books();
  return spec_.max_sequences - static_cast<std::int64_t>(free_slots_.size());
}

inline const PageLedger::Pool& PageLedger::pool_of(std::string_view operation, std::int64_t kvp_rank) const {
  expect_books();
  HELIX_EXPECTS(kvp_rank >= 0 && kvp_rank < spec_.layout.kvp(), ErrorCode::invalid_argument, operation,
                ": kvp_rank is ", kvp_rank, "; it must be in [0, ", spec_.layout.kvp(), ")");
  return pools_[static_cast<std::size_t>(kvp_rank)];
}

inline std::int64_t PageLedger::pages_free(std::int64_t kvp_rank) const {
  const Pool& pool = pool_of("pages_free", kvp_rank);
  return static_cast<std::int64_t>(pool.free.size()) - pool.reserved;
}

inline std::int64_t PageLedger::pages_used(std::int64_t kvp_rank) const {
  return spec_.num_pages - static_cast<std::int64_t>(pool_of("pages_used", kvp_rank).free.size());
}

}  // namespace helix
