// SPDX-License-Identifier: Apache-2.0
// ShardedKVCache refuses contradictory calls equally on every rank, and changes nothing.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/page_ledger.hpp>
#include <helix/sharded_kv_cache.hpp>

#include "support/cache_stage.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"
#include "support/resident_memory.hpp"

using namespace helix::test::cache;
using helix::test::ResidentMemory;

TEST_CASE("writing into a page that another sequence shares is refused") {
  Stage stage({.kvp = 2, .kv_heads = 1},
              {.dtype = DType::f32, .num_layers = 1, .page_tokens = 4, .num_pages = 10, .chunk = 4});
  Cache& cache = stage.cache(1);
  Stream& stream = stage.stream(1);
  const SequenceId parent = cache.add();
  cache.append(parent, 20, stream);
  const SequenceId child = cache.fork(parent, 20, stream);
  const std::vector<float> rows(20 * 8);
  const auto write = [&](SequenceId id, std::int64_t first, std::int64_t count) {
    const TensorView<const float, 3> view(rows.data(), {count, 1, 8});
    cache.write(id, 0, first, view, view, stream);
  };
  CHECK_THROWS_WITH(write(parent, 0, 1), Catch::Matchers::ContainsSubstring("another sequence shares"));
  CHECK_THROWS_AS(write(child, 15, 2), Error);
  CHECK_NOTHROW(write(child, 16, 4));
  CHECK_NOTHROW(write(child, 3, 0));
  cache.release(child);
  CHECK_NOTHROW(write(parent, 0, 20));
  stream.synchronize();
}

TEST_CASE("tokens that are appended before there is room for them are refused, and harm no sequence") {
  const DType format = GENERATE(DType::f32, DType::fp8_ds_mla);
  const bool is_mla = format == DType::fp8_ds_mla;
  Stage stage({.is_mla = is_mla, .head_dim = is_mla ? 10 : 8},
              {.dtype = format, .num_layers = 2, .page_tokens = 4, .num_pages = 2, .max_sequences = 2});
  Cache& cache = stage.cache(0);
  const SequenceId full = cache.add();
  const SequenceId empty = cache.add();
  cache.append(full, 8, stage.stream(0));  // uses all pages
  stage.synchronize();
  for (const int layer : {0, 1}) {
    CAPTURE(layer);
    const KvView kv = cache.layer(layer);
    const auto* const first = static_cast<const std::byte*>(kv.k);
    const std::vector<std::byte> before(first, first + cache.capacity_bytes() / 2);
    const std::vector<float> rows(10, 1.0f);
    const std::vector<std::int32_t> offsets{0, 1};
    const std::int64_t position = 5;
    const std::int32_t slot = cache.slot(empty);
    const std::int64_t columns = kv.format.head_dim;
    const TensorView<const float, 3> row(rows.data(), {1, 1, columns});
    const TensorView<const float, 3> none(nullptr, {0, 1, columns});
    Stream stream = stage.backend(0).create_stream();
    const auto failure = failure_of([&] {
      stage.backend(0).append_kv({.k = row,
                                  .v = is_mla ? none : row,
                                  .batch = {offsets, offsets.data(), &position, &slot},
                                  .kv = kv},
                                 stream);
      stream.synchronize();
    });
    REQUIRE(failure);
    CHECK(failure->code == ErrorCode::invalid_argument);
    CHECK(failure->what.starts_with("local token 5 of the sequence in slot 1 has page 2 of the KV pool's 2"));
    CHECK(before == std::vector<std::byte>(first, first + cache.capacity_bytes() / 2));
  }
}

TEST_CASE("tokens of a sequence that has lost its pages are refused, and harm no other that has them now") {
  const bool releases = GENERATE(false, true);
  CAPTURE(releases);
  Stage stage({.head_dim = 8},
              {.dtype = DType::f32, .num_layers = 1, .page_tokens = 4, .num_pages = 2, .max_sequences = 3});
  Cache& cache = stage.cache(0);
  const SequenceId first = cache.add();
  const SequenceId second = cache.add();
  const SequenceId idle = cache.add();
  cache.append(first, 8, stage.stream(0));
  const std::int32_t slot = cache.slot(first);
  if (releases) {
    cache.release(first);
  } else {
    cache.truncate(first, 0);
  }
  cache.append(second, 8, stage.stream(0));
  stage.synchronize();
  const KvView kv = cache.layer(0);
  const std::vector<float> rows(8, 1.0f);
  const std::vector<std::int32_t> offsets{0, 1};
  const TensorView<const float, 3> row(rows.data(), {1, 1, 8});
  const auto append = [&](std::int32_t to, std::int64_t position) {
    return failure_of([&] {
      Stream stream = stage.backend(0).create_stream();
      stage.backend(0).append_kv(
          {.k = row, .v = row, .batch = {offsets, offsets.data(), &position, &to}, .kv = kv}, stream);
      stream.synchronize();
    });
  };
  for (const std::int64_t position : {0, 3, 7}) {
    const auto failure = append(slot, position);
    REQUIRE(failure);
    CHECK(failure->code == ErrorCode::invalid_argument);
    CHECK(failure->says("append() to the sequence"));
  }
  CHECK(append(cache.slot(second), 7) == std::nullopt);
  const auto beyond = append(3, 0);
  REQUIRE(beyond);
  CHECK(beyond->says("sequence in slot 3 of 3"));
  CHECK(cache.length(idle) == 0);
}

TEST_CASE("ids that are stale, foreign or made up are refused everywhere") {
  const KvCacheSpec spec{.dtype = DType::f32, .num_layers = 1, .num_pages = 4, .max_sequences = 2};
  Stage stage({.kv_heads = 1}, spec);
  Cache& cache = stage.cache(0);
  Stream& stream = stage.stream(0);
  const SequenceId released = cache.add();
  cache.release(released);
  const SequenceId live = cache.add();
  CHECK(live.slot == released.slot);
  CHECK_FALSE(live == released);
  KvCacheSpec other_spec = spec;
  other_spec.tag = 1;
  Stage other({.kv_heads = 1}, other_spec);
  other.cache(0).release(other.add());
  const SequenceId foreign = other.add();
  CHECK((foreign.slot == live.slot && foreign.generation == live.generation));
  SequenceId far = live;
  far.slot = 2;
  SequenceId future = live;
  ++future.generation;
  SequenceId unused = live;
  unused.slot = 1;
  unused.generation = 0;  // what the first user of the slot will get
  for (const SequenceId id : {SequenceId{}, released, foreign, far, future, unused}) {
    CAPTURE(id.cache, id.slot, id.generation);
    const TensorView<const float, 3> none(nullptr, {0, 1, 8});
    const TensorView<float, 3> none_out(nullptr, {0, 1, 8});
    const std::vector<std::function<void()>> calls{[&] { cache.release(id); },
                                                   [&] { cache.reserve(id, 1); },
                                                   [&] { cache.append(id, 1, stream); },
                                                   [&] { cache.truncate(id, 0); },
                                                   [&] { (void)cache.fork(id, 0, stream); },
                                                   [&] { cache.write(id, 0, 0, none, none, stream); },
                                                   [&] {
                                                     cache.read(id, 0, {0, 0}, none_out, none_out, stream);
                                                   },
                                                   [&] { (void)cache.slot(id); },
                                                   [&] { (void)cache.length(id); },
                                                   [&] { (void)cache.local_length(id); },
                                                   [&] { (void)cache.ledger().pages(id, 0); },
                                                   [&] { (void)cache.ledger().reserved_tokens(id); }};
    for (const auto& call : calls) {
      const auto failure = failure_of(call);
      REQUIRE(failure);
      CHECK(failure->code == ErrorCode::invalid_argument);
      CHECK(contains(failure->what, "sequence (slot "));
    }
  }
  CHECK(contains(failure_of([&] { cache.release(released); })->what,
                 "was released; another one uses its slot now"));
  CHECK(cache.length(live) == 0);
  CHECK(cache.ledger().num_sequences() == 1);
}

/// A cache with two sequences, one of 6 tokens and one empty.
struct TwoSequences {
  Stage stage{{.kv_heads = 2}, {.dtype = DType::f32, .num_layers = 2, .page_tokens = 4, .num_pages = 4}};
  Cache& cache = stage.cache(0);
  Stream& stream = stage.stream(0);
  SequenceId a = cache.add();
  SequenceId b = cache.add();
  std::vector<float> rows = std::vector<float>(6 * 2 * 8);

  TensorView<const float, 3> view(std::int64_t n, std::int64_t h, std::int64_t d) const {
    return {rows.data(), {n, h, d}};
  }
  TensorView<float, 3> out(std::int64_t n, std::int64_t h, std::int64_t d) {
    return {rows.data(), {n, h, d}};
  }

  /// Checks that each call is refused and changes nothing.
  void check(const std::vector<std::function<void()>>& calls) {
    const Snapshot before = snapshot_of(cache.ledger(), {a, b});
    for (std::size_t i = 0; i < calls.size(); ++i) {
      CAPTURE(i);
      const auto failure = failure_of(calls[i]);
      REQUIRE(failure);
      CHECK(failure->code == ErrorCode::invalid_argument);
      CHECK(snapshot_of(cache.ledger(), {a, b}) == before);
    }
    stream.synchronize();
  }
};

TEST_CASE_METHOD(TwoSequences,
                 "changes whose arguments contradict each other are refused and change nothing") {
  cache.append(a, 6, stream);
  const std::vector<SequenceId> twice{a, b, a};
  const std::vector<std::int64_t> three{1, 1, 1};
  const std::vector<std::int64_t> two{1, 1};
  const std::vector<std::int64_t> negative{1, -1};
  const std::vector<std::int64_t> huge{1, std::numeric_limits<std::int64_t>::max()};
  check({[&] { cache.append(twice, three, stream); },
         [&] { cache.append(twice, two, stream); },
         [&] { cache.append(std::span(twice).first(2), negative, stream); },
         [&] { cache.append(std::span(twice).first(2), huge, stream); },
         [&] { cache.append(a, -1, stream); },
         [&] { (void)cache.add(-1); },
         [&] { cache.reserve(a, -1); },
         [&] { cache.truncate(a, 7); },
         [&] { cache.truncate(a, -1); },
         [&] { (void)cache.fork(a, 7, stream); },
         [&] { (void)cache.fork(a, -1, stream); },
         [&] { cache.write(a, 2, 0, view(1, 2, 8), view(1, 2, 8), stream); },
         [&] { cache.write(a, -1, 0, view(1, 2, 8), view(1, 2, 8), stream); },
         [&] { cache.write(a, 0, 6, view(1, 2, 8), view(1, 2, 8), stream); },
         [&] { cache.write(a, 0, -1, view(1, 2, 8), view(1, 2, 8), stream); },
         [&] {
           cache.write(a, 0, std::numeric_limits<std::int64_t>::max(), view(1, 2, 8), view(1, 2, 8), stream);
         },
         [&] { cache.write(a, 0, 0, view(1, 1, 8), view(1, 1, 8), stream); },
         [&] { cache.write(a, 0, 0, view(1, 2, 7), view(1, 2, 8), stream); },
         [&] { cache.write(a, 0, 0, view(1, 2, 8), view(1, 2, 9), stream); },
         [&] { cache.write(a, 0, 0, view(2, 2, 8), view(1, 2, 8), stream); },
         [&] {
           cache.write(a, 0, 0, {rows.data(), {1, 2, 8}, {32, 16, 2}}, view(1, 2, 8), stream);
         },
         [&] {
           cache.write(a, 0, 0, {nullptr, {1, 2, 8}}, view(1, 2, 8), stream);
         },
         [&] {
           cache.write(a, 0, 2, {rows.data(), {-1, 2, 8}, {16, 8, 1}}, {rows.data(), {-1, 2, 8}, {16, 8, 1}},
                       stream);
         }});
}

TEST_CASE_METHOD(TwoSequences, "reads and questions whose arguments contradict each other are refused") {
  cache.append(a, 6, stream);
  check({[&] {
           cache.read(a, 0, {0, 1}, out(1, 2, 8), {nullptr, {1, 2, 8}}, stream);
         },
         [&] {
           cache.read(a, 0, {0, 7}, out(7, 2, 8), out(7, 2, 8), stream);
         },
         [&] {
           cache.read(a, 0, {-1, 2}, out(3, 2, 8), out(3, 2, 8), stream);
         },
         [&] {
           cache.read(a, 0, {3, 2}, out(0, 2, 8), out(0, 2, 8), stream);
         },
         [&] {
           cache.read(a, 0, {0, 2}, out(1, 2, 8), out(1, 2, 8), stream);
         },
         [&] {
           cache.read(a, 2, {0, 2}, out(2, 2, 8), out(2, 2, 8), stream);
         },
         [&] { (void)cache.layer(2); }, [&] { (void)cache.ledger().pages(a, 1); },
         [&] { (void)cache.ledger().pages(-1); }, [&] { (void)cache.ledger().pages(99); },
         [&] { (void)cache.ledger().pages(2); }, [&] { (void)cache.ledger().pages_free(1); },
         [&] { (void)cache.ledger().pages_used(-1); },
         [&] {
           (void)cache.ledger().is_shared(a, {0, 7});
         },
         [&] {
           (void)cache.ledger().is_shared(a, {-1, 2});
         },
         [&] { (void)PageLedger::pages_needed(KvLayout(2, 3), 0, 100, 0); },
         [&] { (void)PageLedger::pages_needed(KvLayout(2, 3), 64, -1, 0); },
         [&] { (void)PageLedger::pages_needed(KvLayout(2, 3), 64, 100, 2); },
         [&] { (void)PageLedger::pages_needed(KvLayout(2, 3), std::int64_t{1} << 33, 100, 0); }});
}

TEST_CASE("a cache and a ledger that were moved from are refused, and those that they were moved to go on") {
  Stage stage({.kv_heads = 1}, {.dtype = DType::f32, .num_layers = 1, .num_pages = 4, .max_sequences = 2});
  Cache& old = stage.cache(0);
  Stream& stream = stage.stream(0);
  const SequenceId id = old.add();
  Cache cache(std::move(old));
  const auto refused = [](const std::function<void()>& call) {
    const auto failure = helix::test::required_failure(call);
    CAPTURE(failure.what);
    CHECK(failure.code == helix::ErrorCode::invalid_argument);
    CHECK(failure.says("were moved from"));
  };
  refused([&] { (void)old.add(); });
  refused([&] { old.append(id, 1, stream); });
  refused([&] { old.release(id); });
  refused([&] { (void)old.slot(id); });
  refused([&] { (void)old.pages_free(); });
  refused([&] { (void)old.ledger().num_sequences(); });
  refused([&] { (void)old.ledger().pages(0); });
  cache.append(id, 1, stream);
  CHECK(cache.length(id) == 1);
  stream.synchronize();
}

TEST_CASE("bad cache sizes fail at construction") {
  KvCacheSpec good;
  good.dtype = DType::fp8_e4m3;
  good.num_layers = 2;
  good.num_pages = 4;
  const auto check = [&](std::initializer_list<helix::test::Mistake<KvCacheSpec>> mistakes,
                         const StageSpec& stage_spec) {
    helix::test::check_mistakes(
        mistakes, [&] { return good; }, [&](const KvCacheSpec& spec) { Stage(stage_spec, spec); });
  };
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  check(
      {
          {"num_layers is 0", [](KvCacheSpec& s) { s.num_layers = 0; }},
          {"num_pages is 0", [](KvCacheSpec& s) { s.num_pages = 0; }},
          {"page_tokens is 0", [](KvCacheSpec& s) { s.page_tokens = 0; }},
          {"chunk is 0", [](KvCacheSpec& s) { s.chunk = 0; }},
          {"max_sequences is 2147483647; it must be in [1, 1048576]",
           [](KvCacheSpec& s) { s.max_sequences = std::numeric_limits<std::int32_t>::max(); }},
          {"max_sequences is -1", [](KvCacheSpec& s) { s.max_sequences = -1; }},
          {"max_tokens is -1", [](KvCacheSpec& s) { s.max_tokens = -1; }},
          {"num_pages is 9223372036854775807", [](KvCacheSpec& s) { s.num_pages = kHuge; }},
          {"dtype is 99, which names no DType", [](KvCacheSpec& s) { s.dtype = static_cast<DType>(99); }},
          {"2 k_scales; give 1, one for each of the 3 KV heads, or 2 * 3",
           [](KvCacheSpec& s) { s.k_scales.assign(2, 1.0f); }},
          {"v_scales hold 0", [](KvCacheSpec& s) { s.v_scales.assign(1, 0.0f); }},
          {"only fp8_e4m3 is scaled",
           [](KvCacheSpec& s) {
             s.k_scales.assign(1, 1.0f);
             s.dtype = DType::bf16;
           }},
      },
      {.kv_heads = 3});
  check({{"give k_scales only", [](KvCacheSpec& s) { s.v_scales.assign(1, 1.0f); }},
         {"dtype is fp8_ds_mla, but the model has latents of 7 of 9 columns",
          [](KvCacheSpec& s) { s.dtype = DType::fp8_ds_mla; }}},
        {.is_mla = true, .head_dim = 9, .value_dim = 7});
  check({{"dtype is fp8_ds_mla, but the model has no latents",
          [](KvCacheSpec& s) { s.dtype = DType::fp8_ds_mla; }}},
        {.kv_heads = 1});
  CHECK(contains(failure_of([&] { Stage({.kv_heads = 1, .head_dim = 8, .value_dim = 9}, good); })->what,
                 "value_dim 9 exceeds head_dim 8"));

  const Topology topology(widths_of({.kvp = 2, .kv_heads = 1}), shape_of({.kvp = 2, .kv_heads = 1}));
  CpuBackend alone;
  CHECK(contains(failure_of([&] { Cache(alone, topology, good); })->what,
                 "ShardedKVCache: the stage communicator has 1 ranks; the topology's stage has 2"));
  CpuBackend crossed(LocalComm::create_group(2)[1], LocalComm::create_group(2)[0]);
  CHECK(contains(failure_of([&] { Cache(crossed, topology, good); })->what,
                 "places stage_rank 1 at kvp_rank 1 of 2"));
  CpuBackend wide(LocalComm::create_group(2)[0], LocalComm::create_group(3)[0]);
  CHECK(contains(failure_of([&] { Cache(wide, topology, good); })->what,
                 "the KVP communicator has rank 0 of 3"));
}

TEST_CASE("pages that no memory holds are refused before their books are made") {
  const std::int64_t before = ResidentMemory::now().all();
  const auto failure = failure_of([] {
    Stage({.kv_heads = 1}, {.num_layers = std::numeric_limits<int>::max(), .num_pages = helix::kMaxPages});
  });
  REQUIRE(failure);
  CHECK(failure->code == ErrorCode::capacity);
  CHECK(failure->says("exceeds the address space"));
  CHECK(ResidentMemory::now().all() - before < std::int64_t{64}
                                                   << 20);  // the ledger of so many pages takes gigabytes
}
