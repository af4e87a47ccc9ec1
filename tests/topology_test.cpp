// SPDX-License-Identifier: Apache-2.0
// Topology: groups and ranges compared with published rows and brute force, and the errors for bad
// configurations.
#include <algorithm>
#include <functional>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <helix/error.hpp>
#include <helix/job_comms.hpp>
#include <helix/topology.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"

namespace {

using helix::Error;
using helix::ErrorCode;
using helix::ModelShape;
using helix::Range;
using helix::RankCoordinates;
using helix::RankGroup;
using helix::Topology;
using helix::TopologySpec;

ModelShape dense_shape(std::int64_t query_heads, std::int64_t kv_heads) {
  ModelShape shape;
  shape.num_query_heads = query_heads;
  shape.num_kv_heads = kv_heads;
  shape.head_dim = 128;
  shape.value_dim = 128;
  shape.hidden = 1024;
  shape.ffn = 5760;  // divisible by all N up to 10 and by 16
  shape.vocab = 1000;
  shape.num_layers = 13;
  return shape;
}

ModelShape moe_shape(std::int64_t query_heads, std::int64_t kv_heads, std::int64_t experts) {
  ModelShape shape = dense_shape(query_heads, kv_heads);
  shape.moe = helix::MoeShape{.num_experts = experts, .expert_ffn = 720, .shared_ffn = 1440};
  return shape;
}

ModelShape mla_shape() {
  ModelShape shape = moe_shape(128, 1, 256);
  shape.head_dim = 576;
  shape.value_dim = 512;
  shape.hidden = 7168;
  shape.ffn = 18432;
  shape.moe->expert_ffn = 2048;
  shape.moe->shared_ffn = 2048;
  shape.num_layers = 61;
  shape.vocab = 129280;
  shape.mla = helix::MlaShape{.q_lora_rank = 1536,
                              .kv_lora_rank = 512,
                              .qk_nope_head_dim = 128,
                              .qk_rope_head_dim = 64,
                              .v_head_dim = 128};
  return shape;
}

TopologySpec widths(int kvp, int tpa, int tpf = 0, int ep = 1, int pp = 1, int dp = 1) {
  TopologySpec spec;
  spec.kvp = kvp;
  spec.tpa = tpa;
  spec.tpf = tpf;
  spec.ep = ep;
  spec.pp = pp;
  spec.dp = dp;
  return spec;
}

std::string error_of(const std::function<void()>& act, ErrorCode code = ErrorCode::invalid_topology) {
  try {
    act();
  } catch (const Error& error) {
    CHECK(error.code() == code);
    return error.what();
  }
  FAIL("no Error was thrown");
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The rules of section "legal configurations", written a second time without the library.
bool legal_by_hand(const ModelShape& s, int kvp, int tpa, int tpf, int ep) {
  const int n = kvp * tpa;
  if (n != tpf * ep || s.num_query_heads % n != 0 || tpa > s.num_kv_heads || s.num_kv_heads % tpa != 0)
    return false;
  if (s.is_mla() && tpa != 1) return false;
  if (s.ffn % n != 0 || s.shared_ffn() % n != 0) return false;
  if (s.num_experts() == 0) return ep == 1;
  return s.num_experts() % ep == 0 && s.expert_ffn() % tpf == 0;
}

/// Checks that each element of [0, total) lies in exactly `copies` of the ranges.
void check_partition(const std::vector<Range>& ranges, std::int64_t total, int copies,
                     const std::string& what) {
  std::vector<int> seen(static_cast<std::size_t>(total), 0);
  for (const Range& range : ranges) {
    REQUIRE(range.begin >= 0);
    REQUIRE(range.begin <= range.end);
    REQUIRE(range.end <= total);
    for (std::int64_t i = range.begin; i < range.end; ++i) ++seen[static_cast<std::size_t>(i)];
  }
  INFO(what);
  CHECK(std::all_of(seen.begin(), seen.end(), [&](int count) { return count == copies; }));
}

std::vector<Range> of_all_ranks(const Topology& topology, Range (Topology::*range)(int) const) {
  std::vector<Range> ranges;
  for (int rank = 0; rank < topology.stage_size(); ++rank) ranges.push_back((topology.*range)(rank));
  return ranges;
}

}  // namespace

TEST_CASE("published groups of TPA 2, PP 2 are reproduced") {
  {
    const Topology topology(widths(2, 2, 0, 1, 2), dense_shape(16, 8), 8);
    CHECK(topology.group(RankGroup::tpa, 3) == std::vector<int>{2, 3});
    CHECK(topology.group(RankGroup::kvp, 3) == std::vector<int>{1, 3});
    CHECK(topology.group(RankGroup::pipeline, 3) == std::vector<int>{3, 7});
  }
  {
    const Topology topology(widths(4, 2, 0, 1, 2), dense_shape(16, 8), 16);
    CHECK(topology.group(RankGroup::tpa, 9) == std::vector<int>{8, 9});
    CHECK(topology.group(RankGroup::kvp, 9) == std::vector<int>{9, 11, 13, 15});
    CHECK(topology.group(RankGroup::pipeline, 9) == std::vector<int>{1, 9});
  }
}

TEST_CASE("published groups of KVP 2, TPA 4 are reproduced") {
  const Topology topology(widths(2, 4), dense_shape(32, 8), 8);
  for (int rank = 0; rank < 8; ++rank) {
    CAPTURE(rank);
    CHECK(topology.group(RankGroup::tpa, rank) ==
          (rank < 4 ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{4, 5, 6, 7}));
    CHECK(topology.group(RankGroup::kvp, rank) == std::vector<int>{rank % 4, rank % 4 + 4});
  }
}

TEST_CASE("heads after the exchange are TPA-major, small case by hand") {
  // KVP 2, TPA 2, 8 query heads: TPA rank 0 attends to heads 0-3, which its KVP ranks then divide.
  const Topology topology(widths(2, 2), dense_shape(8, 2));
  const std::vector<Range> attended{{0, 4}, {4, 8}, {0, 4}, {4, 8}};
  const std::vector<Range> combined{{0, 2}, {4, 6}, {2, 4}, {6, 8}};
  const std::vector<int> head_shards{0, 2, 1, 3};
  for (int rank = 0; rank < 4; ++rank) {
    CAPTURE(rank);
    const auto i = static_cast<std::size_t>(rank);
    CHECK(topology.query_heads(rank) == attended[i]);
    CHECK(topology.combined_heads(rank) == combined[i]);
    CHECK(topology.stage_coordinates(rank).head_shard == head_shards[i]);
    CHECK(topology.output_projection_columns(rank, 128) ==
          Range{combined[i].begin * 128, combined[i].end * 128});
  }
  // Sharding W_o by stage_rank would differ: this is the mistake that invariant 1 describes.
  CHECK_FALSE(topology.combined_heads(1) == Range{2, 4});
}

TEST_CASE("ranges of every legal topology partition the model") {
  std::vector<ModelShape> shapes;
  for (std::int64_t kv_heads : {1, 2, 3, 4, 8}) {
    for (std::int64_t group : {1, 2, 4, 5}) {
      shapes.push_back(dense_shape(kv_heads * group, kv_heads));
      shapes.push_back(moe_shape(kv_heads * group, kv_heads, 12));
    }
  }
  shapes.push_back(mla_shape());
  int num_topologies = 0;
  for (const ModelShape& shape : shapes) {
    for (int n = 1; n <= 16; ++n) {
      for (const TopologySpec& spec : Topology::legal_topologies(shape, n)) {
        ++num_topologies;
        CAPTURE(shape.num_query_heads, shape.num_kv_heads, spec.kvp, spec.tpa, spec.tpf, spec.ep);
        const Topology topology(spec, shape);
        check_partition(of_all_ranks(topology, &Topology::query_heads), shape.num_query_heads, spec.kvp,
                        "queries");
        check_partition(of_all_ranks(topology, &Topology::combined_heads), shape.num_query_heads, 1,
                        "combined");
        check_partition(of_all_ranks(topology, &Topology::kv_heads), shape.num_kv_heads, spec.kvp,
                        "KV heads");
        check_partition(of_all_ranks(topology, &Topology::ffn), shape.ffn, 1, "ffn");
        check_partition(of_all_ranks(topology, &Topology::shared_expert_ffn), shape.shared_ffn(), 1,
                        "shared");
        check_partition(of_all_ranks(topology, &Topology::vocab), shape.vocab, 1, "vocabulary");
        check_partition(of_all_ranks(topology, &Topology::experts), shape.num_experts(), spec.tpf, "experts");
        check_partition(of_all_ranks(topology, &Topology::expert_ffn), shape.expert_ffn(), spec.ep,
                        "expert ffn");
        CHECK(topology.kv_copies() == 1);
        // Every pair of an expert and one of its columns occurs once.
        std::set<std::pair<std::int64_t, std::int64_t>> cells;
        std::int64_t num_cells = 0;
        const std::int64_t group = shape.num_query_heads / shape.num_kv_heads;
        std::vector<Range> w_o_columns;
        for (int rank = 0; rank < n; ++rank) {
          const RankCoordinates at = topology.stage_coordinates(rank);
          for (std::int64_t e = topology.experts(rank).begin; e < topology.experts(rank).end; ++e) {
            cells.emplace(e, topology.expert_ffn(rank).begin);
            ++num_cells;
          }
          // The formulas of invariant 1. Also, every query head of the rank finds its KV head on the same
          // rank.
          CHECK(rank == at.kvp_rank * spec.tpa + at.tpa_rank);
          CHECK(rank == at.ep_rank * spec.tpf + at.tpf_rank);
          const std::int64_t first =
              at.tpa_rank * shape.num_query_heads / spec.tpa + at.kvp_rank * shape.num_query_heads / n;
          CHECK(topology.combined_heads(rank) == Range{first, first + shape.num_query_heads / n});
          CHECK(topology.query_heads(rank).begin / group == topology.kv_heads(rank).begin);
          CHECK((topology.query_heads(rank).end - 1) / group == topology.kv_heads(rank).end - 1);
          CHECK(topology.combined_heads(rank).begin >= topology.query_heads(rank).begin);
          CHECK(topology.combined_heads(rank).end <= topology.query_heads(rank).end);
          w_o_columns.push_back(topology.output_projection_columns(rank, 3));
        }
        CHECK(num_cells == shape.num_experts() * spec.tpf);
        CHECK(static_cast<std::int64_t>(cells.size()) == num_cells);
        check_partition(w_o_columns, shape.num_query_heads * 3, 1, "columns of W_o");
      }
    }
  }
  CHECK(num_topologies > 200);
}

TEST_CASE("legal topologies are exactly those that the rules allow") {
  for (const ModelShape& shape : {dense_shape(16, 8), dense_shape(12, 3), dense_shape(5, 5),
                                  moe_shape(16, 4, 8), moe_shape(32, 8, 6), mla_shape()}) {
    for (int n = 1; n <= 24; ++n) {
      std::vector<std::tuple<int, int, int, int>> expected;
      for (int tpa = 1; tpa <= n; ++tpa) {
        for (int ep = 1; ep <= n; ++ep) {
          if (n % tpa != 0 || n % ep != 0) continue;
          if (legal_by_hand(shape, n / tpa, tpa, n / ep, ep)) expected.emplace_back(n / tpa, tpa, n / ep, ep);
        }
      }
      std::vector<std::tuple<int, int, int, int>> found;
      for (const TopologySpec& spec : Topology::legal_topologies(shape, n)) {
        found.emplace_back(spec.kvp, spec.tpa, spec.tpf, spec.ep);
        CHECK(spec.pp == 1);
        CHECK(spec.dp == 1);
      }
      CAPTURE(shape.num_query_heads, shape.num_kv_heads, n);
      CHECK(found == expected);
    }
  }
}

TEST_CASE("the constructor accepts a spec exactly when the rules allow it") {
  for (const ModelShape& shape : {dense_shape(16, 8), moe_shape(12, 6, 6), mla_shape()}) {
    for (int kvp = 1; kvp <= 5; ++kvp) {
      for (int tpa = 1; tpa <= 9; ++tpa) {
        for (int tpf = 1; tpf <= 12; ++tpf) {
          for (int ep = 1; ep <= 4; ++ep) {
            const bool legal = Topology::violations(widths(kvp, tpa, tpf, ep), shape).empty();
            CAPTURE(kvp, tpa, tpf, ep, shape.num_query_heads, shape.num_kv_heads);
            CHECK(legal == legal_by_hand(shape, kvp, tpa, tpf, ep));
          }
        }
      }
    }
  }
}

TEST_CASE("groups under PP and DP partition the world and agree with the coordinates") {
  for (const TopologySpec& spec : {widths(1, 1), widths(2, 2, 0, 1, 3, 2), widths(4, 2, 2, 4, 2, 3),
                                   widths(1, 4, 2, 2, 1, 2), widths(6, 1, 3, 2, 13, 1)}) {
    const Topology topology(spec, moe_shape(24, 4, 12), spec.kvp * spec.tpa * spec.pp * spec.dp);
    const int world = topology.world_size();
    std::vector<RankCoordinates> at;
    std::set<std::tuple<int, int, int, int>> places;
    for (int rank = 0; rank < world; ++rank) {
      at.push_back(topology.coordinates(rank));
      const RankCoordinates& c = at.back();
      CHECK(c.world_rank == rank);
      CHECK(rank == (c.replica * spec.pp + c.stage) * topology.stage_size() + c.stage_rank);
      CHECK(c.head_shard == c.tpa_rank * spec.kvp + c.kvp_rank);
      places.emplace(c.replica, c.stage, c.kvp_rank, c.tpa_rank);
    }
    CHECK(places.size() == static_cast<std::size_t>(world));

    struct Kind {
      const char* name;
      RankGroup group;
      std::function<bool(const RankCoordinates&, const RankCoordinates&)> same;
      std::function<int(const RankCoordinates&)> position;
      int size;
    };
    const auto same_stage = [](const RankCoordinates& a, const RankCoordinates& b) {
      return a.replica == b.replica && a.stage == b.stage;
    };
    const std::vector<Kind> kinds{
        {"stage", RankGroup::stage, same_stage, [](const auto& c) { return c.stage_rank; },
         topology.stage_size()},
        {"kvp", RankGroup::kvp,
         [&](const auto& a, const auto& b) { return same_stage(a, b) && a.tpa_rank == b.tpa_rank; },
         [](const auto& c) { return c.kvp_rank; }, topology.kvp()},
        {"tpa", RankGroup::tpa,
         [&](const auto& a, const auto& b) { return same_stage(a, b) && a.kvp_rank == b.kvp_rank; },
         [](const auto& c) { return c.tpa_rank; }, topology.tpa()},
        {"tpf", RankGroup::tpf,
         [&](const auto& a, const auto& b) { return same_stage(a, b) && a.ep_rank == b.ep_rank; },
         [](const auto& c) { return c.tpf_rank; }, topology.tpf()},
        {"ep", RankGroup::ep,
         [&](const auto& a, const auto& b) { return same_stage(a, b) && a.tpf_rank == b.tpf_rank; },
         [](const auto& c) { return c.ep_rank; }, topology.ep()},
        {"pipeline", RankGroup::pipeline,
         [](const auto& a, const auto& b) { return a.replica == b.replica && a.stage_rank == b.stage_rank; },
         [](const auto& c) { return c.stage; }, topology.pp()},
        {"replica", RankGroup::replica, [](const auto& a, const auto& b) { return a.replica == b.replica; },
         [&](const auto& c) { return c.stage * topology.stage_size() + c.stage_rank; },
         topology.pp() * topology.stage_size()},
        {"data", RankGroup::data,
         [](const auto& a, const auto& b) { return a.stage == b.stage && a.stage_rank == b.stage_rank; },
         [](const auto& c) { return c.replica; }, topology.dp()}};
    for (const Kind& kind : kinds) {
      for (const RankCoordinates& self : at) {
        std::vector<int> expected(static_cast<std::size_t>(kind.size), -1);
        for (const RankCoordinates& other : at) {
          if (kind.same(self, other))
            expected.at(static_cast<std::size_t>(kind.position(other))) = other.world_rank;
        }
        CAPTURE(kind.name, self.world_rank);
        CHECK(topology.group(kind.group, self.world_rank) == expected);
      }
    }
    std::vector<Range> layers;
    for (int stage = 0; stage < spec.pp; ++stage) layers.push_back(topology.layers(stage));
    check_partition(layers, topology.shape().num_layers, 1, "layers");
  }
}

TEST_CASE("uneven FFN parts differ by one and cover everything") {
  ModelShape shape = moe_shape(16, 8, 8);
  shape.ffn = 1001;
  shape.moe->expert_ffn = 13;
  shape.moe->shared_ffn = 3;
  TopologySpec spec = widths(2, 4, 4, 2);
  CHECK(Topology::violations(spec, shape).size() == 3);
  spec.allow_uneven_ffn = true;
  const Topology topology(spec, shape);
  check_partition(of_all_ranks(topology, &Topology::ffn), 1001, 1, "ffn");
  check_partition(of_all_ranks(topology, &Topology::shared_expert_ffn), 3, 1, "shared");
  check_partition(of_all_ranks(topology, &Topology::expert_ffn), 13, 2, "expert");
  for (int rank = 0; rank < 8; ++rank) {
    CHECK((topology.ffn(rank).size() == 125 || topology.ffn(rank).size() == 126));
    CHECK((topology.expert_ffn(rank).size() == 3 || topology.expert_ffn(rank).size() == 4));
    CHECK(topology.shared_expert_ffn(rank).size() == (rank < 3 ? 1 : 0));
  }
}

TEST_CASE("split_evenly by hand") {
  static_assert(helix::split_evenly(10, 4, 0) == Range{0, 3});
  static_assert(helix::split_evenly(10, 4, 1) == Range{3, 6});
  static_assert(helix::split_evenly(10, 4, 2) == Range{6, 8});
  static_assert(helix::split_evenly(10, 4, 3) == Range{8, 10});
  static_assert(helix::split_evenly(2, 4, 3) == Range{2, 2});
  static_assert(helix::split_evenly(0, 4, 0) == Range{0, 0});
  SUCCEED();
}

TEST_CASE("a vocabulary smaller than the stage leaves ranks without a row") {
  ModelShape shape = dense_shape(16, 8);
  shape.vocab = 5;
  const Topology topology(widths(2, 4), shape);
  check_partition(of_all_ranks(topology, &Topology::vocab), 5, 1, "vocabulary");
  CHECK(topology.vocab(7).size() == 0);
}

TEST_CASE(
    "duplicated KV heads are legal only on request, and each rank stores the head that its queries read") {
  const ModelShape shape = dense_shape(32, 4);
  TopologySpec spec = widths(2, 8);
  const std::string refusal = error_of([&] { Topology(spec, shape); });
  CHECK(contains(refusal, "TPA 8 exceeds the 4 KV heads"));
  CHECK(contains(refusal, "allow_kv_duplication"));
  spec.allow_kv_duplication = true;
  const Topology topology(spec, shape);
  CHECK(topology.kv_copies() == 2);
  CHECK(contains(topology.to_string(), "stored 2 times"));
  check_partition(of_all_ranks(topology, &Topology::kv_heads), 4, 4, "KV heads");
  for (int rank = 0; rank < 16; ++rank) {
    CAPTURE(rank);
    CHECK(topology.kv_heads(rank).begin == rank % 8 / 2);
    CHECK(topology.kv_heads(rank).size() == 1);
    for (std::int64_t head = topology.query_heads(rank).begin; head < topology.query_heads(rank).end;
         ++head) {
      CHECK(topology.kv_heads(rank).begin == head / 8);
    }
  }
  spec.tpa = 6;
  spec.kvp = 1;
  CHECK(contains(error_of([&] { Topology(spec, dense_shape(24, 4)); }),
                 "TPA 6 is not a multiple of the 4 KV heads"));
  ModelShape mla = mla_shape();
  TopologySpec mla_spec = widths(1, 2);
  mla_spec.allow_kv_duplication = true;
  CHECK(contains(error_of([&] { Topology(mla_spec, mla); }), "TPA is 2 but MLA"));
}

TEST_CASE("an error lists every violated rule with its values") {
  ModelShape shape = moe_shape(16, 8, 8);
  shape.ffn = 1000;
  shape.moe->shared_ffn = 1001;
  shape.moe->expert_ffn = 101;
  TopologySpec spec = widths(3, 5, 7, 3, 14);
  spec.attn_dp = 2;
  const std::string what = error_of([&] { Topology(spec, shape, 17); });
  CAPTURE(what);
  for (const char* part :
       {"breaks 10 rules", "(1) ", "(10) ", "attn_dp is 2",
        "KVP 3 * TPA 5 = 15 differs from TPF 7 * EP 3 = 21", "num_kv_heads 8 is not a multiple of TPA 5",
        "num_query_heads 16 is not a multiple of N = KVP * TPA = 15",
        "ffn 1000 is not a multiple of N = KVP * TPA = 15", "shared_ffn 1001 is not a multiple of N",
        "expert_ffn 101 is not a multiple of TPF 7", "num_experts 8 is not a multiple of EP 3",
        "PP 14 exceeds num_layers 13", "the world has 17 ranks"}) {
    INFO(part);
    CHECK(contains(what, part));
  }
  CHECK(contains(what, "Nearest legal with N = 1: KVP 1 x TPA 1, TPF 1 x EP 1"));
}

TEST_CASE("an error names the nearest legal topologies") {
  SECTION("of the same number of ranks, the closest first") {
    const std::string what = error_of([] { Topology(widths(1, 8), dense_shape(16, 4)); });
    CAPTURE(what);
    CHECK(contains(
        what,
        "Nearest legal with N = 8: KVP 2 x TPA 4, TPF 8 x EP 1; KVP 4 x TPA 2, TPF 8 x EP 1; KVP 8 x "
        "TPA 1, TPF 8 x EP 1."));
  }
  SECTION("else of the nearest number of ranks") {
    const std::string what = error_of([] { Topology(widths(7, 1), dense_shape(16, 4)); });
    CAPTURE(what);
    CHECK(contains(what, "Nearest legal with N = 8: KVP 8 x TPA 1"));
  }
  SECTION("the smaller of two that are equally near") {
    const std::string what = error_of([] { Topology(widths(6, 1), dense_shape(16, 4)); });
    CAPTURE(what);
    CHECK(contains(what, "Nearest legal with N = 4: "));
  }
  SECTION("MLA") {
    const std::string what = error_of([] { Topology(widths(1, 8, 1, 8), mla_shape()); });
    CAPTURE(what);
    CHECK(contains(what, "TPA is 8 but MLA"));
    CHECK(contains(what, "Nearest legal with N = 8: KVP 8 x TPA 1, TPF 1 x EP 8"));
    CHECK(contains(what, "and 1 more"));
  }
  SECTION("not if the grid is legal and only the number of stages or replicas is wrong") {
    const auto ends_with = [](const TopologySpec& spec, int layers, const std::string& advice) {
      ModelShape shape = dense_shape(16, 4);
      shape.num_layers = layers;
      const std::string what = error_of([&] { Topology(spec, shape); });
      CAPTURE(what, advice);
      CHECK(what.ends_with(advice));
      CHECK_FALSE(contains(what, "Nearest legal"));
    };
    constexpr int kHuge = std::numeric_limits<int>::max();
    ends_with(widths(1, 1, 0, 1, 3), 2, ". Use PP at most 2.");
    ends_with(widths(2, 2, 0, 1, 3, 70000), 2, ". Use PP at most 2.");
    ends_with(widths(4, 4, 0, 1, kHuge), 0, ". Use PP at most 4096.");
    ends_with(widths(2, 2, 0, 1, 2, 8193), 2, ". Use DP at most 8192.");
    ends_with(widths(1, 1, 0, 1, 1, kHuge), 2, ". Use DP at most 65536.");
    ends_with(widths(1, 1, 0, 1, 0, 1), 2, "PP is 0; it must be at least 1");
    ends_with(widths(1, 1, 0, 1, 1, -2), 2, "DP is -2; it must be at least 1");
    TopologySpec spec = widths(2, 2);
    spec.attn_dp = 2;
    ends_with(spec, 2, "use 1");
  }
  SECTION("every suggestion is legal") {
    for (int kvp = 1; kvp <= 9; ++kvp) {
      for (int tpa = 1; tpa <= 9; ++tpa) {
        for (int ep : {1, 2, 3}) {
          const ModelShape shape = moe_shape(16, 4, 8);
          const TopologySpec spec = widths(kvp, tpa, 0, ep);
          if (Topology::violations(spec, shape).empty()) continue;
          const std::string what = error_of([&] { Topology(spec, shape); });
          const std::size_t at = what.find("Nearest legal with N = ");
          REQUIRE(at != std::string::npos);
          std::istringstream text(what.substr(what.find(':', at) + 1));
          std::string word;
          int k = 0, a = 0, f = 0, e = 0;
          char comma = 0;
          text >> word >> k >> word >> word >> a >> comma >> word >> f >> word >> word >> e;
          CAPTURE(what, k, a, f, e);
          CHECK(legal_by_hand(shape, k, a, f, e));
        }
      }
    }
  }
}

TEST_CASE("a world of another size is refused with the product") {
  const ModelShape shape = dense_shape(16, 8);
  CHECK_NOTHROW(Topology(widths(2, 2, 0, 1, 2, 3), shape, 24));
  CHECK(contains(error_of([&] { Topology(widths(2, 2, 0, 1, 2, 3), shape, 25); }), "the world has 25 ranks"));
  CHECK(error_of([&] { Topology(widths(2, 2, 0, 1, 2, 3), shape, 16); }).ends_with("set DP to 2"));
  for (const int world : {0, -4}) {
    const std::string what = error_of([&] { Topology(widths(2, 2), shape, world); });
    CAPTURE(what);
    CHECK(contains(what, "the world has " + std::to_string(world) + " ranks"));
    CHECK(what.ends_with("start DP * PP * N ranks, or change the widths"));
  }
}

TEST_CASE("absent parts of a model have no rules") {
  ModelShape shape = dense_shape(16, 8);
  shape.ffn = 0;
  shape.vocab = 0;
  shape.num_layers = 0;
  const Topology topology(widths(2, 8), shape);
  CHECK(topology.ffn(3).size() == 0);
  CHECK(topology.vocab(3).size() == 0);
  CHECK(topology.experts(3).size() == 0);
  CHECK(topology.layers(0).size() == 0);
  CHECK(contains(error_of([&] { Topology(widths(2, 4, 4, 2), shape); }),
                 "EP is 2 but the model has no routed experts"));
}

TEST_CASE("absurd sizes are refused at once, never searched or overflowed") {
  const ModelShape good = dense_shape(16, 8);
  constexpr int kHuge = std::numeric_limits<int>::max();
  for (const TopologySpec& spec :
       {widths(1000000, 1), widths(1, 1000000), widths(kHuge, kHuge),
        widths(kHuge, kHuge, kHuge, kHuge, kHuge, kHuge), widths(1, 1, 1, 1, kHuge, kHuge), widths(0, 1),
        widths(-3, 2), widths(2, 0), widths(2, 2, -4, 1), widths(2, 2, 4, 0), widths(2, 2, 0, -1),
        widths(2, 2, 0, 1, 0), widths(2, 2, 0, 1, 1, -2), widths(2, 2, 0, 3),
        widths(std::numeric_limits<int>::min(), std::numeric_limits<int>::min())}) {
    CAPTURE(spec.kvp, spec.tpa, spec.tpf, spec.ep, spec.pp, spec.dp);
    TopologySpec grid = spec;
    grid.pp = grid.dp = 1;
    const bool has_legal_grid = Topology::violations(grid, good).empty();
    CHECK(contains(error_of([&] { Topology(spec, good); }), "Nearest legal with N = ") != has_legal_grid);
    CHECK_THROWS_AS(Topology(spec, good, 4), Error);
  }
  const auto says = [&](const TopologySpec& spec, const char* words) {
    const std::string what = error_of([&] { Topology(spec, good); });
    CAPTURE(what);
    CHECK(contains(what, words));
  };
  says(widths(2, 2, -4, 1), "TPF is -4; it must be at least 1");
  says(widths(2, 2, 0, 3), "is not a multiple of EP 3, so no TPF gives TPF * EP == N");
  // 2^62 ranks a stage, whose product with PP overflows.
  says(widths(1 << 30, 1 << 30, 0, 1, 16), "exceeds 65536 ranks");
  says(widths(2, 2, 0, 1, 1 << 15), "exceeds 65536 ranks");
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  const std::int64_t smallest = std::numeric_limits<std::int64_t>::min();
  const auto refused = [&](const char* name, std::int64_t& (*size_of)(ModelShape&), std::int64_t value) {
    ModelShape shape = moe_shape(16, 8, 8);
    size_of(shape) = value;
    const std::string what = error_of([&] { Topology(widths(2, 2), shape); });
    CAPTURE(what);
    CHECK(contains(what, std::string("the model's ") + name + " is " + std::to_string(value)));
    CHECK(Topology::legal_topologies(shape, 4).empty());
  };
  for (const std::int64_t value : {smallest, std::int64_t{-1}, huge}) {
    refused(
        "num_query_heads", [](ModelShape& s) -> std::int64_t& { return s.num_query_heads; }, value);
    refused(
        "num_kv_heads", [](ModelShape& s) -> std::int64_t& { return s.num_kv_heads; }, value);
    refused(
        "head_dim", [](ModelShape& s) -> std::int64_t& { return s.head_dim; }, value);
    refused(
        "value_dim", [](ModelShape& s) -> std::int64_t& { return s.value_dim; }, value);
    refused(
        "hidden", [](ModelShape& s) -> std::int64_t& { return s.hidden; }, value);
    refused(
        "ffn", [](ModelShape& s) -> std::int64_t& { return s.ffn; }, value);
    refused(
        "expert_ffn", [](ModelShape& s) -> std::int64_t& { return s.moe->expert_ffn; }, value);
    refused(
        "shared_ffn", [](ModelShape& s) -> std::int64_t& { return s.moe->shared_ffn; }, value);
    refused(
        "num_experts", [](ModelShape& s) -> std::int64_t& { return s.moe->num_experts; }, value);
    refused(
        "vocab", [](ModelShape& s) -> std::int64_t& { return s.vocab; }, value);
    refused(
        "num_layers", [](ModelShape& s) -> std::int64_t& { return s.num_layers; }, value);
    refused(
        "top_k", [](ModelShape& s) -> std::int64_t& { return s.moe->top_k; }, value);
    refused(
        "first_dense_layers", [](ModelShape& s) -> std::int64_t& { return s.moe->first_dense_layers; },
        value);
    refused(
        "layer_stride", [](ModelShape& s) -> std::int64_t& { return s.moe->layer_stride; }, value);
    refused(
        "q_lora_rank", [](ModelShape& s) -> std::int64_t& { return s.mla.emplace().q_lora_rank; }, value);
    refused(
        "kv_lora_rank", [](ModelShape& s) -> std::int64_t& { return s.mla.emplace().kv_lora_rank; }, value);
    refused(
        "qk_nope_head_dim", [](ModelShape& s) -> std::int64_t& { return s.mla.emplace().qk_nope_head_dim; },
        value);
    refused(
        "qk_rope_head_dim", [](ModelShape& s) -> std::int64_t& { return s.mla.emplace().qk_rope_head_dim; },
        value);
    refused(
        "v_head_dim", [](ModelShape& s) -> std::int64_t& { return s.mla.emplace().v_head_dim; }, value);
  }
  refused(
      "num_query_heads", [](ModelShape& s) -> std::int64_t& { return s.num_query_heads; }, 0);
  refused(
      "num_kv_heads", [](ModelShape& s) -> std::int64_t& { return s.num_kv_heads; }, 0);
  refused(
      "head_dim", [](ModelShape& s) -> std::int64_t& { return s.head_dim; }, 0);
  refused(
      "hidden", [](ModelShape& s) -> std::int64_t& { return s.hidden; }, 0);

  ModelShape uneven_groups = dense_shape(12, 8);
  CHECK(contains(error_of([&] { Topology(widths(1, 1), uneven_groups); }),
                 "12 is not a multiple of its num_kv_heads 8"));
  ModelShape hollow = moe_shape(16, 8, 8);
  hollow.moe->expert_ffn = 0;
  CHECK(contains(error_of([&] { Topology(widths(1, 1), hollow); }), "8 experts but expert_ffn is 0"));
  ModelShape few_experts = moe_shape(16, 8, 8);
  few_experts.moe->top_k = 9;
  CHECK(contains(error_of([&] { Topology(widths(1, 1), few_experts); }), "top_k is 9; it has 8 experts"));
  few_experts.moe->top_k = 8;
  CHECK_NOTHROW(Topology(widths(1, 1), few_experts));
  ModelShape widest = moe_shape(16, 8, 8);
  widest.hidden = helix::kMaxWidth;
  CHECK_NOTHROW(Topology(widths(1, 1), widest));
  ++widest.hidden;
  CHECK(
      contains(error_of([&] { Topology(widths(1, 1), widest); }), "hidden is 16777217; it must be in [1, "));
  // 2048 query heads of 2^19 + 2^19 columns are the most that a row may have.
  ModelShape long_rows = dense_shape(2048, 8);
  long_rows.head_dim = long_rows.value_dim = helix::kMaxRowElements / 2048 / 2;
  CHECK_NOTHROW(Topology(widths(1, 1), long_rows));
  ++long_rows.value_dim;
  CHECK(contains(error_of([&] { Topology(widths(1, 1), long_rows); }),
                 "is 2147485696; it must be at most 2147483648"));
  ModelShape endless = moe_shape(16, 8, 8);
  endless.moe->layer_stride = 0;
  CHECK(contains(error_of([&] { Topology(widths(1, 1), endless); }), "layer_stride is 0"));
  ModelShape other_latent = mla_shape();
  other_latent.mla->qk_rope_head_dim = 32;
  CHECK(contains(error_of([&] { Topology(widths(1, 1), other_latent); }),
                 "kv_lora_rank + qk_rope_head_dim = 544"));
  ModelShape other_value = mla_shape();
  other_value.value_dim = 256;
  CHECK(contains(error_of([&] { Topology(widths(1, 1), other_value); }), "value_dim 256; they must be"));
  ModelShape split_latent = mla_shape();
  split_latent.num_kv_heads = 2;
  CHECK(contains(error_of([&] { Topology(widths(1, 1), split_latent); }), "the latent is one KV head"));

  // Even the widest shape with the most divisors below the limit answers at once.
  ModelShape wide = moe_shape(720720, 720720, 720720);
  wide.ffn = 0;
  wide.moe->shared_ffn = 0;
  wide.moe->expert_ffn = 720720;
  CHECK(contains(error_of([&] { Topology(widths(719, 1001), wide); }), "Nearest legal with N = 65520"));
  CHECK(Topology::legal_topologies(good, 0).empty());
  CHECK(Topology::legal_topologies(good, -1).empty());
  CHECK(Topology::legal_topologies(good, kHuge).empty());
}

TEST_CASE("ranks and stages outside the topology are refused") {
  const Topology topology(widths(2, 2, 0, 1, 2), dense_shape(16, 8));
  for (int rank : {-1, 8, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()}) {
    CAPTURE(rank);
    CHECK(contains(error_of([&] { topology.coordinates(rank); }, ErrorCode::invalid_argument),
                   "outside [0, 8)"));
    CHECK_THROWS_AS(topology.group(RankGroup::kvp, rank), Error);
  }
  for (int rank : {-1, 4}) {
    CAPTURE(rank);
    CHECK(contains(error_of([&] { topology.stage_coordinates(rank); }, ErrorCode::invalid_argument),
                   "outside [0, 4)"));
    for (auto range :
         {&Topology::query_heads, &Topology::combined_heads, &Topology::kv_heads, &Topology::ffn,
          &Topology::shared_expert_ffn, &Topology::expert_ffn, &Topology::experts, &Topology::vocab}) {
      CHECK_THROWS_AS((topology.*range)(rank), Error);
    }
    CHECK_THROWS_AS(topology.output_projection_columns(rank, 1), Error);
  }
  CHECK_THROWS_AS(topology.layers(2), Error);
  CHECK_THROWS_AS(topology.layers(-1), Error);
}

namespace {

/// A communicator that only counts its splits; a real one would wait for its peers.
struct CountingComm {
  int ranks = 0;
  int* splits = nullptr;

  int rank() const { return 0; }
  int size() const { return ranks; }
  void abort(std::string_view) noexcept {}
  CountingComm split(int, int) {
    ++*splits;
    return *this;
  }
};

}  // namespace

TEST_CASE("a communicator of another size than the topology's is refused before anything is split") {
  const Topology topology(widths(2, 2, 0, 1, 3), dense_shape(8, 2));
  int splits = 0;
  const auto check_refused = [&](int ranks, const char* needed, const auto& split) {
    CountingComm comm{ranks, &splits};
    const auto failure = helix::test::failure_of([&] { split(comm, topology); });
    CAPTURE(ranks);
    REQUIRE(failure);
    CHECK(failure->code == ErrorCode::invalid_argument);
    CHECK(failure->says("has " + std::to_string(ranks) + " ranks; " + needed));
  };
  for (const int ranks : {1, 3, 5, 12})
    check_refused(ranks, "a stage of the topology has 4", helix::split_kvp<CountingComm>);
  for (const int ranks : {4, 11, 13})
    check_refused(ranks, "the topology has 12", helix::split_world<CountingComm>);
  CHECK(splits == 0);
  CountingComm stage{4, &splits};
  helix::split_kvp(stage, topology);
  CHECK(splits == 1);
}

TEST_CASE("the grid prints one line a rank, and tpf is filled in") {
  const Topology topology(widths(2, 2, 0, 2, 2, 2), moe_shape(16, 4, 8));
  CHECK(topology.tpf() == 2);
  CHECK(topology.spec().tpf == 2);
  const std::string text = topology.to_string();
  CAPTURE(text);
  CHECK(std::count(text.begin(), text.end(), '\n') == 2 + 4 + 4);
  CHECK(contains(text, "KVP 2 x TPA 2, TPF 2 x EP 2, PP 2, DP 2: 4 ranks a stage, 16 in the world"));
  CHECK(contains(text, "replica 1, stage 1: world ranks [12, 16), layers [7, 13)"));
  // All stages up to 64 are listed, of more only their number.
  ModelShape shape = dense_shape(16, 8);
  shape.num_layers = 65;
  CHECK_FALSE(contains(Topology(widths(1, 1, 0, 1, 64), shape).to_string(), "more"));
  CHECK(contains(Topology(widths(1, 1, 0, 1, 65), shape).to_string(),
                 "stage 63: world ranks [63, 64), layers [63, 64)\nand 1 more stages\n"));
}
