// SPDX-License-Identifier: Apache-2.0
// decode_layer against an unsharded layer in double precision, on every legal topology of up to eight ranks.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <helix/decode_layer.hpp>

#include "support/catch.hpp"
#include "support/layer_fixture.hpp"
#include "support/oracle.hpp"
#include "support/ranks.hpp"
#include "support/recording_backend.hpp"
#include "support/reference_backend.hpp"

namespace helix::test {
namespace {

using CpuBackend = cpu::Backend<cpu::LocalComm>;

// Instrumented threads are an order of magnitude slower: there the sweep takes one chunk size and two
// slicings.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kIsSanitized = true;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif
#else
constexpr bool kIsSanitized = false;
#endif

constexpr double kTolerance = 1e-5;  // f32, relative to the oracle's scale

/// Largest difference from the oracle over all steps, relative to its largest value. NaN gives infinity.
double error_of(const RankResult& result, const Expected& expected) {
  double worst = 0.0;
  double scale = 0.0;
  for (std::size_t s = 0; s < expected.hidden.size(); ++s) {
    if (result.hidden[s].size() != expected.hidden[s].size()) return HUGE_VAL;
    for (std::size_t i = 0; i < expected.hidden[s].size(); ++i) {
      const double difference = std::abs(expected.hidden[s][i] - double{result.hidden[s][i]});
      scale = std::max(scale, std::abs(expected.hidden[s][i]));
      worst = std::isnan(difference) ? HUGE_VAL : std::max(worst, difference);
    }
  }
  return worst / scale;
}

/// The shards of one sequence in global order, [tokens, Hkv, D] keys and, behind them, values (MLA: rows).
/// Checks on the way that each is stored as often as the topology says, and that copies are equal.
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
      worst = std::max(worst, std::abs(history.rows[p][i] - double{gathered[at]}));
    }
  }
  return worst;
}

/// Legal topologies of `stage_size` ranks that need `permissions`, or all without any.
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

/// Everything that must hold for one run on one topology.
void check_run(const Topology& topo, const oracle::Layer& layer, const Script& script,
               const Expected& expected, const std::vector<RankResult>& alone, LayerRunOptions options,
               std::initializer_list<int> slice_counts = {1, 2, 4}) {
  std::vector<RankResult> first;
  for (const int slices : slice_counts) {
    if (kIsSanitized && slices == 2) continue;
    options.hop_b_slices = slices;
    CAPTURE(topo.kvp(), topo.tpa(), topo.tpf(), topo.ep(), options.chunk, slices);
    const std::vector<RankResult> ranks = run_script(topo, layer, script, options);
    CHECK(error_of(ranks.front(), expected) <= kTolerance);
    for (const RankResult& rank : ranks) CHECK(rank.hidden == ranks.front().hidden);  // invariant 12
    if (first.empty()) {
      first = ranks;
      continue;
    }
    CHECK(ranks.front().hidden == first.front().hidden);  // slices change no bit
    for (std::size_t r = 0; r < ranks.size(); ++r) CHECK(ranks[r].kv == first[r].kv);
  }
  for (std::size_t b = 0; b < expected.histories.size(); ++b) {
    CAPTURE(topo.kvp(), topo.tpa(), options.chunk, b);
    const auto tokens = static_cast<std::int64_t>(expected.histories[b].rows.size());
    const std::vector<float> gathered = gather_kv(topo, first, b, tokens, options.chunk);
    CHECK(gathered == alone.front().kv[b]);
    CHECK(kv_error(expected.histories[b], gathered, topo.shape().is_mla()) <= 4 * kTolerance);
  }
}

/// The layer on all topologies of 1, 2, 4 and 8 ranks, chunks of 1, 3 and 16 tokens, 1, 2 and 4 slices.
void check_all_topologies(const LayerSpec& spec, TopologySpec permissions = {}) {
  const std::uint32_t seed = 20;
  const oracle::Layer layer = random_layer(spec, seed);
  const Script script = ragged_script(5, spec.hidden, seed + 1);
  const Expected expected = run_oracle(layer, script);
  REQUIRE(expected.routing_margin > 1e-5);  // else f32 may rightly choose other experts: take another seed
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

LayerSpec mla_moe_spec(bool is_v3) {
  LayerSpec spec;
  spec.is_mla = true;
  spec.is_interleaved = true;
  spec.add_deepseek_experts(is_v3);
  return spec;
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

TEST_CASE("DeepSeek-V2's mixture of experts equals the oracle on every TPF x EP grid") {
  check_all_topologies(mla_moe_spec(false));
}

TEST_CASE("DeepSeek-V3's mixture of experts equals the oracle on every TPF x EP grid") {
  check_all_topologies(mla_moe_spec(true));
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
  LayerSpec spec = mla_moe_spec(true);
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
    const LayerSpec spec = is_moe ? mla_moe_spec(true) : LayerSpec{};
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
  CHECK(error_of(exact_weights.front(), expected) <= kTolerance);  // the weights are exact in bf16
  for (const DType dtype : {DType::bf16, DType::f16, DType::fp8_e4m3}) {
    CAPTURE(to_string(dtype));
    const auto ranks = run_script(topo, layer, script, {.kv_dtype = dtype});
    CHECK(error_of(ranks.front(), expected) <= (dtype == DType::fp8_e4m3 ? 6e-2 : 1e-2));
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
    const LayerSpec spec = is_moe ? mla_moe_spec(true) : LayerSpec{};
    const oracle::Layer layer = random_layer(spec, 8);
    const Script script = ragged_script(4, spec.hidden, 9);
    const Expected expected = run_oracle(layer, script);
    const Topology topo(is_moe ? TopologySpec{.kvp = 4, .ep = 2} : TopologySpec{.kvp = 2, .tpa = 2},
                        shape_of(layer));
    const auto ranks = run_script<TestType>(topo, layer, script, {.hop_b_slices = 2});
    for (const RankResult& rank : ranks) {
      CHECK(error_of(rank, expected) <= kTolerance);
      CHECK(rank.hidden == ranks.front().hidden);
    }
  }
}

// Negative control of invariant 1: W_o's columns dealt out by stage_rank. The tests above must see it.
TEST_CASE("W_o sharded by stage_rank is wrong exactly when KVP and TPA both exceed 1") {
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(3, layer.hidden, 9);
  const Expected expected = run_oracle(layer, script);
  const auto error = [&](TopologySpec spec) {
    const Topology topo(spec, shape_of(layer));
    return error_of(run_script(topo, layer, script, {.o_shard = OutputShard::by_stage_rank}).front(),
                    expected);
  };
  CHECK(error({.kvp = 4}) <= kTolerance);
  CHECK(error({.tpa = 4}) <= kTolerance);
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
    for (const RankResult& rank : ranks) CHECK(error_of(rank, expected) <= kTolerance);
  }
  Script empty;  // no sequence at all
  empty.steps.push_back({});
  for (const RankResult& rank :
       run_script(Topology({.kvp = 2, .tpa = 2}, shape_of(layer)), layer, empty, {.hop_b_slices = 2}))
    CHECK(rank.hidden.front().empty());
}

// --- errors ---------------------------------------------------------------------------------------------

/// The arguments of one call, for a test to spoil.
struct Arguments {
  RankShape shape;
  LayerConfig config;
  LayerWeights weights;
  KvView kv;
  Batch batch;
  TensorView<float, 2> hidden;
  DecodeLayerOptions<CpuBackend> options;

  GqaWeights& gqa() { return std::get<GqaWeights>(weights.attention); }
  MlaWeights& mla() { return std::get<MlaWeights>(weights.attention); }
  DenseFfnWeights& dense() { return std::get<DenseFfnWeights>(weights.ffn); }
  MoeWeights& moe() { return std::get<MoeWeights>(weights.ffn); }
};

struct BadCall {
  std::string_view name;
  std::function<void(Arguments&)> spoil;
  ErrorCode code = ErrorCode::invalid_argument;
};

/// Every rank must throw `code` before it talks to another one: the good step that follows shows that they
/// are still in step.
void check_bad_calls(const LayerSpec& spec, TopologySpec topology, const std::vector<BadCall>& calls) {
  const oracle::Layer layer = random_layer(spec, 8);
  const Script script = ragged_script(3, layer.hidden, 9);
  const Expected expected = run_oracle(layer, script);
  const Topology topo(topology, shape_of(layer));
  const auto size = static_cast<std::size_t>(topo.stage_size());
  std::vector<RankResult> results(size);
  std::vector<std::vector<std::string>> surprises(size);
  run_ranks_or_throw(topo.stage_size(), [&](cpu::LocalComm& comm) {
    const auto me = static_cast<std::size_t>(comm.rank());
    auto backend = make_backend<CpuBackend>(topo, comm);
    LayerRank<CpuBackend> rank(backend, topo, layer, script, {.hop_b_slices = 2});
    rank.prepare(script.steps[0]);
    for (const BadCall& call : calls) {
      Arguments args{topo.rank_shape(comm.rank()), rank.config(), rank.weights(),      rank.cache().layer(0),
                     rank.batch().batch(),         rank.hidden(), rank.layer_options()};
      call.spoil(args);
      try {
        decode_layer(backend, args.shape, args.config, args.weights, args.kv, args.batch, args.hidden,
                     args.options, rank.stream());
        surprises[me].push_back(std::string(call.name) + ": accepted");
      } catch (const Error& error) {
        if (error.code() != call.code) surprises[me].push_back(std::string(call.name) + ": " + error.what());
      }
    }
    rank.launch();
    results[me].hidden.push_back(rank.finish(script.steps[0]));
    for (std::size_t s = 1; s < script.steps.size(); ++s)
      results[me].hidden.push_back(rank.run(script.steps[s]));
  });
  for (std::size_t r = 0; r < size; ++r) {
    CAPTURE(r);
    CHECK(surprises[r] == std::vector<std::string>{});
    CHECK(error_of(results[r], expected) <= kTolerance);
  }
}

TEST_CASE("Bad arguments are refused alike on every rank before any collective") {
  const auto fatter = [](WeightView& w) { w.cols += 1; };
  std::vector<BadCall> calls{
      {"shape of another rank", [](Arguments& a) { a.shape.stage_rank += 1; }},
      {"no exchange", [](Arguments& a) { a.options.exchange = nullptr; }},
      {"no HopB", [](Arguments& a) { a.options.hop_b = nullptr; }},
      {"negative slices", [](Arguments& a) { a.options.hop_b_slices = -1; }},
      {"too many slices", [](Arguments& a) { a.options.hop_b_slices = 5; }},
      {"no workspace", [](Arguments& a) { a.options.workspace = {}; }, ErrorCode::capacity},
      {"small workspace", [](Arguments& a) { a.options.workspace = a.options.workspace.first(1024); },
       ErrorCode::capacity},
      {"workspace a byte short of its last piece",
       [](Arguments& a) { a.options.workspace = a.options.workspace.first(a.options.workspace.size() / 2); },
       ErrorCode::capacity},
      {"too few rows", [](Arguments& a) { a.hidden = a.hidden.slice(0, 0, a.hidden.extent(0) - 1); }},
      {"too narrow", [](Arguments& a) { a.hidden = a.hidden.slice(1, 0, a.hidden.extent(1) - 1); }},
      {"strided hidden",
       [](Arguments& a) {
         a.hidden = {a.hidden.data(), {a.hidden.extent(0), a.hidden.extent(1)}, {a.hidden.extent(1) + 1, 1}};
       }},
      {"a slice of a batch",
       [](Arguments& a) {
         a.batch = a.batch.slice(1, 2);
         a.hidden = a.hidden.slice(0, 0, a.batch.num_tokens());
       }},
      {"cache of other heads", [](Arguments& a) { a.kv.format.num_heads += 1; }},
      {"cache of another head size", [](Arguments& a) { a.kv.format.head_dim *= 2; }},
      {"cache of another value size", [](Arguments& a) { a.kv.format.value_dim -= 1; }},
      {"cache of latents", [](Arguments& a) { a.kv.format.is_latent = true; }},
      {"cache of another KVP", [](Arguments& a) { a.kv.layout = KvLayout(3, 1); }},
      {"cache of another rank", [](Arguments& a) { a.kv.kvp_rank = 1 - a.kv.kvp_rank; }},
      {"latent weights", [](Arguments& a) { a.weights.attention = MlaWeights{}; }},
      {"scale of zero", [](Arguments& a) { a.config.softmax_scale = 0.0f; }},
      {"scale that is no number", [](Arguments& a) { a.config.softmax_scale = std::nanf(""); }},
      {"negative window", [](Arguments& a) { a.config.window = -1; }},
      {"negative soft cap", [](Arguments& a) { a.config.soft_cap = -1.0f; }},
      {"rotary wider than a head", [](Arguments& a) { a.config.rope.rotary_dim = 18; }},
      {"odd rotary", [](Arguments& a) { a.config.rope.rotary_dim = 7; }},
      {"output projection of all heads", [](Arguments& a) { a.gqa().o.cols *= 2; }},
      {"no output projection", [](Arguments& a) { a.gqa().o = {}; }},
      {"qkv of another width", [&](Arguments& a) { fatter(a.gqa().qkv); }},
      {"qkv without values", [](Arguments& a) { a.gqa().qkv.rows -= 16; }},
      {"qkv bias of another width", [](Arguments& a) { a.gqa().qkv_bias = a.gqa().o; }},
      {"head norm of another width", [](Arguments& a) { a.gqa().q_norm = a.weights.input_norm; }},
      {"o bias of another width", [](Arguments& a) { a.gqa().o_bias = a.gqa().o; }},
      {"no input norm", [](Arguments& a) { a.weights.input_norm = {}; }},
      {"post-attention norm of another width", [&](Arguments& a) { fatter(a.weights.post_attention_norm); }},
      {"gate and up of another width", [&](Arguments& a) { fatter(a.dense().gate_up); }},
      {"gate and up of another part", [](Arguments& a) { a.dense().gate_up.rows *= 2; }},
      {"down of another part", [](Arguments& a) { a.dense().down.cols *= 2; }},
      {"down of another width", [](Arguments& a) { a.dense().down.rows -= 1; }},
      {"gate bias of another width", [](Arguments& a) { a.dense().gate_up_bias = a.weights.input_norm; }},
      {"down bias of another width", [](Arguments& a) { a.dense().down_bias = a.dense().down; }},
      {"experts in a dense model", [](Arguments& a) { a.weights.ffn = MoeWeights{}; }}};
  check_bad_calls({}, {.kvp = 2, .tpa = 2}, calls);

  check_bad_calls(mla_moe_spec(true), {.kvp = 4, .ep = 2},
                  {{"grouped weights", [](Arguments& a) { a.weights.attention = GqaWeights{}; }},
                   {"no q_b", [](Arguments& a) { a.mla().q_b = {}; }},
                   {"q_a without its norm", [](Arguments& a) { a.mla().q_a_norm = {}; }},
                   {"q_a of another latent", [](Arguments& a) { a.mla().q_a.rows -= 1; }},
                   {"kv_a of another width", [](Arguments& a) { a.mla().kv_a.rows += 1; }},
                   {"no kv_a_norm", [](Arguments& a) { a.mla().kv_a_norm = {}; }},
                   {"w_uk of other dims", [](Arguments& a) { a.mla().w_uk.cols += 1; }},
                   {"w_uv of all heads", [](Arguments& a) { a.mla().w_uv.rows *= 4; }},
                   {"output projection of other heads", [](Arguments& a) { a.mla().o.cols /= 2; }},
                   {"other rope dims", [](Arguments& a) { a.shape.mla->qk_rope_head_dim += 2; }},
                   {"rotary wider than rope", [](Arguments& a) { a.config.rope.rotary_dim = 10; }},
                   {"router of fewer experts", [](Arguments& a) { a.moe().router.rows -= 1; }},
                   {"an expert too few", [](Arguments& a) { a.moe().experts.pop_back(); }},
                   {"an expert of another part", [](Arguments& a) { a.moe().experts[1].down.cols *= 2; }},
                   {"an expert of another width", [](Arguments& a) { a.moe().experts[0].gate_up.cols += 1; }},
                   {"shared expert of another part", [](Arguments& a) { a.moe().shared.gate_up.rows *= 2; }},
                   {"no shared expert", [](Arguments& a) { a.moe().shared = {}; }},
                   {"top_k of zero", [](Arguments& a) { a.shape.top_k = 0; }},
                   {"top_k beyond the kept groups", [](Arguments& a) { a.shape.top_k = 5; }},
                   {"groups that do not divide", [](Arguments& a) { a.config.router.num_groups = 3; }},
                   {"more groups kept than there are", [](Arguments& a) { a.config.router.groups_kept = 5; }},
                   {"a dense layer of no width", [](Arguments& a) { a.weights.ffn = DenseFfnWeights{}; }}});
}

TEST_CASE("A step beyond the exchange's capacity is refused before any collective") {
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(3, layer.hidden, 9);
  const Topology topo({.kvp = 2, .tpa = 2}, shape_of(layer));
  const RankOutcomes outcomes = run_ranks(4, [&](cpu::LocalComm& comm) {
    auto backend = make_backend<CpuBackend>(topo, comm);
    LayerRank<CpuBackend> rank(backend, topo, layer, script, {.hop_b_slices = 2});
    KvpAllToAll<CpuBackend> small(backend,
                                  {.max_tokens = 2, .num_query_heads = 4, .value_dim = 16, .max_slices = 4});
    rank.prepare(script.steps[0]);
    DecodeLayerOptions<CpuBackend> options = rank.layer_options();
    options.exchange = &small;
    try {
      decode_layer(backend, topo.rank_shape(comm.rank()), rank.config(), rank.weights(),
                   rank.cache().layer(0), rank.batch().batch(), rank.hidden(), options, rank.stream());
    } catch (...) {
      if (small.sent_payload_bytes() != 0) throw Error(ErrorCode::internal, "it exchanged something before");
      throw;
    }
  });
  for (int r = 0; r < 4; ++r) {
    CAPTURE(r, outcomes.message(r));
    CHECK(outcomes.code(r) == ErrorCode::invalid_argument);
  }
}

TEST_CASE("A rank that leaves out a step is out of step, not a wrong result") {
  const oracle::Layer layer = random_layer({}, 8);
  Script script;  // decode steps of equal sizes: only positions tell them apart
  script.sequences = 3;
  for (std::uint32_t s = 0; s < 5; ++s)
    script.steps.push_back({{1, 1, 1}, {0, 0, 0}, RandomMatrices(s).vector(3 * layer.hidden, 1.0)});
  const Topology topo({.kvp = 2, .tpa = 2}, shape_of(layer));
  for (const int slices : {1, 3}) {
    const RankOutcomes outcomes = run_ranks(4, [&](cpu::LocalComm& comm) {
      auto backend = make_backend<CpuBackend>(topo, comm);
      LayerRank<CpuBackend> rank(backend, topo, layer, script, {.hop_b_slices = slices});
      for (std::size_t s = 0; s < script.steps.size(); ++s) {
        rank.prepare(script.steps[s]);
        if (comm.rank() == 3 && s == 2) continue;  // the cache grows, the layer does not run
        rank.launch();
        rank.finish(script.steps[s]);
      }
    });
    int out_of_step = 0;
    for (int r = 0; r < 4; ++r) {
      CAPTURE(slices, r, outcomes.message(r));
      REQUIRE(outcomes.code(r).has_value());
      CHECK((outcomes.code(r) == ErrorCode::out_of_step || outcomes.code(r) == ErrorCode::peer_failed));
      out_of_step += outcomes.code(r) == ErrorCode::out_of_step ? 1 : 0;
    }
    CHECK(out_of_step >= 1);
  }
}

}  // namespace
}  // namespace helix::test
