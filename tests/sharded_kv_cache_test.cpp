// SPDX-License-Identifier: Apache-2.0
// ShardedKVCache: random operations on every rank of a stage, compared with a plain list of each sequence's
// tokens.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
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

struct Config {
  StageSpec stage;
  DType format;
  std::int64_t chunk;
  std::int64_t page_tokens;
  Scales scales;
};

KvCacheSpec spec_of(const Config& config) {
  KvCacheSpec spec;
  spec.dtype = config.format;
  spec.num_layers = 2;
  spec.page_tokens = config.page_tokens;
  spec.chunk = config.chunk;
  spec.max_sequences = 5;
  spec.max_tokens = 400;
  spec.num_pages =
      PageLedger::pages_needed(KvLayout(config.stage.kvp, spec.chunk), spec.page_tokens, 400, 0) + 3;
  spec.k_scales = config.scales.k;
  spec.v_scales = config.scales.v;
  return spec;
}

/// A stage under random operations, and the expected contents of its sequences.
class RandomOperations {
 public:
  RandomOperations(const Config& config, std::uint32_t seed)
      : random_(seed), pages_(spec_of(config).num_pages), stage_(config.stage, spec_of(config)) {}

  void step(int number) {
    const std::int64_t action = below(100);
    if (live_.empty() || action < 12) {
      add(number % 3 == 0 ? 20 : 0);
    } else if (action < 45) {
      append_some();
    } else if (action < 60) {
      truncate(any(live_));
    } else if (action < 78) {
      fork(Tracked(any(live_)));
    } else if (action < 86) {
      const SequenceId id = any(live_).id;
      const std::int64_t total = below(500);
      attempt([&](Cache& cache, Stream&) { cache.reserve(id, total); });
    } else if (action < 96) {
      release(any(live_).id);
    } else if (!dead_.empty()) {
      const SequenceId id = any(dead_);
      const auto failure = stage_.on_all([&](Cache& cache, Stream&) { cache.release(id); });
      REQUIRE(failure);
      REQUIRE(failure->code == ErrorCode::invalid_argument);
    }
  }

  void check_all() {
    for (const Tracked& sequence : live_) check_contents(stage_, sequence.id, sequence.tokens);
  }

  /// Releases all sequences; no page may remain in use.
  void finish() {
    check_all();
    while (!live_.empty()) release(live_.back().id);
    for (int rank = 0; rank < stage_.size(); ++rank) {
      CHECK(stage_.cache(rank).pages_free() == pages_);
      CHECK(stage_.cache(rank).pages_used() == 0);
      CHECK(stage_.cache(rank).allocated_bytes() == 0);
      CHECK(stage_.cache(rank).ledger().num_sequences() == 0);
    }
    CHECK(num_forks_ > 0);
  }

  int num_exhausted() const { return num_exhausted_; }

 private:
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n));
  }
  template <class T>
  T& any(std::vector<T>& all) {
    return all[static_cast<std::size_t>(below(static_cast<std::int64_t>(all.size())))];
  }
  std::vector<SequenceId> ids() const {
    std::vector<SequenceId> all;
    for (const Tracked& sequence : live_) all.push_back(sequence.id);
    return all;
  }

  /// Runs `act` on all ranks. If it runs out of pages, then on all ranks alike, and nothing has changed.
  bool attempt(const std::function<void(Cache&, Stream&)>& act) {
    std::vector<Snapshot> before;
    for (int rank = 0; rank < stage_.size(); ++rank)
      before.push_back(snapshot_of(stage_.cache(rank).ledger(), ids()));
    const auto failure = stage_.on_all(act);
    if (!failure) return true;
    CAPTURE(failure->what);
    REQUIRE(failure->code == ErrorCode::capacity);
    ++num_exhausted_;
    for (int rank = 0; rank < stage_.size(); ++rank) {
      REQUIRE(snapshot_of(stage_.cache(rank).ledger(), ids()) == before[static_cast<std::size_t>(rank)]);
    }
    return false;
  }

  void add(std::int64_t reserved) {
    SequenceId id;
    if (attempt([&](Cache& cache, Stream&) { id = cache.add(reserved); })) live_.push_back({id, {}});
  }

  /// Runs one batch step of some of the sequences.
  void append_some() {
    std::vector<SequenceId> step_ids;
    std::vector<std::int64_t> counts;
    std::vector<std::size_t> indices;
    for (std::size_t i = 0; i < live_.size(); ++i) {
      if (below(3) == 0) continue;
      step_ids.push_back(live_[i].id);
      counts.push_back(below(4) == 0 ? below(60) : below(5));
      indices.push_back(i);
    }
    if (!attempt([&](Cache& cache, Stream& stream) { cache.append(step_ids, counts, stream); })) return;
    for (std::size_t i = 0; i < indices.size(); ++i) {
      Tracked& sequence = live_[indices[i]];
      const auto first = static_cast<std::int64_t>(sequence.tokens.size());
      for (std::int64_t n = 0; n < counts[i]; ++n) sequence.tokens.push_back(next_token_++);
      write_tokens(stage_, sequence.id, sequence.tokens, first);
    }
  }

  void truncate(Tracked& sequence) {
    const std::int64_t length = below(static_cast<std::int64_t>(sequence.tokens.size()) + 1);
    REQUIRE(attempt([&](Cache& cache, Stream&) { cache.truncate(sequence.id, length); }));
    sequence.tokens.resize(static_cast<std::size_t>(length));
  }

  void fork(const Tracked& parent) {
    const std::int64_t prefix = below(static_cast<std::int64_t>(parent.tokens.size()) + 1);
    SequenceId child;
    if (!attempt([&](Cache& cache, Stream& stream) { child = cache.fork(parent.id, prefix, stream); }))
      return;
    ++num_forks_;
    live_.push_back({child, parent.tokens});
    live_.back().tokens.resize(static_cast<std::size_t>(prefix));
  }

  void release(SequenceId id) {
    REQUIRE(attempt([&](Cache& cache, Stream&) { cache.release(id); }));
    dead_.push_back(id);
    std::erase_if(live_, [&](const Tracked& sequence) { return sequence.id == id; });
  }

  std::mt19937 random_;
  std::int64_t pages_;
  Stage stage_;
  std::vector<Tracked> live_;
  std::vector<SequenceId> dead_;
  std::int64_t next_token_ = 0;
  int num_exhausted_ = 0;
  int num_forks_ = 0;
};

}  // namespace

TEST_CASE("random operations lose no token, store none twice and leak no page") {
  const std::vector<Config> configs{
      {{.kvp = 1, .tpa = 1, .kv_heads = 2}, DType::f32, 16, 16, {}},
      {{.kvp = 2, .tpa = 2, .kv_heads = 4}, DType::bf16, 1, 1, {}},
      {{.kvp = 3, .tpa = 1, .kv_heads = 1, .head_dim = 5, .value_dim = 3}, DType::f32, 3, 16, {}},
      {{.kvp = 4, .tpa = 1, .kv_heads = 2}, DType::f16, 16, 1, {}},
      {{.kvp = 4, .tpa = 2, .kv_heads = 2}, DType::bf16, 3, 16, {}},
      {{.kvp = 2, .tpa = 1, .kv_heads = 3}, DType::fp8_e4m3, 1, 64, {}},
      {{.kvp = 2, .tpa = 2, .kv_heads = 4}, DType::fp8_e4m3, 3, 1, {{0.5f}, {0.37f, 1.1f, 0.25f, 2.0f}}},
      {{.kvp = 2, .tpa = 2, .kv_heads = 2}, DType::fp8_e4m3, 16, 16, {{0.1f, 0.2f, 0.3f, 0.4f}, {}}},
      {{.kvp = 4, .tpa = 1, .is_mla = true, .head_dim = 9, .value_dim = 7}, DType::bf16, 1, 16, {}},
      {{.kvp = 3, .tpa = 1, .is_mla = true, .head_dim = 9, .value_dim = 7}, DType::f32, 16, 64, {}},
      {{.kvp = 2, .tpa = 1, .is_mla = true, .head_dim = 9, .value_dim = 7},
       DType::fp8_e4m3,
       3,
       1,
       {{0.7f}, {}}},
      {{.kvp = 3, .tpa = 1, .is_mla = true, .head_dim = 138, .value_dim = 132}, DType::fp8_ds_mla, 3, 4, {}},
      {{.kvp = 8, .tpa = 1, .is_mla = true, .head_dim = 9, .value_dim = 7}, DType::f16, 3, 1, {}}};
  std::uint32_t seed = 1000;
  std::size_t num_exhausted = 0;  // runs that ran out of pages, which nearly all do
  for (std::size_t i = 0; i < configs.size() * helix::test::num_rounds(); ++i) {
    const Config& config = configs[i % configs.size()];
    ++seed;
    CAPTURE(seed, config.stage.kvp, config.stage.tpa, config.chunk, config.page_tokens, config.stage.is_mla);
    RandomOperations operations(config, seed);
    for (int step = 0; step < 120; ++step) {
      CAPTURE(step);
      operations.step(step);
      if (step % 4 == 3) operations.check_all();
    }
    operations.finish();
    num_exhausted += operations.num_exhausted() > 0 ? 1 : 0;
  }
  CHECK(num_exhausted > configs.size() * helix::test::num_rounds() * 9 / 10);
}

TEST_CASE(
    "a fork that is truncated into its shared prefix and grows again leaves its parent intact, and the "
    "reverse") {
  for (const bool is_parent_cut : {false, true}) {
    for (const std::int64_t cut : {0, 1, 3, 4, 7, 8, 11, 13, 31, 32, 33, 40}) {
      CAPTURE(is_parent_cut, cut);
      KvCacheSpec spec;
      spec.dtype = DType::f32;
      spec.num_layers = 2;
      spec.page_tokens = 4;
      spec.chunk = 2;
      spec.num_pages = 40;
      Stage stage({.kvp = 2, .kv_heads = 2}, spec);
      Tracked parent{stage.add(), {}};
      REQUIRE_FALSE(stage.on_all([&](Cache& cache, Stream& stream) { cache.append(parent.id, 45, stream); }));
      for (std::int64_t i = 0; i < 45; ++i) parent.tokens.push_back(i);
      write_tokens(stage, parent.id, parent.tokens, 0);
      Tracked child{{}, parent.tokens};
      child.tokens.resize(43);
      REQUIRE_FALSE(
          stage.on_all([&](Cache& cache, Stream& stream) { child.id = cache.fork(parent.id, 43, stream); }));
      // lcm(4, 2) * 2 = 8: 40 of the 43 tokens are shared, ten pages on the two ranks.
      for (std::int64_t rank = 0; rank < 2; ++rank) {
        const PageLedger& ledger = stage.cache(0).ledger();
        const auto mine = ledger.pages(parent.id, rank);
        const auto theirs = ledger.pages(child.id, rank);
        for (std::size_t i = 0; i < theirs.size(); ++i) CHECK((mine[i] == theirs[i]) == (i < 5));
      }
      Tracked& changed = is_parent_cut ? parent : child;
      const std::int64_t used_before = stage.cache(0).pages_used();
      REQUIRE_FALSE(stage.on_all([&](Cache& cache, Stream&) { cache.truncate(changed.id, cut); }));
      changed.tokens.resize(static_cast<std::size_t>(cut));
      CHECK(stage.cache(0).pages_used() <= used_before);
      std::int64_t next = 1000;
      for (const std::int64_t count : {1, 2, 1, 9}) {
        REQUIRE_FALSE(
            stage.on_all([&](Cache& cache, Stream& stream) { cache.append(changed.id, count, stream); }));
        const auto first = static_cast<std::int64_t>(changed.tokens.size());
        for (std::int64_t i = 0; i < count; ++i) changed.tokens.push_back(next++);
        write_tokens(stage, changed.id, changed.tokens, first);
        check_contents(stage, parent.id, parent.tokens);
        check_contents(stage, child.id, child.tokens);
      }
      REQUIRE_FALSE(
          stage.on_all([&](Cache& cache, Stream&) { cache.release(is_parent_cut ? parent.id : child.id); }));
      const Tracked& rest = is_parent_cut ? child : parent;
      check_contents(stage, rest.id, rest.tokens);
      REQUIRE_FALSE(stage.on_all([&](Cache& cache, Stream&) { cache.release(rest.id); }));
      CHECK(stage.cache(0).pages_free() == 40);
      CHECK(stage.cache(1).pages_free() == 40);
    }
  }
}

TEST_CASE("all ranks together hold one copy of the cache, within a page a sequence a rank") {
  struct Grid {
    StageSpec stage;
    std::int64_t chunk;
  };
  const std::vector<std::int64_t> lengths{1, 7, 64, 100, 333, 512};
  for (const Grid& grid :
       {Grid{{.kvp = 4, .tpa = 2, .kv_heads = 4}, 1}, Grid{{.kvp = 2, .tpa = 4, .kv_heads = 4}, 16},
        Grid{{.kvp = 8, .tpa = 1, .kv_heads = 2}, 3},
        Grid{{.kvp = 8, .tpa = 1, .is_mla = true, .head_dim = 9, .value_dim = 7}, 16}}) {
    CAPTURE(grid.stage.kvp, grid.stage.tpa, grid.chunk);
    KvCacheSpec spec;
    spec.dtype = DType::bf16;
    spec.num_layers = 3;
    spec.page_tokens = 16;
    spec.chunk = grid.chunk;
    spec.num_pages = 100;
    Stage stage(grid.stage, spec);
    StageSpec one_rank = grid.stage;
    one_rank.kvp = one_rank.tpa = 1;
    Stage whole(one_rank, spec);
    for (const std::int64_t length : lengths) {
      const SequenceId id = stage.add();
      REQUIRE_FALSE(stage.on_all([&](Cache& cache, Stream& stream) { cache.append(id, length, stream); }));
      const SequenceId in_whole = whole.add();
      whole.cache(0).append(in_whole, length, whole.stream(0));
    }
    std::size_t sum = 0;
    std::size_t slack = 0;
    for (int rank = 0; rank < stage.size(); ++rank) {
      sum += stage.cache(rank).allocated_bytes();
      slack += stage.cache(rank).page_bytes() * lengths.size();
      // Invariant 11: a rank's share is 1/N, up to one page per sequence and the rounding of the whole cache.
      const std::size_t share = whole.cache(0).allocated_bytes() / static_cast<std::size_t>(stage.size());
      const std::size_t mine = stage.cache(rank).allocated_bytes();
      CHECK(mine <=
            share + (stage.cache(rank).page_bytes() + grid.stage.kvp * stage.cache(rank).page_bytes()) *
                        lengths.size());
    }
    const std::size_t one = whole.cache(0).allocated_bytes();
    CHECK(sum + whole.cache(0).page_bytes() * lengths.size() >= one);
    CHECK(sum <= one + slack);
    // A pool for exactly these lengths.
    CHECK(PageLedger::pages_needed(KvLayout(grid.stage.kvp, grid.chunk), 16, lengths) ==
          stage.cache(0).pages_used());
    for (int rank = 0; rank < stage.size(); ++rank)
      CHECK(stage.cache(rank).pages_used() <= stage.cache(0).pages_used());
  }
}

TEST_CASE("addresses of a layer never change, and layers do not overlap") {
  KvCacheSpec spec;
  spec.dtype = DType::fp8_e4m3;
  spec.num_layers = 3;
  spec.page_tokens = 3;
  spec.num_pages = 5;
  Stage stage({.kv_heads = 1, .head_dim = 5, .value_dim = 5}, spec);
  Cache& cache = stage.cache(0);
  const KvView first = cache.layer(0);
  const KvView second = cache.layer(1);
  CHECK(first.format.page_elements() == 2 * 3 * 5);
  CHECK(reinterpret_cast<std::uintptr_t>(second.k) % 256 == 0);
  CHECK(static_cast<std::byte*>(second.k) - static_cast<std::byte*>(first.k) >=
        first.format.page_elements() * 5);
  CHECK(first.k_scale == nullptr);
  CHECK(cache.page_bytes() == 2u * 3 * 5 * 3);
  CHECK(cache.capacity_bytes() == 5 * cache.page_bytes());
  const SequenceId id = cache.add();
  cache.append(id, 7, stage.stream(0));
  stage.synchronize();
  CHECK(cache.layer(1).k == second.k);
  CHECK(cache.layer(1).page_table == second.page_table);
}

/// The CPU backend with a count of copies to the device.
class CountingBackend : public CpuBackend {
 public:
  using CpuBackend::CpuBackend;

  void upload(void* target, const void* source, std::size_t bytes, Stream stream) const {
    sizes.push_back(bytes);
    CpuBackend::upload(target, source, bytes, stream);
  }
  mutable std::vector<std::size_t> sizes;
};

TEST_CASE("growing takes one copy of the page table however many sequences grow, unless rows lie far apart") {
  // Rows of 4 KiB: one copy spans at most 16 of them.
  constexpr std::int64_t kMaxPages = 1024;
  constexpr std::int64_t kPageTokens = 2;
  constexpr std::int64_t kSequences = 40;
  KvCacheSpec spec;
  spec.num_layers = 1;
  spec.page_tokens = kPageTokens;
  spec.num_pages = 400;
  spec.max_sequences = kSequences + 1;
  spec.max_tokens = kMaxPages * kPageTokens;
  CountingBackend backend;
  const StageSpec stage{.kv_heads = 1, .head_dim = 2, .value_dim = 2};
  helix::ShardedKVCache<CountingBackend> cache(backend, Topology(widths_of(stage), shape_of(stage)), spec);
  const KvView kv = cache.layer(0);
  REQUIRE(kv.max_pages == kMaxPages);
  Stream stream = backend.create_stream();
  std::vector<SequenceId> live;
  for (std::int64_t i = 0; i < kSequences; ++i) live.push_back(cache.add());

  /// The copies needed to grow the sequences. Afterwards the device's table must name the pages of each live
  /// sequence.
  const auto grow = [&](const std::vector<std::size_t>& which, std::int64_t tokens) {
    std::vector<SequenceId> ids;
    for (const std::size_t i : which) ids.push_back(live[i]);
    backend.sizes.clear();
    cache.append(ids, std::vector<std::int64_t>(ids.size(), tokens), stream);
    stream.synchronize();
    for (const SequenceId& id : live) {
      const auto pages = cache.ledger().pages(id, 0);
      const std::int32_t* const row = kv.page_table + id.slot * kMaxPages;
      REQUIRE(std::equal(pages.begin(), pages.end(), row));
      const bool is_clean = std::all_of(row + pages.size(), row + kMaxPages,
                                        [&](std::int32_t page) { return page == spec.num_pages; });
      REQUIRE((is_clean || backend.sizes.empty()));  // entries that were lost go with the next copy
    }
    return backend.sizes;
  };
  using Sizes = std::vector<std::size_t>;
  constexpr std::size_t kRow = kMaxPages * sizeof(std::int32_t);
  CHECK(grow({3}, 1) == Sizes{4});   // its first page
  CHECK(grow({3}, 1) == Sizes{});    // fits in its pages
  CHECK(grow({3}, 5) == Sizes{12});  // three pages
  CHECK(grow({4, 5, 9}, 1) == Sizes{5 * kRow + 4});
  CHECK(grow({9, 4, 5}, 1) == Sizes{});
  CHECK(grow({9, 3, 4}, 3) == Sizes{6 * kRow - 4});  // row 3 from its fifth entry, row 9 up to its third
  CHECK(grow({20, 36}, 2) == Sizes{4, 4});           // 64 KiB and one entry apart
  CHECK(grow({20, 35, 36}, 2) == Sizes{4, 4, 4});
  CHECK(grow({21, 36}, 4) == Sizes{15 * kRow + 16});  // row 36 up to its fourth

  // Truncated and grown again after the rows of others were rewritten: nothing stale may come back.
  std::mt19937 random(5);
  for (int step = 0; step < 200; ++step) {
    CAPTURE(step);
    const std::size_t at = random() % live.size();
    if (step % 3 == 0) {
      for (int times = 0; times < 2; ++times) cache.truncate(live[at], cache.length(live[at]) / 2);
    } else if (step % 7 == 1) {
      cache.release(live[at]);
      live[at] = cache.add();
    }
    const std::size_t other = (at + 1 + random() % (live.size() - 1)) % live.size();
    grow({at, other}, static_cast<std::int64_t>(random() % 6));
  }
  const SequenceId child = cache.fork(live[3], cache.length(live[3]), stream);
  live.push_back(child);
  grow({0}, 1);
}

TEST_CASE("a sequence that fills its row of the page table leaves the next row alone when it ends") {
  Stage stage({.kv_heads = 1}, {.dtype = DType::f32,
                                .num_layers = 1,
                                .page_tokens = 4,
                                .num_pages = 4,
                                .max_sequences = 2,
                                .max_tokens = 8});
  Cache& cache = stage.cache(0);
  Stream& stream = stage.stream(0);
  const SequenceId full = cache.add();
  const SequenceId next = cache.add();
  cache.append(full, 8, stream);
  cache.append(next, 8, stream);
  cache.release(full);
  cache.append(cache.add(), 1, stream);  // writes the table
  stage.synchronize();
  const auto pages = cache.ledger().pages(next, 0);
  REQUIRE(pages.size() == 2);
  const std::int32_t* const row = cache.layer(0).page_table + 2 * cache.slot(next);
  CHECK(std::equal(pages.begin(), pages.end(), row));
}

TEST_CASE("partial reads return the asked rows through any strides") {
  KvCacheSpec spec;
  spec.dtype = DType::f32;
  spec.num_layers = 1;
  spec.page_tokens = 3;
  spec.chunk = 2;
  spec.num_pages = 20;
  Stage stage({.kvp = 2, .kv_heads = 2}, spec);
  const SequenceId id = stage.add();
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < 37; ++i) tokens.push_back(i);
  REQUIRE_FALSE(stage.on_all([&](Cache& cache, Stream& stream) { cache.append(id, 37, stream); }));
  write_tokens(stage, id, tokens, 0);
  const auto owned = owned_positions(37, 2, 2, 1);
  for (std::int64_t begin = 0; begin <= static_cast<std::int64_t>(owned.size()); ++begin) {
    for (std::int64_t end = begin; end <= static_cast<std::int64_t>(owned.size()); ++end) {
      const std::int64_t count = end - begin;
      std::vector<float> k(static_cast<std::size_t>(count * 2 * 11), -777.0f);
      std::vector<float> v(static_cast<std::size_t>(count * 2 * 8), -777.0f);
      const TensorView<float, 3> k_out(k.data(), {count, 2, 8},
                                       {11, count * 11, 1});  // head-major, padded rows
      const TensorView<float, 3> v_out(v.data(), {count, 2, 8});
      stage.cache(1).read(id, 0, {begin, end}, k_out, v_out, stage.stream(1));
      stage.stream(1).synchronize();
      bool right = true;
      for (std::int64_t i = 0; i < count; ++i) {
        for (std::int64_t h = 0; h < 2; ++h) {
          for (std::int64_t d = 0; d < 8; ++d) {
            const std::int64_t token = owned[static_cast<std::size_t>(begin + i)];
            right = right && k_out(i, h, d) == element(token, 0, h, false, d);
            right = right && v_out(i, h, d) == element(token, 0, h, true, d);
          }
          for (std::int64_t d = 8; d < 11; ++d) right = right && k_out(i, h, d) == -777.0f;
        }
      }
      CAPTURE(begin, end);
      CHECK(right);
    }
  }
}

TEST_CASE("tokens appended in decode steps and tokens written at once give the same bits") {
  for (const DType format : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3, DType::fp8_ds_mla}) {
    for (const bool is_mla : {false, true}) {
      if (format == DType::fp8_ds_mla && !is_mla) continue;
      CAPTURE(std::string(helix::to_string(format)), is_mla);
      KvCacheSpec spec;
      spec.dtype = format;
      spec.num_layers = 2;
      spec.page_tokens = 4;
      spec.chunk = 3;
      spec.num_pages = 30;
      if (format == DType::fp8_e4m3) spec.k_scales = {0.3f};
      if (format == DType::fp8_e4m3 && !is_mla) spec.v_scales = {1.7f};
      const bool is_mixed = format == DType::fp8_ds_mla;
      const StageSpec sizes = is_mixed
                                  ? StageSpec{.kvp = 2, .is_mla = true, .head_dim = 138, .value_dim = 132}
                              : is_mla ? StageSpec{.kvp = 2, .is_mla = true, .head_dim = 9, .value_dim = 7}
                                       : StageSpec{.kvp = 2, .tpa = 2, .kv_heads = 4};
      Stage stage(sizes, spec);
      Tracked stepped{stage.add(), {}};
      Tracked bystander{stage.add(), {}};
      std::int64_t next = 0;
      for (const std::int64_t count : {1, 4, 1, 2, 8, 1, 1, 3}) {  // query tokens of the step
        REQUIRE_FALSE(
            stage.on_all([&](Cache& cache, Stream& stream) { cache.append(stepped.id, count, stream); }));
        REQUIRE_FALSE(
            stage.on_all([&](Cache& cache, Stream& stream) { cache.append(bystander.id, 1, stream); }));
        // The batch: the bystander's token, then the tokens of `stepped`, then padding at the end.
        std::vector<std::int64_t> positions{static_cast<std::int64_t>(bystander.tokens.size())};
        bystander.tokens.push_back(next++);
        std::vector<std::int64_t> numbers{bystander.tokens.back()};
        for (std::int64_t i = 0; i < count; ++i) {
          positions.push_back(static_cast<std::int64_t>(stepped.tokens.size()));
          stepped.tokens.push_back(next++);
          numbers.push_back(stepped.tokens.back());
        }
        positions.push_back(-1);
        numbers.push_back(-1);
        const std::vector<std::int32_t> offsets{0, 1, static_cast<std::int32_t>(count) + 2};
        for (int rank = 0; rank < stage.size(); ++rank) {
          Cache& cache = stage.cache(rank);
          const std::vector<std::int32_t> slots{cache.slot(bystander.id), cache.slot(stepped.id)};
          for (int layer = 0; layer < 2; ++layer) {
            const KvView view = cache.layer(layer);
            const helix::Range heads = stage.topology().kv_heads(rank);
            const std::int64_t v_dim = is_mla ? 0 : view.format.value_dim;
            std::vector<float> k;
            std::vector<float> v;
            for (const std::int64_t number : numbers) {
              for (std::int64_t h = heads.begin; h < heads.end; ++h) {
                for (std::int64_t d = 0; d < view.format.head_dim; ++d)
                  k.push_back(element(number, layer, h, false, d));
                for (std::int64_t d = 0; d < v_dim; ++d) v.push_back(element(number, layer, h, true, d));
              }
            }
            const auto tokens = static_cast<std::int64_t>(numbers.size());
            stage.backend(rank).append_kv(
                {.k = TensorView<const float, 3>(k.data(), {tokens, heads.size(), view.format.head_dim}),
                 .v = TensorView<const float, 3>(v.data(), {is_mla ? 0 : tokens, heads.size(), v_dim}),
                 .batch = {offsets, offsets.data(), positions.data(), slots.data()},
                 .kv = view},
                stage.stream(rank));
            stage.stream(rank).synchronize();
          }
        }
      }
      check_contents(stage, stepped.id, stepped.tokens);
      check_contents(stage, bystander.id, bystander.tokens);
      Tracked written{stage.add(), stepped.tokens};
      const auto length = static_cast<std::int64_t>(written.tokens.size());
      REQUIRE_FALSE(
          stage.on_all([&](Cache& cache, Stream& stream) { cache.append(written.id, length, stream); }));
      write_tokens(stage, written.id, written.tokens, 0);
      check_contents(stage, written.id, written.tokens);
    }
  }
}
