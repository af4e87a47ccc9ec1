// SPDX-License-Identifier: Apache-2.0
// PageLedger: all ranks decide alike, and no page has two owners.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/page_ledger.hpp>
#include <helix/sharded_kv_cache.hpp>

#include "support/cache_contents.hpp"
#include "support/cache_stage.hpp"
#include "support/catch.hpp"
#include "support/rounds.hpp"

using namespace helix::test::cache;

namespace {

/// The ledgers of all ranks under random operations that every ledger receives.
class RandomLedgers {
 public:
  explicit RandomLedgers(std::uint32_t seed) : random_(seed) {
    kvp_ = 1 + below(8);
    spec_.layout = KvLayout(kvp_, 1 + below(20));
    spec_.page_tokens = 1 + below(20);
    spec_.num_pages = 20 + below(40);
    spec_.max_sequences = 8;
    for (std::int64_t rank = 0; rank < kvp_; ++rank) ledgers_.emplace_back(spec_, rank);
  }

  const PageLedgerSpec& spec() const { return spec_; }

  void step() {
    const std::int64_t action = below(10);
    const std::int64_t pool_tokens = spec_.num_pages * spec_.page_tokens * kvp_;
    Live* const one = live_.empty()
                          ? nullptr
                          : &live_[static_cast<std::size_t>(below(static_cast<std::int64_t>(live_.size())))];
    if (one == nullptr || action == 0) {
      Live added;
      added.reserved = below(pool_tokens / 4);
      if (on_all([&](PageLedger& l) { added.id = l.add(added.reserved); })) live_.push_back(added);
    } else if (action < 4) {
      const std::int64_t count = below(pool_tokens / 6);
      const bool must_fit = one->length + count <= one->reserved;
      const bool fits = on_all([&](PageLedger& l) { l.append({&one->id, 1}, {&count, 1}); });
      if (must_fit) REQUIRE(fits);  // a reservation guarantees success
      if (fits) one->length += count;
    } else if (action < 6) {
      one->length = below(one->length + 1);
      REQUIRE(on_all([&](PageLedger& l) { l.truncate(one->id, one->length); }));
      const std::int64_t reserved = ledgers_.front().reserved_tokens(one->id);
      REQUIRE((reserved == one->reserved || reserved == 0));
      one->reserved = reserved;
    } else if (action < 8) {
      Live child;
      child.length = below(one->length + 1);
      if (on_all([&](PageLedger& l) { child.id = l.fork(one->id, child.length); })) live_.push_back(child);
    } else if (action == 8) {
      const std::int64_t total = below(pool_tokens);
      if (on_all([&](PageLedger& l) { l.reserve(one->id, total); }) && total > one->length) {
        one->reserved = std::max(one->reserved, total);
      }
    } else {
      REQUIRE(on_all([&](PageLedger& l) { l.release(one->id); }));
      live_.erase(live_.begin() + (one - live_.data()));
    }
  }

  /// Checks that ledgers agree, that a sequence's pages are exactly those for its tokens, and the counts.
  void check() const {
    std::vector<SequenceId> ids;
    for (const Live& sequence : live_) ids.push_back(sequence.id);
    const Snapshot first = snapshot_of(ledgers_.front(), ids);
    for (const PageLedger& ledger : ledgers_) REQUIRE(snapshot_of(ledger, ids) == first);
    for (std::int64_t rank = 0; rank < kvp_; ++rank) {
      std::set<std::int32_t> used;
      for (const Live& sequence : live_) {
        const auto pages = ledgers_.front().pages(sequence.id, rank);
        const std::int64_t local = owned_count(sequence.length, kvp_, spec_.layout.chunk(), rank);
        REQUIRE(static_cast<std::int64_t>(pages.size()) ==
                (local + spec_.page_tokens - 1) / spec_.page_tokens);
        const std::set<std::int32_t> distinct(pages.begin(), pages.end());
        REQUIRE(distinct.size() == pages.size());
        for (const std::int32_t page : pages) REQUIRE((page >= 0 && page < spec_.num_pages));
        used.insert(distinct.begin(), distinct.end());
      }
      REQUIRE(static_cast<std::int64_t>(used.size()) == ledgers_.front().pages_used(rank));
      REQUIRE(ledgers_.front().pages_free(rank) >= 0);
    }
  }

  /// Releases all sequences; no page may remain in use.
  void finish() {
    for (const Live& sequence : live_) on_all([&](PageLedger& l) { l.release(sequence.id); });
    for (const PageLedger& ledger : ledgers_) {
      for (std::int64_t rank = 0; rank < kvp_; ++rank) CHECK(ledger.pages_free(rank) == spec_.num_pages);
    }
  }

 private:
  struct Live {
    SequenceId id;
    std::int64_t length = 0;
    std::int64_t reserved = 0;
  };

  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n));
  }

  /// Whether all ranks had enough pages; the ranks must agree.
  bool on_all(const std::function<void(PageLedger&)>& act) {
    std::optional<Failure> first;
    for (std::int64_t rank = 0; rank < kvp_; ++rank) {
      const auto failure = failure_of([&] { act(ledgers_[static_cast<std::size_t>(rank)]); });
      if (rank == 0) first = failure;
      REQUIRE(failure == first);
    }
    if (first) REQUIRE(first->code == ErrorCode::capacity);
    return !first.has_value();
  }

  std::mt19937 random_;
  std::int64_t kvp_ = 1;
  PageLedgerSpec spec_;
  std::vector<PageLedger> ledgers_;
  std::vector<Live> live_;
};

}  // namespace

TEST_CASE("ledgers of all ranks agree under random operations, and no page has two owners") {
  for (std::uint32_t seed = 1; seed <= 24 * helix::test::num_rounds(); ++seed) {
    RandomLedgers ledgers(seed);
    const PageLedgerSpec& spec = ledgers.spec();
    CAPTURE(seed, spec.layout.kvp(), spec.layout.chunk(), spec.page_tokens, spec.num_pages);
    for (int step = 0; step < 400; ++step) {
      CAPTURE(step);
      ledgers.step();
      ledgers.check();
    }
    ledgers.finish();
  }
}

TEST_CASE("exhaustion on one rank throws on all of them, with the numbers, and changes nothing") {
  // Chunk 4, KVP 2, pages of 4: 12 tokens take two pages on rank 0 and one on rank 1.
  KvCacheSpec spec;
  spec.dtype = DType::f32;
  spec.num_layers = 1;
  spec.page_tokens = 4;
  spec.chunk = 4;
  spec.num_pages = 3;
  spec.max_sequences = 3;
  spec.max_tokens = 100;
  Stage stage({.kvp = 2, .kv_heads = 1}, spec);
  const SequenceId a = stage.add();
  const SequenceId b = stage.add();
  const std::vector<SequenceId> both{a, b};
  REQUIRE_FALSE(stage.on_all([&](Cache& cache, Stream& stream) { cache.append(a, 12, stream); }));
  const Snapshot before = snapshot_of(stage.cache(0).ledger(), both);
  CHECK(stage.cache(0).pages_free() == 1);
  CHECK(stage.cache(1).pages_free() == 2);

  // Rank 1 could serve this alone; rank 0 cannot.
  const auto failure = stage.on_all([&](Cache& cache, Stream& stream) { cache.append(b, 12, stream); });
  REQUIRE(failure);
  CHECK(failure->code == ErrorCode::capacity);
  CHECK(failure->what ==
        "append needs 2 more pages on kvp_rank 0 but 1 of 3 are free (2 hold tokens, 0 are reserved); "
        "release or truncate sequences, or build the KV cache with more pages");
  // A batch is all or nothing, even if its first sequence alone would fit.
  const std::vector<std::int64_t> counts{4, 9};
  CHECK(stage.on_all([&](Cache& cache, Stream& stream) { cache.append(both, counts, stream); }));
  CHECK(stage.on_all([&](Cache& cache, Stream&) { cache.reserve(b, 9); }));
  CHECK(stage.on_all([&](Cache& cache, Stream&) { (void)cache.add(9); }));
  CHECK(stage.on_all([&](Cache& cache, Stream& stream) { cache.append(b, 101, stream); })->what ==
        "append: a sequence of 101 tokens exceeds max_tokens 100 of the KV cache; build it with a larger "
        "max_tokens");
  CHECK(stage.on_all([&](Cache& cache, Stream&) { cache.reserve(b, 101); })->code == ErrorCode::capacity);
  CHECK(stage.on_all([&](Cache& cache, Stream&) { (void)cache.add(101); })->code == ErrorCode::capacity);
  for (int rank = 0; rank < 2; ++rank) CHECK(snapshot_of(stage.cache(rank).ledger(), both) == before);

  const SequenceId c = stage.add();
  const auto slots = stage.on_all([&](Cache& cache, Stream&) { (void)cache.add(); });
  REQUIRE(slots);
  CHECK(contains(slots->what, "all 3 sequences of the KV cache are in use"));
  CHECK(stage.on_all([&](Cache& cache, Stream& stream) { (void)cache.fork(a, 0, stream); })->code ==
        ErrorCode::capacity);
  REQUIRE_FALSE(stage.on_all([&](Cache& cache, Stream&) { cache.release(c); }));
  // The fork shares 8 of 12 tokens (one page on each rank) and copies one page on rank 0, so it fits once but
  // not twice.
  SequenceId child;
  REQUIRE_FALSE(stage.on_all([&](Cache& cache, Stream& stream) { child = cache.fork(a, 12, stream); }));
  CHECK(stage.cache(0).pages_free() == 0);
  CHECK(stage.cache(1).pages_free() == 2);
  REQUIRE_FALSE(stage.on_all([&](Cache& cache, Stream&) { cache.release(b); }));
  CHECK(contains(stage.on_all([&](Cache& cache, Stream& stream) { (void)cache.fork(a, 12, stream); })->what,
                 "fork needs 1 more pages on kvp_rank 0"));
}

TEST_CASE("a reservation keeps its pages from others and shrinks as the sequence grows into it") {
  PageLedgerSpec spec;
  spec.layout = KvLayout(2, 2);
  spec.page_tokens = 2;
  spec.num_pages = 5;
  PageLedger ledger(spec, 0);
  const SequenceId a = ledger.add(12);  // 6 local tokens per rank: 3 pages
  const SequenceId b = ledger.add();
  CHECK(ledger.pages_free(0) == 2);
  CHECK(ledger.pages_used(0) == 0);
  const auto append = [&](SequenceId id, std::int64_t count) { ledger.append({&id, 1}, {&count, 1}); };
  append(b, 8);
  CHECK(ledger.pages_free(0) == 0);
  CHECK_THROWS_AS(append(b, 1), Error);
  for (int i = 0; i < 12; ++i) append(a, 1);
  CHECK_THROWS_AS(append(a, 1), Error);
  CHECK(ledger.pages_used(1) == 5);
  // Truncation returns pages to the reservation, not to the pool.
  ledger.truncate(a, 3);
  CHECK(ledger.reserved_tokens(a) == 12);
  CHECK(ledger.pages_free(0) == 0);
  CHECK(ledger.pages_used(0) == 3);
  append(a, 9);
  ledger.reserve(a, 5);  // less than it already has: no effect
  CHECK(ledger.pages_used(0) == 5);
  ledger.release(a);
  CHECK(ledger.pages_free(0) == 3);
}

TEST_CASE("pages that one sequence of a step has reserved are not taken by another that grows beside it") {
  PageLedger ledger({.layout = KvLayout(1, 1), .page_tokens = 1, .num_pages = 10, .max_sequences = 2}, 0);
  const SequenceId a = ledger.add(6);
  const SequenceId b = ledger.add();
  const std::vector<SequenceId> both{a, b};
  CHECK_THROWS_AS(ledger.append(both, std::vector<std::int64_t>{1, 5}), Error);
  CHECK(ledger.length(a) == 0);
  ledger.append(both, std::vector<std::int64_t>{1, 4});
  CHECK(ledger.pages_free(0) == 0);
  ledger.append(std::vector{a}, std::vector<std::int64_t>{5});
}

TEST_CASE("a reservation grows by what it lacks, and ends at once when it is given up") {
  PageLedger ledger({.layout = KvLayout(1, 1), .page_tokens = 1, .num_pages = 10, .max_sequences = 2}, 0);
  const SequenceId id = ledger.add(6);
  ledger.reserve(id, 10);  // its own 6 pages and the 4 free ones
  CHECK(ledger.pages_free(0) == 0);
  ledger.append(std::vector{id}, std::vector<std::int64_t>{3});
  ledger.unreserve(id);
  CHECK(ledger.reserved_tokens(id) == 0);
  CHECK(ledger.pages_free(0) == 7);
}

TEST_CASE(
    "a sequence that was cut into a shared page copies it on the ranks that store its next token only") {
  // Chunk 2, KVP 2, pages of 4: 8 tokens take one page a rank. Of the first 3 rank 0 has two, rank 1 one.
  const auto cut_fork = [](PageLedger& ledger) {
    const SequenceId parent = ledger.add();
    ledger.append(std::vector{parent}, std::vector<std::int64_t>{8});
    const SequenceId child = ledger.fork(parent, 8);
    ledger.truncate(child, 3);
    return child;
  };
  PageLedgerSpec spec{.layout = KvLayout(2, 2), .page_tokens = 4, .num_pages = 2, .max_sequences = 2};
  PageLedger ledger(spec, 0);
  const SequenceId child = cut_fork(ledger);
  CHECK(ledger.append(std::vector{child}, std::vector<std::int64_t>{1}).copies.empty());
  CHECK(ledger.pages_used(0) == 1);
  CHECK(ledger.pages_used(1) == 2);

  // Rank 1 lacks a page where rank 0 needs none.
  spec.num_pages = 1;
  PageLedger tight(spec, 0);
  const SequenceId stuck = cut_fork(tight);
  CHECK_THROWS_WITH(
      tight.append(std::vector{stuck}, std::vector<std::int64_t>{1}),
      Catch::Matchers::StartsWith("append needs 1 more pages on kvp_rank 1 but 0 of 1 are free"));
  CHECK(tight.length(stuck) == 3);
}

TEST_CASE("an id is refused by a ledger whose sizes differ, by however much") {
  const PageLedgerSpec spec{.layout = KvLayout(2, 3), .page_tokens = 4, .num_pages = 5, .max_tokens = 30};
  const SequenceId id = PageLedger(spec, 0).add();
  for (const std::int64_t more : {1, 256, 65536}) {
    CAPTURE(more);
    for (const auto& change :
         {+[](PageLedgerSpec&s, std::int64_t n) { s.layout = KvLayout(2, 3 + n); },
          +[](PageLedgerSpec&s, std::int64_t n) { s.page_tokens += n; },
          +[](PageLedgerSpec&s, std::int64_t n) { s.num_pages += n; },
          +[](PageLedgerSpec&s, std::int64_t n) { s.max_sequences += n; },
          +[](PageLedgerSpec&s, std::int64_t n) { s.max_tokens += n; },
          +[](PageLedgerSpec&s, std::int64_t n) { s.tag = static_cast<std::uint32_t>(n); }}) {
      PageLedgerSpec other = spec;
      change(other, more);
      PageLedger ledger(other, 0);
      (void)ledger.add();
      CHECK_THROWS_AS(ledger.release(id), Error);
    }
  }
}

TEST_CASE("the default max_tokens is what fits into the pages") {
  for (const auto& [kvp, chunk, page, pages] : {std::tuple{1, 1, 1, 1}, std::tuple{4, 16, 64, 3},
                                                std::tuple{3, 7, 4, 5}, std::tuple{2, 100, 16, 3}}) {
    CAPTURE(kvp, chunk, page, pages);
    PageLedger ledger({.layout = KvLayout(kvp, chunk), .page_tokens = page, .num_pages = pages}, 0);
    const std::int64_t most = ledger.spec().max_tokens;
    CHECK(ledger.max_pages() == pages);
    const SequenceId id = ledger.add(most);
    CHECK(ledger.pages_free(0) == 0);
    CHECK_THROWS_AS(ledger.reserve(id, most + 1), Error);
    std::int64_t local = 0;
    for (std::int64_t r = 0; r < kvp; ++r) local = std::max(local, owned_count(most + 1, kvp, chunk, r));
    CHECK(local > static_cast<std::int64_t>(page) * pages);
  }
}
