// SPDX-License-Identifier: Apache-2.0
// ShardedKVCache and PageLedger: random operations on every rank of a stage against a plain list of each
// sequence's tokens.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>
#include <helix/error.hpp>
#include <helix/page_ledger.hpp>
#include <helix/sharded_kv_cache.hpp>

#include "support/catch.hpp"

namespace {

using helix::DType;
using helix::Error;
using helix::ErrorCode;
using helix::KvCacheSpec;
using helix::KvLayout;
using helix::KvView;
using helix::ModelShape;
using helix::PageLedger;
using helix::PageLedgerSpec;
using helix::SequenceId;
using helix::TensorView;
using helix::TokenRange;
using helix::Topology;
using helix::TopologySpec;
using helix::cpu::LocalComm;
using helix::cpu::Stream;
using CpuBackend = helix::cpu::Backend<LocalComm>;
using Cache = helix::ShardedKVCache<CpuBackend>;

struct Failure {
  ErrorCode code;
  std::string what;
  friend bool operator==(const Failure&, const Failure&) = default;
};

std::optional<Failure> failure_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return Failure{error.code(), error.what()};
  }
  return std::nullopt;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Tokens of [0, length) that `kvp_rank` owns, dealt out chunk by chunk without the library's formula.
std::vector<std::int64_t> owned_positions(std::int64_t length, std::int64_t kvp, std::int64_t chunk,
                                          std::int64_t kvp_rank) {
  std::vector<std::int64_t> owned;
  std::int64_t rank = 0;
  for (std::int64_t p = 0; p < length; ++p) {
    if (rank == kvp_rank) owned.push_back(p);
    if ((p + 1) % chunk == 0) rank = (rank + 1) % kvp;
  }
  return owned;
}

std::int64_t owned_count(std::int64_t length, std::int64_t kvp, std::int64_t chunk, std::int64_t kvp_rank) {
  return static_cast<std::int64_t>(owned_positions(length, kvp, chunk, kvp_rank).size());
}

// ---------------------------------------------------------------------------------------------------------------
// The whole stage in one thread: each rank has its backend, cache and stream.
// ---------------------------------------------------------------------------------------------------------------

struct StageSpec {
  int kvp = 1;
  int tpa = 1;
  bool is_mla = false;
  std::int64_t kv_heads = 1;
  std::int64_t head_dim = 8;
  std::int64_t value_dim = 8;
};

ModelShape shape_of(const StageSpec& spec) {
  ModelShape shape;
  shape.num_query_heads = spec.kvp * spec.kv_heads * 2;
  shape.num_kv_heads = spec.kv_heads;
  shape.head_dim = spec.head_dim;
  shape.value_dim = spec.value_dim;
  shape.hidden = 64;
  if (spec.is_mla)
    shape.mla =
        helix::MlaShape{.kv_lora_rank = spec.value_dim, .qk_rope_head_dim = spec.head_dim - spec.value_dim};
  return shape;
}

TopologySpec widths_of(const StageSpec& spec) {
  TopologySpec widths;
  widths.kvp = spec.kvp;
  widths.tpa = spec.tpa;
  return widths;
}

class Stage {
 public:
  Stage(const StageSpec& spec, const KvCacheSpec& cache)
      : spec_(spec), topology_(widths_of(spec), shape_of(spec)) {
    std::vector<LocalComm> stage = LocalComm::create_group(topology_.stage_size());
    std::vector<std::vector<LocalComm>> kvp;
    for (int tpa_rank = 0; tpa_rank < spec.tpa; ++tpa_rank) kvp.push_back(LocalComm::create_group(spec.kvp));
    for (int rank = 0; rank < topology_.stage_size(); ++rank) {
      const auto at = topology_.stage_coordinates(rank);
      ranks_.push_back(std::make_unique<Rank>(
          stage[static_cast<std::size_t>(rank)],
          kvp[static_cast<std::size_t>(at.tpa_rank)][static_cast<std::size_t>(at.kvp_rank)], topology_,
          cache));
    }
  }

  const Topology& topology() const { return topology_; }
  int size() const { return topology_.stage_size(); }
  Cache& cache(int rank) { return ranks_[static_cast<std::size_t>(rank)]->cache; }
  CpuBackend& backend(int rank) { return ranks_[static_cast<std::size_t>(rank)]->backend; }
  Stream& stream(int rank) { return ranks_[static_cast<std::size_t>(rank)]->stream; }

  /// The same call on all ranks: all of them return, or throw, alike.
  std::optional<Failure> on_all(const std::function<void(Cache&, Stream&)>& act) {
    std::optional<Failure> first;
    for (int rank = 0; rank < size(); ++rank) {
      const auto failure = failure_of([&] { act(cache(rank), stream(rank)); });
      if (rank == 0) first = failure;
      REQUIRE(failure == first);
    }
    return first;
  }

  SequenceId add(std::int64_t tokens = 0) {
    SequenceId id;
    REQUIRE_FALSE(on_all([&](Cache& cache, Stream&) { id = cache.add(tokens); }));
    return id;
  }

  void synchronize() {
    for (int rank = 0; rank < size(); ++rank) stream(rank).synchronize();
  }

 private:
  struct Rank {
    Rank(LocalComm stage, LocalComm kvp, const Topology& topology, const KvCacheSpec& spec)
        : backend(std::move(stage), std::move(kvp)),
          cache(backend, topology, spec),
          stream(backend.create_stream()) {
      // NaN in every format: what was never written must not be read.
      std::memset(cache.layer(0).k, 0xff, cache.capacity_bytes() / static_cast<std::size_t>(spec.layers));
    }
    CpuBackend backend;
    Cache cache;
    Stream stream;
  };

  StageSpec spec_;
  Topology topology_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

/// Element d of the K (or V) row of token `token` in one head of one layer: anything, different everywhere.
float element(std::int64_t token, std::int64_t layer, std::int64_t head, bool is_value, std::int64_t d) {
  const std::int64_t mix =
      (token * 7919 + layer * 104729 + head * 1299709 + (is_value ? 15485863 : 0) + d * 31) % 1000003;
  return static_cast<float>(mix % 2001 - 1000) / 97.0f;
}

float through_format(DType format, float value, float scale) {
  return helix::dispatch(format, [&]<class T>(T*) { return static_cast<float>(T(value / scale)) * scale; });
}

struct Scales {
  std::vector<float> k;
  std::vector<float> v;
};

float scale_at(const std::vector<float>& scales, std::int64_t layer, std::int64_t head,
               std::int64_t kv_heads) {
  if (scales.empty()) return 1.0f;
  if (scales.size() == 1) return scales.front();
  if (static_cast<std::int64_t>(scales.size()) == kv_heads) return scales[static_cast<std::size_t>(head)];
  return scales[static_cast<std::size_t>(layer * kv_heads + head)];
}

/// Writes tokens[first ..] of a sequence at those positions in every layer of every rank: each rank gets all
/// rows of its heads and keeps what it owns.
void write_tokens(Stage& stage, SequenceId id, const std::vector<std::int64_t>& tokens, std::int64_t first) {
  const auto count = static_cast<std::int64_t>(tokens.size()) - first;
  for (int rank = 0; rank < stage.size(); ++rank) {
    Cache& cache = stage.cache(rank);
    const KvView view = cache.layer(0);
    const helix::Range heads = stage.topology().kv_heads(rank);
    const std::int64_t v_dim = view.format.is_latent ? 0 : view.format.value_dim;
    for (int layer = 0; layer < cache.spec().layers; ++layer) {
      std::vector<float> k;
      std::vector<float> v;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t token = tokens[static_cast<std::size_t>(first + i)];
        for (std::int64_t h = heads.begin; h < heads.end; ++h) {
          for (std::int64_t d = 0; d < view.format.head_dim; ++d)
            k.push_back(element(token, layer, h, false, d));
          for (std::int64_t d = 0; d < v_dim; ++d) v.push_back(element(token, layer, h, true, d));
        }
      }
      cache.write(
          id, layer, first, TensorView<const float, 3>(k.data(), {count, heads.size(), view.format.head_dim}),
          TensorView<const float, 3>(v.data(), {view.format.is_latent ? 0 : count, heads.size(), v_dim}),
          stage.stream(rank));
      stage.stream(rank).synchronize();  // k and v end here
    }
  }
}

/// Every rank stores exactly the tokens it owns, with the right values in every layer, and all of them
/// together the sequence.
void check_contents(Stage& stage, SequenceId id, const std::vector<std::int64_t>& tokens) {
  std::vector<std::int64_t> copies(tokens.size(), 0);
  std::int64_t mistakes = 0;
  for (int rank = 0; rank < stage.size(); ++rank) {
    Cache& cache = stage.cache(rank);
    const KvCacheSpec& spec = cache.spec();
    const KvView view = cache.layer(0);
    const helix::Range heads = stage.topology().kv_heads(rank);
    const auto owned = owned_positions(static_cast<std::int64_t>(tokens.size()), view.layout.kvp(),
                                       spec.chunk, view.kvp_rank);
    const auto count = static_cast<std::int64_t>(owned.size());
    REQUIRE(cache.length(id) == static_cast<std::int64_t>(tokens.size()));
    REQUIRE(cache.local_length(id) == count);
    const std::int64_t v_dim = view.format.is_latent ? 0 : view.format.value_dim;
    std::vector<float> k(static_cast<std::size_t>(count * heads.size() * view.format.head_dim), -777.0f);
    std::vector<float> v(static_cast<std::size_t>(count * heads.size() * v_dim), -777.0f);
    const TensorView<float, 3> k_out(k.data(), {count, heads.size(), view.format.head_dim});
    const TensorView<float, 3> v_out(v.data(), {view.format.is_latent ? 0 : count, heads.size(), v_dim});
    for (int layer = 0; layer < spec.layers; ++layer) {
      cache.read(id, layer, {0, count}, k_out, v_out, stage.stream(rank));
      stage.stream(rank).synchronize();
      for (std::int64_t i = 0; i < count; ++i) {
        const auto position = static_cast<std::size_t>(owned[static_cast<std::size_t>(i)]);
        if (layer == 0) copies[position] += heads.size();
        for (std::int64_t h = heads.begin; h < heads.end; ++h) {
          const float k_scale = scale_at(spec.k_scales, layer, h, stage.topology().shape().num_kv_heads);
          const float v_scale = scale_at(spec.v_scales, layer, h, stage.topology().shape().num_kv_heads);
          for (std::int64_t d = 0; d < view.format.head_dim; ++d) {
            const float value = element(tokens[position], layer, h, false, d);
            mistakes += k_out(i, h - heads.begin, d) != through_format(spec.format, value, k_scale);
          }
          for (std::int64_t d = 0; d < v_dim; ++d) {
            const float value = element(tokens[position], layer, h, true, d);
            mistakes += v_out(i, h - heads.begin, d) != through_format(spec.format, value, v_scale);
          }
        }
      }
    }
    // The device's page table says what the ledger says.
    const auto pages = cache.ledger().pages(id, view.kvp_rank);
    REQUIRE(static_cast<std::int64_t>(pages.size()) == (count + spec.page_tokens - 1) / spec.page_tokens);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      mistakes += view.page_table[cache.slot(id) * view.max_pages + static_cast<std::int64_t>(i)] != pages[i];
    }
  }
  CHECK(mistakes == 0);
  const std::int64_t kv_heads = stage.topology().shape().num_kv_heads;
  CHECK(std::all_of(copies.begin(), copies.end(),
                    [&](std::int64_t n) { return n == kv_heads; }));  // invariant 11
}

/// All that an outside observer can tell about a ledger.
struct Snapshot {
  std::vector<std::int64_t> numbers;
  friend bool operator==(const Snapshot&, const Snapshot&) = default;
};

Snapshot snapshot_of(const PageLedger& ledger, const std::vector<SequenceId>& ids) {
  Snapshot snapshot;
  snapshot.numbers.push_back(ledger.num_sequences());
  for (std::int64_t rank = 0; rank < ledger.spec().layout.kvp(); ++rank) {
    snapshot.numbers.push_back(ledger.pages_free(rank));
    snapshot.numbers.push_back(ledger.pages_used(rank));
    for (const SequenceId id : ids) {
      const auto pages = ledger.pages(id, rank);
      snapshot.numbers.push_back(ledger.length(id));
      snapshot.numbers.push_back(ledger.reserved_tokens(id));
      snapshot.numbers.push_back(ledger.slot(id));
      snapshot.numbers.insert(snapshot.numbers.end(), pages.begin(), pages.end());
    }
  }
  return snapshot;
}

struct Tracked {
  SequenceId id;
  std::vector<std::int64_t> tokens;  // a unique number a token, kept by forks
};

}  // namespace

TEST_CASE("random operations lose no token, store none twice and leak no page") {
  struct Config {
    StageSpec stage;
    DType format;
    std::int64_t chunk;
    std::int64_t page_tokens;
    Scales scales;
  };
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
      {{.kvp = 8, .tpa = 1, .is_mla = true, .head_dim = 9, .value_dim = 7}, DType::f16, 3, 1, {}}};
  std::uint32_t seed = 1000;
  for (const Config& config : configs) {
    ++seed;
    CAPTURE(seed, config.stage.kvp, config.stage.tpa, config.chunk, config.page_tokens, config.stage.is_mla);
    std::mt19937 random(seed);
    const auto below = [&](std::int64_t n) {
      return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
    };
    KvCacheSpec spec;
    spec.format = config.format;
    spec.layers = 2;
    spec.page_tokens = config.page_tokens;
    spec.chunk = config.chunk;
    spec.max_sequences = 5;
    spec.max_tokens = 400;
    spec.pages =
        PageLedger::pages_needed(KvLayout(config.stage.kvp, spec.chunk), spec.page_tokens, 400, 0) + 3;
    spec.k_scales = config.scales.k;
    spec.v_scales = config.scales.v;
    Stage stage(config.stage, spec);
    std::vector<Tracked> live;
    std::vector<SequenceId> dead;
    std::int64_t next_token = 0;
    int num_exhausted = 0;
    int num_forks = 0;

    const auto ids = [&] {
      std::vector<SequenceId> all;
      for (const Tracked& sequence : live) all.push_back(sequence.id);
      return all;
    };
    // Runs `act` on all ranks. If they run out (all alike), nothing has changed.
    const auto attempt = [&](const std::function<void(Cache&, Stream&)>& act) {
      std::vector<Snapshot> before;
      for (int rank = 0; rank < stage.size(); ++rank)
        before.push_back(snapshot_of(stage.cache(rank).ledger(), ids()));
      const auto failure = stage.on_all(act);
      if (!failure) return true;
      CAPTURE(failure->what);
      REQUIRE(failure->code == ErrorCode::capacity);
      ++num_exhausted;
      for (int rank = 0; rank < stage.size(); ++rank) {
        REQUIRE(snapshot_of(stage.cache(rank).ledger(), ids()) == before[static_cast<std::size_t>(rank)]);
      }
      return false;
    };

    for (int step = 0; step < 120; ++step) {
      CAPTURE(step);
      const std::int64_t action = below(100);
      if (live.empty() || action < 12) {
        SequenceId id;
        if (attempt([&](Cache& cache, Stream&) { id = cache.add(step % 3 == 0 ? 20 : 0); }))
          live.push_back({id, {}});
      } else if (action < 45) {  // one batch step of some of the sequences
        std::vector<SequenceId> step_ids;
        std::vector<std::int64_t> counts;
        std::vector<std::size_t> indices;
        for (std::size_t i = 0; i < live.size(); ++i) {
          if (below(3) == 0) continue;
          step_ids.push_back(live[i].id);
          counts.push_back(below(4) == 0 ? below(60) : below(5));
          indices.push_back(i);
        }
        if (attempt([&](Cache& cache, Stream& stream) { cache.append(step_ids, counts, stream); })) {
          for (std::size_t i = 0; i < indices.size(); ++i) {
            Tracked& sequence = live[indices[i]];
            const auto first = static_cast<std::int64_t>(sequence.tokens.size());
            for (std::int64_t n = 0; n < counts[i]; ++n) sequence.tokens.push_back(next_token++);
            write_tokens(stage, sequence.id, sequence.tokens, first);
          }
        }
      } else if (action < 60) {
        Tracked& sequence = live[static_cast<std::size_t>(below(static_cast<std::int64_t>(live.size())))];
        const std::int64_t length = below(static_cast<std::int64_t>(sequence.tokens.size()) + 1);
        REQUIRE(attempt([&](Cache& cache, Stream&) { cache.truncate(sequence.id, length); }));
        sequence.tokens.resize(static_cast<std::size_t>(length));
      } else if (action < 78) {
        const Tracked parent = live[static_cast<std::size_t>(below(static_cast<std::int64_t>(live.size())))];
        const std::int64_t prefix = below(static_cast<std::int64_t>(parent.tokens.size()) + 1);
        SequenceId child;
        if (attempt([&](Cache& cache, Stream& stream) { child = cache.fork(parent.id, prefix, stream); })) {
          ++num_forks;
          live.push_back({child, parent.tokens});
          live.back().tokens.resize(static_cast<std::size_t>(prefix));
        }
      } else if (action < 86) {
        const Tracked& sequence =
            live[static_cast<std::size_t>(below(static_cast<std::int64_t>(live.size())))];
        const std::int64_t total = below(500);
        attempt([&](Cache& cache, Stream&) { cache.reserve(sequence.id, total); });
      } else if (action < 96) {
        const auto victim = static_cast<std::size_t>(below(static_cast<std::int64_t>(live.size())));
        REQUIRE(attempt([&](Cache& cache, Stream&) { cache.release(live[victim].id); }));
        dead.push_back(live[victim].id);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(victim));
      } else if (!dead.empty()) {
        const SequenceId id = dead[static_cast<std::size_t>(below(static_cast<std::int64_t>(dead.size())))];
        const auto failure = stage.on_all([&](Cache& cache, Stream&) { cache.release(id); });
        REQUIRE(failure);
        REQUIRE(failure->code == ErrorCode::invalid_argument);
      }
      if (step % 4 == 3) {
        for (const Tracked& sequence : live) check_contents(stage, sequence.id, sequence.tokens);
      }
    }
    for (const Tracked& sequence : live) check_contents(stage, sequence.id, sequence.tokens);
    for (const Tracked& sequence : live) {
      REQUIRE_FALSE(stage.on_all([&](Cache& cache, Stream&) { cache.release(sequence.id); }));
    }
    for (int rank = 0; rank < stage.size(); ++rank) {
      CHECK(stage.cache(rank).pages_free() == spec.pages);
      CHECK(stage.cache(rank).pages_used() == 0);
      CHECK(stage.cache(rank).allocated_bytes() == 0);
      CHECK(stage.cache(rank).ledger().num_sequences() == 0);
    }
    CHECK(num_exhausted > 0);
    CHECK(num_forks > 0);
  }
}

TEST_CASE("ledgers of all ranks agree under random operations, and no page has two owners") {
  for (std::uint32_t seed = 1; seed <= 24; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto below = [&](std::int64_t n) {
      return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
    };
    const std::int64_t kvp = 1 + below(8);
    PageLedgerSpec spec;
    spec.layout = KvLayout(kvp, 1 + below(20));
    spec.page_tokens = 1 + below(20);
    spec.pages = 20 + below(40);
    spec.max_sequences = 8;
    std::vector<PageLedger> ledgers;
    for (std::int64_t rank = 0; rank < kvp; ++rank) ledgers.emplace_back(spec, rank);
    CAPTURE(kvp, spec.layout.chunk(), spec.page_tokens, spec.pages);

    struct Live {
      SequenceId id;
      std::int64_t length = 0;
      std::int64_t reserved = 0;
    };
    std::vector<Live> live;
    const auto on_all = [&](const std::function<void(PageLedger&)>& act) {
      std::optional<Failure> first;
      for (std::int64_t rank = 0; rank < kvp; ++rank) {
        const auto failure = failure_of([&] { act(ledgers[static_cast<std::size_t>(rank)]); });
        if (rank == 0) first = failure;
        REQUIRE(failure == first);
      }
      if (first) REQUIRE(first->code == ErrorCode::capacity);
      return !first.has_value();
    };
    for (int step = 0; step < 400; ++step) {
      CAPTURE(step);
      const std::int64_t action = below(10);
      const std::int64_t pool_tokens = spec.pages * spec.page_tokens * kvp;
      Live* const one = live.empty()
                            ? nullptr
                            : &live[static_cast<std::size_t>(below(static_cast<std::int64_t>(live.size())))];
      if (one == nullptr || action == 0) {
        Live added;
        added.reserved = below(pool_tokens / 4);
        if (on_all([&](PageLedger& l) { added.id = l.add(added.reserved); })) live.push_back(added);
      } else if (action < 4) {
        const std::int64_t count = below(pool_tokens / 6);
        const bool must_fit = one->length + count <= one->reserved;
        const bool fits = on_all([&](PageLedger& l) { l.append({&one->id, 1}, {&count, 1}); });
        if (must_fit) REQUIRE(fits);  // a reservation is a promise
        if (fits) one->length += count;
      } else if (action < 6) {
        one->length = below(one->length + 1);
        REQUIRE(on_all([&](PageLedger& l) { l.truncate(one->id, one->length); }));
        const std::int64_t reserved = ledgers.front().reserved_tokens(one->id);
        REQUIRE((reserved == one->reserved || reserved == 0));
        one->reserved = reserved;
      } else if (action < 8) {
        Live child;
        child.length = below(one->length + 1);
        if (on_all([&](PageLedger& l) { child.id = l.fork(one->id, child.length); })) live.push_back(child);
      } else if (action == 8) {
        const std::int64_t total = below(pool_tokens);
        if (on_all([&](PageLedger& l) { l.reserve(one->id, total); }) && total > one->length) {
          one->reserved = std::max(one->reserved, total);
        }
      } else {
        REQUIRE(on_all([&](PageLedger& l) { l.release(one->id); }));
        live.erase(live.begin() + (one - live.data()));
      }

      std::vector<SequenceId> ids;
      for (const Live& sequence : live) ids.push_back(sequence.id);
      const Snapshot first = snapshot_of(ledgers.front(), ids);
      for (const PageLedger& ledger : ledgers) REQUIRE(snapshot_of(ledger, ids) == first);
      for (std::int64_t rank = 0; rank < kvp; ++rank) {
        std::set<std::int32_t> used;
        for (const Live& sequence : live) {
          const auto pages = ledgers.front().pages(sequence.id, rank);
          const std::int64_t local = owned_count(sequence.length, kvp, spec.layout.chunk(), rank);
          REQUIRE(static_cast<std::int64_t>(pages.size()) ==
                  (local + spec.page_tokens - 1) / spec.page_tokens);
          const std::set<std::int32_t> distinct(pages.begin(), pages.end());
          REQUIRE(distinct.size() == pages.size());
          for (const std::int32_t page : pages) REQUIRE((page >= 0 && page < spec.pages));
          used.insert(distinct.begin(), distinct.end());
        }
        REQUIRE(static_cast<std::int64_t>(used.size()) == ledgers.front().pages_used(rank));
        REQUIRE(ledgers.front().pages_free(rank) >= 0);
      }
    }
    for (const Live& sequence : live) on_all([&](PageLedger& l) { l.release(sequence.id); });
    for (const PageLedger& ledger : ledgers) {
      for (std::int64_t rank = 0; rank < kvp; ++rank) CHECK(ledger.pages_free(rank) == spec.pages);
    }
  }
}

TEST_CASE("exhaustion on one rank throws on all of them, with the numbers, and changes nothing") {
  // Chunk 4, KVP 2, pages of 4: 12 tokens take two pages on rank 0 and one on rank 1.
  KvCacheSpec spec;
  spec.format = DType::f32;
  spec.layers = 1;
  spec.page_tokens = 4;
  spec.chunk = 4;
  spec.pages = 3;
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
  // A batch is all or nothing, although its first sequence would fit.
  const std::vector<std::int64_t> counts{4, 9};
  CHECK(stage.on_all([&](Cache& cache, Stream& stream) { cache.append(both, counts, stream); }));
  CHECK(stage.on_all([&](Cache& cache, Stream&) { cache.reserve(b, 9); }));
  CHECK(stage.on_all([&](Cache& cache, Stream&) { cache.add(9); }));
  CHECK(stage.on_all([&](Cache& cache, Stream& stream) { cache.append(b, 101, stream); })->what ==
        "append: a sequence of 101 tokens exceeds max_tokens 100 of the KV cache; build it with a larger "
        "max_tokens");
  CHECK(stage.on_all([&](Cache& cache, Stream&) { cache.reserve(b, 101); })->code == ErrorCode::capacity);
  CHECK(stage.on_all([&](Cache& cache, Stream&) { cache.add(101); })->code == ErrorCode::capacity);
  for (int rank = 0; rank < 2; ++rank) CHECK(snapshot_of(stage.cache(rank).ledger(), both) == before);

  const SequenceId c = stage.add();
  const auto slots = stage.on_all([&](Cache& cache, Stream&) { cache.add(); });
  REQUIRE(slots);
  CHECK(contains(slots->what, "all 3 sequences of the KV cache are in use"));
  CHECK(stage.on_all([&](Cache& cache, Stream& stream) { cache.fork(a, 0, stream); })->code ==
        ErrorCode::capacity);
  REQUIRE_FALSE(stage.on_all([&](Cache& cache, Stream&) { cache.release(c); }));
  // The fork shares 8 of 12 tokens (one page on each rank) and copies a page on rank 0: it fits once, not
  // twice.
  SequenceId child;
  REQUIRE_FALSE(stage.on_all([&](Cache& cache, Stream& stream) { child = cache.fork(a, 12, stream); }));
  CHECK(stage.cache(0).pages_free() == 0);
  CHECK(stage.cache(1).pages_free() == 2);
  REQUIRE_FALSE(stage.on_all([&](Cache& cache, Stream&) { cache.release(b); }));
  CHECK(contains(stage.on_all([&](Cache& cache, Stream& stream) { cache.fork(a, 12, stream); })->what,
                 "fork needs 1 more pages on kvp_rank 0"));
}

TEST_CASE("a reservation keeps its pages from others and shrinks as the sequence grows into it") {
  PageLedgerSpec spec;
  spec.layout = KvLayout(2, 2);
  spec.page_tokens = 2;
  spec.pages = 5;
  PageLedger ledger(spec, 0);
  const SequenceId a = ledger.add(12);  // 6 local tokens a rank: 3 pages
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
  // Truncation puts pages back into the reservation, not into the pool.
  ledger.truncate(a, 3);
  CHECK(ledger.reserved_tokens(a) == 12);
  CHECK(ledger.pages_free(0) == 0);
  CHECK(ledger.pages_used(0) == 3);
  append(a, 9);
  ledger.reserve(a, 5);  // less than there is: nothing
  CHECK(ledger.pages_used(0) == 5);
  ledger.release(a);
  CHECK(ledger.pages_free(0) == 3);
}

TEST_CASE(
    "a fork that is truncated into its shared prefix and grows again leaves its parent intact, and the "
    "reverse") {
  for (const bool is_parent_cut : {false, true}) {
    for (const std::int64_t cut : {0, 1, 3, 4, 7, 8, 11, 13, 31, 32, 33, 40}) {
      CAPTURE(is_parent_cut, cut);
      KvCacheSpec spec;
      spec.format = DType::f32;
      spec.layers = 2;
      spec.page_tokens = 4;
      spec.chunk = 2;
      spec.pages = 40;
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

TEST_CASE("writing into a page that another sequence shares is refused") {
  KvCacheSpec spec;
  spec.format = DType::f32;
  spec.layers = 1;
  spec.page_tokens = 4;
  spec.chunk = 4;
  spec.pages = 10;
  Stage stage({.kvp = 2, .kv_heads = 1}, spec);
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
  CHECK_THROWS_WITH(write(parent, 0, 1), Catch::Contains("another sequence shares"));
  CHECK_THROWS_AS(write(child, 15, 2), Error);
  CHECK_NOTHROW(write(child, 16, 4));
  CHECK_NOTHROW(write(child, 3, 0));
  cache.release(child);
  CHECK_NOTHROW(write(parent, 0, 20));
  stream.synchronize();
}

TEST_CASE("ids that are stale, foreign or made up are refused everywhere") {
  KvCacheSpec spec;
  spec.format = DType::f32;
  spec.layers = 1;
  spec.pages = 4;
  spec.max_sequences = 2;
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
  const SequenceId foreign = other.add();
  SequenceId far = live;
  far.slot = 2;
  SequenceId future = live;
  ++future.generation;
  SequenceId unused = live;
  unused.slot = 1;
  for (const SequenceId id : {SequenceId{}, released, foreign, far, future, unused}) {
    CAPTURE(id.cache, id.slot, id.generation);
    const TensorView<const float, 3> none(nullptr, {0, 1, 8});
    const TensorView<float, 3> none_out(nullptr, {0, 1, 8});
    const std::vector<std::function<void()>> calls{[&] { cache.release(id); },
                                                   [&] { cache.reserve(id, 1); },
                                                   [&] { cache.append(id, 1, stream); },
                                                   [&] { cache.truncate(id, 0); },
                                                   [&] { cache.fork(id, 0, stream); },
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

TEST_CASE("calls whose arguments contradict each other are refused and change nothing") {
  KvCacheSpec spec;
  spec.format = DType::f32;
  spec.layers = 2;
  spec.pages = 4;
  spec.page_tokens = 4;
  Stage stage({.kv_heads = 2}, spec);
  Cache& cache = stage.cache(0);
  Stream& stream = stage.stream(0);
  const SequenceId a = cache.add();
  const SequenceId b = cache.add();
  cache.append(a, 6, stream);
  const Snapshot before = snapshot_of(cache.ledger(), {a, b});
  std::vector<float> rows(6 * 2 * 8);
  const auto view = [&](std::int64_t n, std::int64_t h, std::int64_t d) {
    return TensorView<const float, 3>(rows.data(), {n, h, d});
  };
  const auto out = [&](std::int64_t n, std::int64_t h, std::int64_t d) {
    return TensorView<float, 3>(rows.data(), {n, h, d});
  };
  const std::vector<SequenceId> twice{a, b, a};
  const std::vector<std::int64_t> three{1, 1, 1};
  const std::vector<std::int64_t> two{1, 1};
  const std::vector<std::int64_t> negative{1, -1};
  const std::vector<std::int64_t> huge{1, std::numeric_limits<std::int64_t>::max()};
  const std::vector<std::function<void()>> calls{
      [&] { cache.append(twice, three, stream); },
      [&] { cache.append(twice, two, stream); },
      [&] { cache.append(std::span(twice).first(2), negative, stream); },
      [&] { cache.append(std::span(twice).first(2), huge, stream); },
      [&] { cache.append(a, -1, stream); },
      [&] { cache.add(-1); },
      [&] { cache.reserve(a, -1); },
      [&] { cache.truncate(a, 7); },
      [&] { cache.truncate(a, -1); },
      [&] { cache.fork(a, 7, stream); },
      [&] { cache.fork(a, -1, stream); },
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
      [&] { (void)cache.layer(2); },
      [&] { (void)cache.ledger().pages(a, 1); }};
  for (std::size_t i = 0; i < calls.size(); ++i) {
    CAPTURE(i);
    const auto failure = failure_of(calls[i]);
    REQUIRE(failure);
    CHECK(failure->code == ErrorCode::invalid_argument);
    CHECK(snapshot_of(cache.ledger(), {a, b}) == before);
  }
  stream.synchronize();
}

TEST_CASE("bad cache sizes fail at construction") {
  KvCacheSpec good;
  good.format = DType::fp8_e4m3;
  good.layers = 2;
  good.pages = 4;
  const StageSpec gqa{.kv_heads = 3};
  const auto refused = [&](const char* part, const std::function<void(KvCacheSpec&)>& spoil,
                           StageSpec stage_spec) {
    KvCacheSpec spec = good;
    spoil(spec);
    const auto failure = failure_of([&] { Stage(stage_spec, spec); });
    INFO(part);
    REQUIRE(failure);
    CAPTURE(failure->what);
    CHECK(contains(failure->what, part));
  };
  REQUIRE_FALSE(failure_of([&] { Stage(gqa, good); }));
  refused(
      "layers is 0", [](KvCacheSpec& s) { s.layers = 0; }, gqa);
  refused(
      "pages is 0", [](KvCacheSpec& s) { s.pages = 0; }, gqa);
  refused(
      "page_tokens is 0", [](KvCacheSpec& s) { s.page_tokens = 0; }, gqa);
  refused(
      "chunk is 0", [](KvCacheSpec& s) { s.chunk = 0; }, gqa);
  refused(
      "max_sequences is -1", [](KvCacheSpec& s) { s.max_sequences = -1; }, gqa);
  refused(
      "max_tokens is -1", [](KvCacheSpec& s) { s.max_tokens = -1; }, gqa);
  refused(
      "pages is 9223372036854775807",
      [](KvCacheSpec& s) { s.pages = std::numeric_limits<std::int64_t>::max(); }, gqa);
  refused(
      "format is no DType", [](KvCacheSpec& s) { s.format = static_cast<DType>(99); }, gqa);
  refused(
      "2 k_scales; give 1, one for each of the 3 KV heads, or 2 * 3",
      [](KvCacheSpec& s) {
        s.k_scales = {1, 2};
      },
      gqa);
  refused(
      "v_scales hold 0", [](KvCacheSpec& s) { s.v_scales = {0}; }, gqa);
  refused(
      "only fp8_e4m3 is scaled",
      [](KvCacheSpec& s) {
        s.k_scales = {1};
        s.format = DType::bf16;
      },
      gqa);
  refused("give k_scales only", [](KvCacheSpec& s) { s.v_scales = {1}; },
          {.is_mla = true, .head_dim = 9, .value_dim = 7});
  refused("value_dim 9 exceeds head_dim 8", [](KvCacheSpec&) {},
          {.kv_heads = 1, .head_dim = 8, .value_dim = 9});

  const Topology topology(widths_of({.kvp = 2, .kv_heads = 1}), shape_of({.kvp = 2, .kv_heads = 1}));
  CpuBackend alone;
  CHECK(contains(failure_of([&] { Cache(alone, topology, good); })->what,
                 "the stage communicator has 1 ranks but the topology 2"));
  CpuBackend crossed(LocalComm::create_group(2)[1], LocalComm::create_group(2)[0]);
  CHECK(contains(failure_of([&] { Cache(crossed, topology, good); })->what,
                 "places stage_rank 1 at kvp_rank 1 of 2"));
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
    spec.format = DType::bf16;
    spec.layers = 3;
    spec.page_tokens = 16;
    spec.chunk = grid.chunk;
    spec.pages = 100;
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
      // Invariant 11: a rank's share is 1/N, within a page a sequence and the whole cache's own rounding.
      const std::size_t share = whole.cache(0).allocated_bytes() / static_cast<std::size_t>(stage.size());
      const std::size_t mine = stage.cache(rank).allocated_bytes();
      CHECK(mine <=
            share + (stage.cache(rank).page_bytes() + grid.stage.kvp * stage.cache(rank).page_bytes()) *
                        lengths.size());
    }
    const std::size_t one = whole.cache(0).allocated_bytes();
    CHECK(sum + whole.cache(0).page_bytes() * lengths.size() >= one);
    CHECK(sum <= one + slack);
    // The pool for exactly these lengths.
    CHECK(PageLedger::pages_needed(KvLayout(grid.stage.kvp, grid.chunk), 16, lengths) ==
          stage.cache(0).pages_used());
    for (int rank = 0; rank < stage.size(); ++rank)
      CHECK(stage.cache(rank).pages_used() <= stage.cache(0).pages_used());
  }
}

TEST_CASE("the default max_tokens is what fits into the pages") {
  for (const auto& [kvp, chunk, page, pages] : {std::tuple{1, 1, 1, 1}, std::tuple{4, 16, 64, 3},
                                                std::tuple{3, 7, 4, 5}, std::tuple{2, 100, 16, 3}}) {
    CAPTURE(kvp, chunk, page, pages);
    PageLedger ledger({.layout = KvLayout(kvp, chunk), .page_tokens = page, .pages = pages}, 0);
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

TEST_CASE("addresses of a layer never change, and layers do not overlap") {
  KvCacheSpec spec;
  spec.format = DType::fp8_e4m3;
  spec.layers = 3;
  spec.page_tokens = 3;
  spec.pages = 5;
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

/// The CPU backend, counting copies to the device.
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
  // Rows of 4 KiB: 16 of them are the most that one copy spans.
  constexpr std::int64_t kMaxPages = 1024;
  constexpr std::int64_t kPageTokens = 2;
  constexpr std::int64_t kSequences = 40;
  KvCacheSpec spec;
  spec.layers = 1;
  spec.page_tokens = kPageTokens;
  spec.pages = 400;
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

  /// Copies that growing the sequences took. The device's table then names each live sequence's pages.
  const auto grow = [&](const std::vector<std::size_t>& which, std::int64_t tokens) {
    std::vector<SequenceId> ids;
    for (const std::size_t i : which) ids.push_back(live[i]);
    backend.sizes.clear();
    cache.append(ids, std::vector<std::int64_t>(ids.size(), tokens), stream);
    stream.synchronize();
    for (const SequenceId& id : live) {
      const auto pages = cache.ledger().pages(id, 0);
      REQUIRE(std::equal(pages.begin(), pages.end(), kv.page_table + id.slot * kMaxPages));
    }
    return backend.sizes;
  };
  using Sizes = std::vector<std::size_t>;
  constexpr std::size_t kRow = kMaxPages * sizeof(std::int32_t);
  CHECK(grow({3}, 1) == Sizes{4});   // its first page
  CHECK(grow({3}, 1) == Sizes{});    // fits
  CHECK(grow({3}, 5) == Sizes{12});  // three pages
  CHECK(grow({4, 5, 9}, 1) == Sizes{5 * kRow + 4});
  CHECK(grow({9, 4, 5}, 1) == Sizes{});
  CHECK(grow({9, 3, 4}, 3) == Sizes{6 * kRow - 4});  // row 3 from its fifth entry, 9 up to its third
  CHECK(grow({20, 36}, 2) == Sizes{4, 4});           // 64 KiB and an entry
  CHECK(grow({20, 35, 36}, 2) == Sizes{4, 4, 4});
  CHECK(grow({21, 36}, 4) == Sizes{15 * kRow + 16});  // row 36 up to its fourth

  // Truncated and grown again, with the rows of others rewritten between: nothing stale comes back.
  std::mt19937 random(5);
  for (int step = 0; step < 200; ++step) {
    CAPTURE(step);
    const std::size_t at = random() % live.size();
    if (step % 3 == 0) {
      cache.truncate(live[at], cache.length(live[at]) / 2);
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

TEST_CASE("partial reads return the asked rows through any strides") {
  KvCacheSpec spec;
  spec.format = DType::f32;
  spec.layers = 1;
  spec.page_tokens = 3;
  spec.chunk = 2;
  spec.pages = 20;
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
  for (const DType format : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
    for (const bool is_mla : {false, true}) {
      CAPTURE(std::string(helix::to_string(format)), is_mla);
      KvCacheSpec spec;
      spec.format = format;
      spec.layers = 2;
      spec.page_tokens = 4;
      spec.chunk = 3;
      spec.pages = 30;
      if (format == DType::fp8_e4m3) spec.k_scales = {0.3f};
      if (format == DType::fp8_e4m3 && !is_mla) spec.v_scales = {1.7f};
      const StageSpec sizes = is_mla ? StageSpec{.kvp = 2, .is_mla = true, .head_dim = 9, .value_dim = 7}
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
        // The batch: bystander's token, then the tokens of `stepped`, then padding in its last place.
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
