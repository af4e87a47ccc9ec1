// SPDX-License-Identifier: Apache-2.0
// PageLedger: which pages of every KVP rank belong to which sequence, tracked in the same way on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <helix/error.hpp>
#include <helix/kv_layout.hpp>

namespace helix {

/// Names a sequence of one cache. Equal on all ranks that made the same calls. The id of a released sequence
/// stays invalid, even when its slot is used again.
struct SequenceId {
  std::uint32_t cache = 0;       ///< Tells caches of different sizes or tags apart
  std::int32_t slot = -1;        ///< Row of the page table
  std::uint32_t generation = 0;  ///< Counts the users of the slot

  friend bool operator==(const SequenceId&, const SequenceId&) = default;
};

/// Sizes of a ledger; equal on all KVP ranks.
struct PageLedgerSpec {
  KvLayout layout{1, 1};
  std::int64_t page_tokens = 64;  ///< Local tokens a page
  std::int64_t num_pages = 0;     ///< Pages of each KVP rank.
  std::int64_t max_sequences = 64;
  std::int64_t max_tokens = 0;  ///< Global tokens a sequence may reach; 0: as many as fit into the pages
  std::uint32_t tag = 0;        ///< Mixed into SequenceId::cache
};

/// Host bookkeeping of the page pools of all KVP ranks. Every rank holds all of it and makes the same calls,
/// so that all ranks take the same decision and throw the same error (invariant 9): shards are uneven, and
/// one rank may run out before another. A call that throws changes nothing. Not thread-safe.
///
/// Invariant: a sequence of S tokens has ceil(length(S, r) / page_tokens) pages on rank r. A reservation is a
/// number of free pages that only its sequence may take. Pages of a forked prefix are shared and counted. A
/// token never goes into a shared page; the page is copied first.
///
/// After a move each call on the old object that names a sequence, asks for one or counts is
/// Error(invalid_argument).
class PageLedger {
 public:
  /// A copy to make on this rank: page `target` becomes a copy of `source`, in all layers.
  struct PageCopy {
    std::int32_t source = 0;
    std::int32_t target = 0;
  };

  /// A change of this rank's page table: entries [begin, end) of row `slot` become pages(slot)[begin, end).
  struct TableWrite {
    std::int32_t slot = 0;
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };

  /// Work that a call requires of this rank's device: first the copies, then the table. Valid until the next
  /// call.
  struct Changes {
    std::vector<PageCopy> copies;
    std::vector<TableWrite> table;
  };

  /// Makes an empty ledger. `kvp_rank` is the rank to which Changes refer.
  /// @throws Error(invalid_argument) if a size is out of range; Error(capacity) if the memory cannot be had.
  PageLedger(const PageLedgerSpec& spec, std::int64_t kvp_rank);

  const PageLedgerSpec& spec() const { return spec_; }  ///< The spec, with max_tokens filled in
  std::int64_t kvp_rank() const { return kvp_rank_; }
  /// Most pages of a sequence on any rank: the row length of the page table.
  std::int64_t max_pages() const { return max_pages_; }

  /// Makes an empty sequence with pages reserved for its first `reserved_tokens` tokens.
  /// @throws Error(capacity) without a free slot or enough pages on every rank, or if reserved_tokens exceeds
  /// max_tokens; Error(invalid_argument) if it is below 0.
  [[nodiscard]] SequenceId add(std::int64_t reserved_tokens = 0);

  /// Reserves the pages that growing to `total_tokens` takes. Never reduces a reservation.
  /// @throws Error(capacity) if a rank has too few free pages, or total_tokens exceeds max_tokens;
  /// Error(invalid_argument) if it is below 0.
  void reserve(SequenceId id, std::int64_t total_tokens);

  /// Gives back the reserved pages beyond those that the sequence's tokens take.
  void unreserve(SequenceId id);

  /// Grows each sequence by its count: all of them or, if a rank has too few pages, none.
  /// @throws Error(capacity) if a rank has too few free pages, or a length exceeds max_tokens;
  /// Error(invalid_argument) if an id appears twice, or unless there is a count for each, in [0, kMaxTokens].
  const Changes& append(std::span<const SequenceId> ids, std::span<const std::int64_t> counts);

  /// Drops the tokens from `new_length` on. Pages without tokens go back to the pool, or into the sequence's
  /// reservation if it has one. If the sequence is cut into a prefix shared with another, and free pages
  /// cannot refill its reservation, the reservation ends. @throws Error(invalid_argument) unless new_length
  /// is in [0, length(id)].
  void truncate(SequenceId id, std::int64_t new_length);

  /// Makes a sequence from the first `prefix_tokens` of `parent`. It shares the pages of the largest multiple
  /// of shared_unit() tokens and takes copies of the rest.
  /// @throws Error(capacity) without a free slot or enough pages on every rank; Error(invalid_argument)
  /// unless prefix_tokens is in [0, length(parent)].
  [[nodiscard]] SequenceId fork(SequenceId parent, std::int64_t prefix_tokens);
  /// Work that the last fork() requires of this rank's device.
  const Changes& changes() const { return changes_; }

  /// Gives back the sequence's slot, its reservation and the pages that no other sequence shares.
  void release(SequenceId id);

  /// Row of the page table that the sequence occupies.
  /// @throws Error(invalid_argument) unless `id` names a live sequence of this cache, as all functions that
  /// take an id do.
  std::int32_t slot(SequenceId id) const { return static_cast<std::int32_t>(index_of(id)); }
  /// Tokens of the sequence, over all ranks.
  std::int64_t length(SequenceId id) const { return sequences_[index_of(id)].length; }
  /// Tokens up to which the sequence's pages are reserved.
  std::int64_t reserved_tokens(SequenceId id) const { return sequences_[index_of(id)].reserved_tokens; }
  /// Pages of the sequence on `kvp_rank`, in the order of local positions.
  /// @throws Error(invalid_argument) if there is no such sequence or rank.
  std::span<const std::int32_t> pages(SequenceId id, std::int64_t kvp_rank) const;
  /// Pages on this rank of the live sequence in `slot`. @throws Error(invalid_argument) if no live sequence
  /// is there.
  std::span<const std::int32_t> pages(std::int32_t slot) const;
  /// Whether any of `tokens` lies, on any rank, in a page that another sequence holds too.
  /// @throws Error(invalid_argument) unless the sequence has all of the tokens.
  bool is_shared(SequenceId id, TokenRange tokens) const;

  std::int64_t num_sequences() const;
  /// Pages of `kvp_rank` that any sequence may take: neither used nor reserved.
  /// @throws Error(invalid_argument) if there is no such rank.
  std::int64_t pages_free(std::int64_t kvp_rank) const;
  /// Pages of `kvp_rank` that hold tokens; a shared page counts once.
  /// @throws Error(invalid_argument) if there is no such rank.
  std::int64_t pages_used(std::int64_t kvp_rank) const;

  /// Smallest number of global tokens that fills whole pages on every rank: lcm(page_tokens, chunk) * KVP.
  std::int64_t shared_unit() const { return shared_unit_; }

  /// Pages that `num_tokens` global tokens take on `kvp_rank`.
  /// @throws Error(invalid_argument) if a size is out of range.
  static std::int64_t pages_needed(const KvLayout& layout, std::int64_t page_tokens, std::int64_t num_tokens,
                                   std::int64_t kvp_rank);
  /// Pages that a rank needs to hold sequences of these lengths at once, without sharing: the largest demand
  /// of any rank. A value for PageLedgerSpec::num_pages.
  /// @throws Error(invalid_argument) if a size is out of range.
  static std::int64_t pages_needed(const KvLayout& layout, std::int64_t page_tokens,
                                   std::span<const std::int64_t> lengths);

 private:
  struct Sequence {
    bool is_live = false;
    std::uint32_t generation = 0;
    std::uint64_t mark = 0;  // the last append() that saw it, to detect ids that appear twice
    std::int64_t length = 0;
    // Up to this length the sequence grows without a change on any rank. Most decode steps do so, and cost
    // one comparison a sequence, whatever KVP is.
    std::int64_t settled_length = 0;
    std::int64_t reserved_tokens = 0;
    std::vector<std::vector<std::int32_t>> pages;  // [kvp][index]
    std::vector<std::int64_t> reserved_pages;      // [kvp]
  };

  struct Pool {                           // of one KVP rank
    std::vector<std::int32_t> free;       // a stack; the sum of all reservations is never more than its size
    std::vector<std::int32_t> use_count;  // [pages]: sequences that hold the page
    std::int64_t reserved = 0;            // sum over sequences of reserved_pages
  };

  void make_books();
  void expect_books() const;  // throws if this object was moved from
  std::size_t index_of(SequenceId id) const;
  const Pool& pool_of(std::string_view operation, std::int64_t kvp_rank) const;
  std::int64_t pages_of(std::int64_t num_tokens, std::size_t rank) const;
  bool must_copy_last_page(const Sequence& sequence, std::size_t rank) const;
  std::int64_t demand(const Sequence& sequence, std::size_t rank, std::int64_t new_length) const;
  void check_tokens(std::string_view operation, std::int64_t num_tokens) const;
  void check_free(std::string_view operation, std::span<const std::int64_t> demand_by_rank) const;
  std::size_t free_slot(std::string_view operation) const;
  /// Checks the arguments of append(), and sets demands_ to the free pages that it takes.
  void count_demands(std::span<const SequenceId> ids, std::span<const std::int64_t> counts);
  /// Reserves the host memory that append() fills, so that it cannot throw halfway.
  void make_room(std::span<const SequenceId> ids, std::span<const std::int64_t> counts);
  /// Grows one sequence beyond its settled length. Does not throw: pages and memory are there.
  void grow(Sequence& sequence, std::int32_t slot, std::int64_t new_length);
  void set_reserved_pages(Sequence& sequence, std::size_t rank, std::int64_t count);
  void update_reservation(Sequence& sequence);
  std::int64_t find_settled_length(const Sequence& sequence) const;
  std::int32_t take_page(std::size_t rank);
  void drop_page(std::size_t rank, std::int32_t page);
  SequenceId open(std::size_t slot);

  PageLedgerSpec spec_;
  std::int64_t kvp_rank_;
  std::int64_t max_pages_ = 0;
  std::int64_t shared_unit_ = 0;
  std::uint32_t cache_ = 0;
  std::uint64_t mark_ = 0;
  std::vector<Sequence> sequences_;  // [max_sequences]
  std::vector<std::int32_t> free_slots_;
  std::vector<Pool> pools_;            // [kvp]
  std::vector<std::int64_t> demands_;  // [kvp], scratch
  Changes changes_;
};

}  // namespace helix

#include <helix/page_ledger-inl.hpp>
