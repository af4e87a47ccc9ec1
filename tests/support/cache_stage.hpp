// SPDX-License-Identifier: Apache-2.0
// The caches of a whole stage in one thread, filled with tokens whose elements are all known.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>
#include <helix/error.hpp>
#include <helix/page_ledger.hpp>
#include <helix/sharded_kv_cache.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"

namespace helix::test::cache {

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
using helix::test::Failure;
using helix::test::failure_of;
using CpuBackend = helix::cpu::Backend<LocalComm>;
using Cache = helix::ShardedKVCache<CpuBackend>;

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct StageSpec {
  int kvp = 1;
  int tpa = 1;
  bool is_mla = false;
  std::int64_t kv_heads = 1;
  std::int64_t head_dim = 8;
  std::int64_t value_dim = 8;
};

inline ModelShape shape_of(const StageSpec& spec) {
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

inline TopologySpec widths_of(const StageSpec& spec) {
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

  /// Makes the same call on all ranks. All of them must return, or all must throw the same error.
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
      // NaN in every format, because memory that was never written must not be read.
      std::memset(cache.layer(0).k, 0xff, cache.capacity_bytes() / static_cast<std::size_t>(spec.num_layers));
    }
    CpuBackend backend;
    Cache cache;
    Stream stream;
  };

  StageSpec spec_;
  Topology topology_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

/// Everything that an outside observer can tell about a ledger.
struct Snapshot {
  std::vector<std::int64_t> numbers;
  friend bool operator==(const Snapshot&, const Snapshot&) = default;
};

inline Snapshot snapshot_of(const PageLedger& ledger, const std::vector<SequenceId>& ids) {
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

}  // namespace helix::test::cache
