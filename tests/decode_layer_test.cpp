// SPDX-License-Identifier: Apache-2.0
// decode_layer compared with an unsharded layer in double precision, on every legal topology of up to eight
// ranks.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <helix/decode_layer.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"
#include "support/layer_fixture.hpp"
#include "support/oracle.hpp"
#include "support/ranks.hpp"
#include "support/recording_backend.hpp"
#include "support/reference_backend.hpp"
#include "support/sanitizers.hpp"
#include "support/worse.hpp"

namespace helix::test {
namespace {

using CpuBackend = cpu::Backend<cpu::LocalComm>;

/// Joins the shards of one sequence in global order: [tokens, Hkv, D] keys, followed by values (MLA: latent
/// rows). Also checks that each token is stored as often as the topology says, and that its copies are equal.
std::vector<float> gather_kv(const Topology& topo, const std::vector<RankResult>& ranks, std::size_t sequence,
                             std::int64_t num_tokens, std::int64_t chunk) {
  const ModelShape& shape = topo.shape();
  const KvLayout layout(topo.kvp(), chunk);
  const std::int64_t planes = shape.is_mla() ? 1 : 2;
  const std::int64_t plane = num_tokens * shape.num_kv_heads * shape.head_dim;
  std::vector<float> all(static_cast<std::size_t>(planes * plane));
  std::vector<int> copies(all.size(), 0);
  bool copies_agree = true;
  for (const RankResult& rank : ranks) {
    std::int64_t local_tokens = 0;
    for (std::int64_t p = 0; p < num_tokens; ++p) local_tokens += layout.owner(p) == rank.kvp_rank ? 1 : 0;
    const std::int64_t heads = rank.kv_heads.size();
    const std::vector<float>& shard = rank.kv[sequence];
    REQUIRE(static_cast<std::int64_t>(shard.size()) == planes * local_tokens * heads * shape.head_dim);
    std::size_t at = 0;
    for (std::int64_t which = 0; which < planes; ++which) {
      for (std::int64_t p = 0; p < num_tokens; ++p) {
        if (layout.owner(p) != rank.kvp_rank) continue;
        for (std::int64_t h = rank.kv_heads.begin; h < rank.kv_heads.end; ++h) {
          for (std::int64_t d = 0; d < shape.head_dim; ++d, ++at) {
            const auto to =
                static_cast<std::size_t>(which * plane + (p * shape.num_kv_heads + h) * shape.head_dim + d);
            if (copies[to]++ == 0) all[to] = shard[at];
            copies_agree = copies_agree && all[to] == shard[at];
          }
        }
      }
    }
  }
  CHECK(copies_agree);
  CHECK(std::all_of(copies.begin(), copies.end(), [&](int n) { return n == topo.kv_copies(); }));
  return all;
}

double kv_error(const oracle::History& history, const std::vector<float>& gathered, bool is_mla) {
  double worst = 0.0;
  const std::size_t planes = is_mla ? 1 : 2;
  for (std::size_t p = 0; p < history.rows.size(); ++p) {
    const std::size_t width = history.rows[p].size() / planes;
    for (std::size_t i = 0; i < history.rows[p].size(); ++i) {
      const std::size_t at = (i / width) * history.rows.size() * width + p * width + i % width;
      worst = worse(worst, std::abs(history.rows[p][i] - double{gathered[at]}));
    }
  }
  return worst;
}

/// Legal topologies of `stage_size` ranks that need `permissions`, or all that need none.
std::vector<TopologySpec> topologies(const ModelShape& shape, int stage_size,
                                     const TopologySpec& permissions) {
  if (!permissions.allow_kv_duplication && !permissions.allow_uneven_ffn)
    return Topology::legal_topologies(shape, stage_size);
  std::vector<TopologySpec> found;
  for (int tpa = 1; tpa <= stage_size; ++tpa) {
    for (int ep = 1; ep <= stage_size; ++ep) {
      if (stage_size % tpa != 0 || stage_size % ep != 0) continue;
      TopologySpec spec = permissions;
      spec.kvp = stage_size / tpa;
      spec.tpa = tpa;
      spec.ep = ep;
      TopologySpec strict = spec;
      strict.allow_kv_duplication = strict.allow_uneven_ffn = false;
      if (Topology::violations(spec, shape).empty() && !Topology::violations(strict, shape).empty())
        found.push_back(spec);
    }
  }
  return found;
}

/// Checks everything that must hold for one run on one topology.
void check_run(const Topology& topo, const oracle::Layer& layer, const Script& script,
               const Expected& expected, const std::vector<RankResult>& alone, LayerRunOptions options,
               std::initializer_list<int> slice_counts = {1, 2, 4}) {
  std::vector<RankResult> first;
  for (const int slices : slice_counts) {
    if (kIsSanitized && slices == 2) continue;  // too slow
    options.hop_b_slices = slices;
    CAPTURE(topo.kvp(), topo.tpa(), topo.tpf(), topo.ep(), options.chunk, slices);
    const std::vector<RankResult> ranks = run_script(topo, layer, script, options);
    CHECK(error_of(ranks.front(), expected) <= kLayerTolerance);
    for (const RankResult& rank : ranks) CHECK(rank.hidden == ranks.front().hidden);  // invariant 12
    if (first.empty()) {
      first = ranks;
      continue;
    }
    CHECK(ranks.front().hidden == first.front().hidden);  // slices must not change any bit
    for (std::size_t r = 0; r < ranks.size(); ++r) CHECK(ranks[r].kv == first[r].kv);
  }
  for (std::size_t b = 0; b < expected.histories.size(); ++b) {
    CAPTURE(topo.kvp(), topo.tpa(), options.chunk, b);
    const auto tokens = static_cast<std::int64_t>(expected.histories[b].rows.size());
    const std::vector<float> gathered = gather_kv(topo, first, b, tokens, options.chunk);
    CHECK(gathered == alone.front().kv[b]);
    CHECK(kv_error(expected.histories[b], gathered, topo.shape().is_mla()) <= 4 * kLayerTolerance);
  }
}

/// Checks the layer on all topologies of 1, 2, 4 and 8 ranks, with chunks of 1, 3 and 16 tokens and 1, 2 and
/// 4 slices.
void check_all_topologies(const LayerSpec& spec, TopologySpec permissions = {}) {
  const std::uint32_t seed = 20;
  const oracle::Layer layer = random_layer(spec, seed);
  const Script script = ragged_script(5, spec.hidden, seed + 1);
  const Expected expected = run_oracle(layer, script);
  // Otherwise f32 may legitimately choose other experts: use another seed.
  REQUIRE(expected.routing_margin > 1e-5);
  const ModelShape shape = shape_of(layer);
  const std::vector<RankResult> alone = run_script(Topology({}, shape), layer, script, {});
  int topologies_run = 0;
  for (const int stage_size : {1, 2, 4, 8}) {
    for (const TopologySpec& topology : topologies(shape, stage_size, permissions)) {
      const Topology topo(topology, shape);
      for (const std::int64_t chunk : {1, 3, 16}) {
        if (kIsSanitized && chunk != 3) continue;
        LayerRunOptions options;
        options.chunk = chunk;
        options.page_tokens = chunk == 3 ? 2 : 4;
        check_run(topo, layer, script, expected, alone, options);
      }
      ++topologies_run;
    }
  }
  CHECK(topologies_run >= 3);
}

TEST_CASE("Grouped-query attention equals the oracle on every legal topology") {
  check_all_topologies({});
}

TEST_CASE("Biases and head norms are applied once on every legal topology") {
  LayerSpec spec;
  spec.has_biases = true;
  spec.has_head_norms = true;
  check_all_topologies(spec);
}

TEST_CASE("Window, soft cap and sinks equal the oracle on every legal topology") {
  LayerSpec spec;
  spec.window = 5;
  spec.soft_cap = 1.5;
  spec.has_sinks = true;
  spec.rotary_dim = 8;
  spec.magnitude = 1.2;
  check_all_topologies(spec);
}

TEST_CASE("Multi-head attention equals the oracle on every legal topology") {
  LayerSpec spec;
  spec.kv_heads = 8;
  spec.is_interleaved = true;
  check_all_topologies(spec);
}

TEST_CASE("Multi-query attention equals the oracle on every legal topology") {
  LayerSpec spec;
  spec.kv_heads = 1;
  check_all_topologies(spec);
}

TEST_CASE("Latent attention equals its expanded form on every legal topology") {
  LayerSpec spec;
  spec.is_mla = true;
  spec.is_interleaved = true;
  spec.magnitude = 1.1;
  check_all_topologies(spec);
}

TEST_CASE("Latent attention without a query latent equals its expanded form on every legal topology") {
  LayerSpec spec;
  spec.is_mla = true;
  spec.q_lora = 0;
  check_all_topologies(spec);
}

TEST_CASE("Latent attention with biases, with and without a query latent, adds each once") {
  LayerSpec spec;
  spec.is_mla = true;
  spec.has_biases = true;
  check_all_topologies(spec);
  spec.q_lora = 0;
  check_all_topologies(spec);
}

TEST_CASE("Latents that begin and end between two vectors equal their expanded form") {
  LayerSpec spec;
  spec.is_mla = true;
  spec.q_lora = 21;
  check_all_topologies(spec);
}

TEST_CASE("DeepSeek-V2's mixture of experts equals the oracle on every TPF x EP grid") {
  check_all_topologies(LayerSpec::deepseek(false));
}

TEST_CASE("DeepSeek-V3's mixture of experts equals the oracle on every TPF x EP grid") {
  check_all_topologies(LayerSpec::deepseek(true));
}

TEST_CASE("A mixture without shared experts behind grouped-query attention equals the oracle") {
  LayerSpec spec;
  spec.experts = 8;
  spec.top_k = 2;
  spec.normalize = true;
  check_all_topologies(spec);
}

TEST_CASE("Uneven FFN parts, empty ones included, equal the oracle") {
  LayerSpec spec;
  spec.has_biases = true;
  spec.ffn = GENERATE(5, 27);  // 5: three of eight ranks have no part
  check_all_topologies(spec, {.allow_uneven_ffn = true});
}

TEST_CASE("Uneven experts and shared experts, empty ones included, equal the oracle") {
  LayerSpec spec = LayerSpec::deepseek(true);
  spec.shared_ffn = 3;
  spec.expert_ffn = 5;
  check_all_topologies(spec, {.allow_uneven_ffn = true});
}

TEST_CASE("Duplicated KV heads are stored TPA/Hkv times and equal the oracle") {
  LayerSpec spec;
  spec.kv_heads = GENERATE(1, 2);
  check_all_topologies(spec, {.allow_kv_duplication = true});
}

TEST_CASE("Batches of 1 to 64 sequences equal the oracle") {
  const std::int64_t sequences = GENERATE(1, 2, 7, 16, 32, 64);
  for (const bool is_moe : {false, true}) {
    const LayerSpec spec = is_moe ? LayerSpec::deepseek(true) : LayerSpec{};
    const oracle::Layer layer = random_layer(spec, 3);
    const Script script = ragged_script(sequences, spec.hidden, 4);
    const Expected expected = run_oracle(layer, script);
    REQUIRE(expected.routing_margin > 1e-5);
    const ModelShape shape = shape_of(layer);
    const std::vector<RankResult> alone = run_script(Topology({}, shape), layer, script, {});
    const Topology topo(is_moe ? TopologySpec{.kvp = 4, .ep = 2} : TopologySpec{.kvp = 2, .tpa = 2}, shape);
    CAPTURE(sequences, is_moe);
    check_run(topo, layer, script, expected, alone, {.chunk = 3}, {1, 4, 0});
  }
}

TEST_CASE("16-bit weights and KV keep ranks bit-identical and close to the oracle") {
  const LayerSpec spec;
  const oracle::Layer layer = random_layer(spec, 8);
  const Script script = ragged_script(4, spec.hidden, 9);
  const Expected expected = run_oracle(layer, script);
  const Topology topo({.kvp = 2, .tpa = 2}, shape_of(layer));
  const auto exact_weights = run_script(topo, layer, script, {.weight_dtype = DType::bf16});
  CHECK(error_of(exact_weights.front(), expected) <= kLayerTolerance);  // the weights are exact in bf16
  for (const DType dtype : {DType::bf16, DType::f16, DType::fp8_e4m3}) {
    CAPTURE(to_string(dtype));
    const auto ranks = run_script(topo, layer, script, {.kv_dtype = dtype});
    // Two to four times the errors of 2.3e-2, 1.2e-3 and 1.9e-4.
    const double most = dtype == DType::fp8_e4m3 ? 6e-2 : dtype == DType::bf16 ? 4e-3 : 8e-4;
    CHECK(error_of(ranks.front(), expected) <= most);
    CHECK(error_of(ranks.front(), expected) > 0.0);
    for (const RankResult& rank : ranks) CHECK(rank.hidden == ranks.front().hidden);
    const auto alone = run_script(Topology({}, shape_of(layer)), layer, script, {.kv_dtype = dtype});
    for (std::size_t b = 0; b < 4; ++b) {
      const auto tokens = static_cast<std::int64_t>(expected.histories[b].rows.size());
      CHECK(gather_kv(topo, ranks, b, tokens, 1) == alone.front().kv[b]);
    }
  }
}

TEMPLATE_TEST_CASE("Other models of Backend run the same layer", "", ReferenceBackend, RecordingBackend) {
  for (const bool is_moe : {false, true}) {
    const LayerSpec spec = is_moe ? LayerSpec::deepseek(true) : LayerSpec{};
    const oracle::Layer layer = random_layer(spec, 8);
    const Script script = ragged_script(4, spec.hidden, 9);
    const Expected expected = run_oracle(layer, script);
    const Topology topo(is_moe ? TopologySpec{.kvp = 4, .ep = 2} : TopologySpec{.kvp = 2, .tpa = 2},
                        shape_of(layer));
    const auto ranks = run_script<TestType>(topo, layer, script, {.hop_b_slices = 2});
    for (const RankResult& rank : ranks) {
      CHECK(error_of(rank, expected) <= kLayerTolerance);
      CHECK(rank.hidden == ranks.front().hidden);
    }
  }
}

// Negative control of invariant 1: with W_o's columns distributed by stage_rank, the tests above must fail.
TEST_CASE("W_o sharded by stage_rank is wrong exactly when KVP and TPA both exceed 1") {
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(3, layer.hidden, 9);
  const Expected expected = run_oracle(layer, script);
  const auto error = [&](TopologySpec spec) {
    const Topology topo(spec, shape_of(layer));
    return error_of(run_script(topo, layer, script, {.o_shard = OutputShard::by_stage_rank}).front(),
                    expected);
  };
  CHECK(error({.kvp = 4}) <= kLayerTolerance);
  CHECK(error({.tpa = 4}) <= kLayerTolerance);
  CHECK(error({.kvp = 2, .tpa = 2}) > 0.1);
}

TEST_CASE("A step without tokens changes nothing and later steps go on") {
  const oracle::Layer layer = random_layer({}, 8);
  Script script = ragged_script(3, layer.hidden, 9);
  Step idle;
  idle.counts = idle.rejected = {0, 0, 0};
  script.steps.insert(script.steps.begin() + 2, idle);
  script.steps.insert(script.steps.begin(), idle);
  const Expected expected = run_oracle(layer, script);
  for (const int slices : {0, 1, 3}) {
    const auto ranks =
        run_script(Topology({.kvp = 2, .tpa = 2}, shape_of(layer)), layer, script, {.hop_b_slices = slices});
    for (const RankResult& rank : ranks) CHECK(error_of(rank, expected) <= kLayerTolerance);
  }
  Script empty;  // no sequence
  empty.steps.push_back({});
  for (const RankResult& rank :
       run_script(Topology({.kvp = 2, .tpa = 2}, shape_of(layer)), layer, empty, {.hop_b_slices = 2}))
    CHECK(rank.hidden.front().empty());
}

namespace {

/// Notes what a layer says of the work before each of two operations.
struct HintedBackend : CpuBackend {
  using CpuBackend::CpuBackend;
  std::vector<bool> follow_layer;
  std::vector<bool> follow_prepare;

  void project_qkv(const ProjectQkvArgs<float>& args, Stream stream) {
    follow_layer.push_back(args.follows_layer);
    linear(args.linear, stream);
    prepare_qkv(*this, args.prepare, stream);
  }
  void partial_attention(const PartialAttentionArgs<float>& args, Stream stream) {
    follow_prepare.push_back(args.follows_prepare);
    CpuBackend::partial_attention(args, stream);
  }
};

}  // namespace

TEST_CASE("A projection follows a layer only if the caller says so, and attention follows its own append") {
  for (const bool is_mla : {false, true}) {
    LayerSpec spec;
    spec.is_mla = is_mla;
    const oracle::Layer layer = random_layer(spec, 8);
    const Script script = ragged_script(3, layer.hidden, 9);
    const Topology topo({}, shape_of(layer));
    run_ranks_or_throw(1, [&](cpu::LocalComm& comm) {
      auto backend = make_backend<HintedBackend>(topo, comm);
      LayerRank<HintedBackend> rank(backend, topo, layer, script, {});
      rank.prepare(script.steps[0]);
      DecodeLayerOptions<HintedBackend> options = rank.layer_options();
      for (const bool follows_layer : {true, false}) {
        options.follows_layer = follows_layer;
        decode_layer(backend, topo.rank_shape(0), rank.config(), rank.weights(), rank.cache().layer(0),
                     rank.batch().batch(), rank.hidden(), options, rank.stream());
      }
      backend.synchronize(rank.stream());
      CHECK(backend.follow_layer == (is_mla ? std::vector<bool>{} : std::vector<bool>{true, false}));
      CHECK(backend.follow_prepare == std::vector<bool>{true, true});
    });
  }
}

TEST_CASE("A layer that is given its normed input needs no workspace for it") {
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(3, layer.hidden, 9);
  const Expected expected = run_oracle(layer, script);
  const Topology topo({.kvp = 2, .tpa = 2}, shape_of(layer));
  run_ranks_or_throw(topo.stage_size(), [&](cpu::LocalComm& comm) {
    auto backend = make_backend<CpuBackend>(topo, comm);
    LayerRank<CpuBackend> rank(backend, topo, layer, script, {.hop_b_slices = 2});
    const RankShape shape = topo.rank_shape(comm.rank());
    RankResult result;
    for (const Step& step : script.steps) {
      rank.prepare(step);
      const TensorView<float, 2> hidden = rank.hidden();
      std::vector<float> normed(static_cast<std::size_t>(hidden.size()));
      DecodeLayerOptions<CpuBackend> options = rank.layer_options();
      options.normed = {normed.data(), hidden.extents()};
      backend.rms_norm(RmsNormArgs<float>{.delta = {},
                                          .residual = hidden,
                                          .weight = rank.weights().input_norm,
                                          .out = options.normed,
                                          .epsilon = rank.config().norm_epsilon},
                       rank.stream());
      const std::int64_t tokens = step.num_tokens();
      const std::size_t bytes = decode_layer_workspace_bytes(backend, shape, tokens, LayerInput::normed);
      const std::size_t saved = decode_layer_workspace_bytes(backend, shape, tokens) - bytes;
      if (saved < normed.size() * sizeof(float))
        throw Error(ErrorCode::internal, saved, " bytes of workspace saved");
      options.workspace = options.workspace.first(bytes);
      const auto launch = [&](const DecodeLayerOptions<CpuBackend>& with) {
        decode_layer(backend, shape, rank.config(), rank.weights(), rank.cache().layer(0),
                     rank.batch().batch(), hidden, with, rank.stream());
      };
      DecodeLayerOptions<CpuBackend> without = options;  // negative control
      without.normed = {};
      const auto failure = failure_of([&] { launch(without); });
      if (!failure || failure->code != ErrorCode::capacity)
        throw Error(ErrorCode::internal, "a workspace without room for the norm was accepted");
      launch(options);
      result.hidden.push_back(rank.finish(step));
    }
    if (error_of(result, expected) > kLayerTolerance)
      throw Error(ErrorCode::internal, "error is ", error_of(result, expected));
  });
}

}  // namespace
}  // namespace helix::test
