// SPDX-License-Identifier: Apache-2.0
// decode_layer refuses contradictory arguments equally on every rank, and names ranks that are out of step.
#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <helix/decode_layer.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"
#include "support/layer_fixture.hpp"
#include "support/oracle.hpp"
#include "support/ranks.hpp"

namespace helix::test {
namespace {

using CpuBackend = cpu::Backend<cpu::LocalComm>;

/// The arguments of one call; tests modify them.
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

/// Every rank must throw `code` before it communicates: the good step that follows shows that the ranks are
/// still in step.
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
    CHECK(error_of(results[r], expected) <= kLayerTolerance);
  }
}

void widen(WeightView& w) {
  w.cols += 1;
}

/// The query offsets with another value for the second one.
std::span<const std::int32_t> with_middle(const Arguments& a, std::int64_t offset) {
  thread_local std::vector<std::int32_t> offsets;  // must live as long as the call reads it
  offsets.assign(a.batch.query_offsets_host.begin(), a.batch.query_offsets_host.end());
  offsets[1] = static_cast<std::int32_t>(offset);
  return offsets;
}

/// Rows like `hidden` in memory that nothing else uses.
TensorView<float, 2> beside_hidden(const Arguments& a) {
  thread_local std::vector<float> rows;  // must live as long as the refused call
  rows.resize(static_cast<std::size_t>(a.hidden.size()));
  return {rows.data(), {a.hidden.extent(0), a.hidden.extent(1)}};
}

TEST_CASE("Bad options and batches are refused alike on every rank before any collective") {
  const std::vector<BadCall> calls{
      {"shape of another rank", [](Arguments& a) { a.shape.stage_rank += 1; }},
      {"heads that KVP does not make", [](Arguments& a) { a.shape.combined_heads += 1; }},
      {"KV heads that do not divide", [](Arguments& a) { a.shape.kv_heads = a.shape.query_heads + 1; }},
      {"an FFN below 0", [](Arguments& a) { a.shape.ffn = -1; }},
      {"a bias that was not loaded",
       [](Arguments& a) {
         std::get<GqaWeights>(a.weights.attention).qkv_bias = {nullptr, DType::f32, 1, a.shape.qkv_columns()};
       }},
      {"no address of normed",
       [](Arguments& a) {
         a.options.normed = {nullptr, {a.hidden.extent(0), a.hidden.extent(1)}};
       }},
      {"no exchange", [](Arguments& a) { a.options.exchange = nullptr; }},
      {"no HopB", [](Arguments& a) { a.options.hop_b = nullptr; }},
      {"negative slices", [](Arguments& a) { a.options.hop_b_slices = -1; }},
      {"lengths of some sequences",
       [](Arguments& a) { a.batch.lengths_host = a.batch.lengths_host.first(1); }},
      {"no positions", [](Arguments& a) { a.batch.positions = nullptr; }},
      {"no query offsets", [](Arguments& a) { a.batch.query_offsets = nullptr; }},
      {"no frequencies", [](Arguments& a) { a.config.rope.inverse_frequency = nullptr; }},
      {"no address of hidden",
       [](Arguments& a) {
         a.hidden = {nullptr, {a.hidden.extent(0), a.hidden.extent(1)}};
       }},
      {"no address of the workspace",
       [](Arguments& a) {
         a.options.workspace = {static_cast<std::byte*>(nullptr), a.options.workspace.size()};
       }},
      {"workspace that begins between two vectors",
       [](Arguments& a) { a.options.workspace = a.options.workspace.subspan(8); }},
      {"next_norm without normed", [](Arguments& a) { a.options.next_norm = a.weights.input_norm; }},
      {"next_norm of another width",
       [](Arguments& a) {
         a.options.normed = beside_hidden(a);
         a.options.next_norm = a.weights.input_norm;
         a.options.next_norm.cols = 1;
       }},
      {"next_norm of fp8",
       [](Arguments& a) {
         a.options.normed = beside_hidden(a);
         a.options.next_norm = a.weights.input_norm;
         a.options.next_norm.dtype = DType::fp8_e4m3;
       }},
      {"normed in place", [](Arguments& a) { a.options.normed = a.hidden; }},
      {"normed that begins in hidden",
       [](Arguments& a) {
         a.options.normed = {a.hidden.data() + a.hidden.size() - 1, {a.hidden.extent(0), a.hidden.extent(1)}};
       }},
      {"hidden in the workspace",
       [](Arguments& a) {
         a.hidden = {reinterpret_cast<float*>(a.options.workspace.data()) + 4,
                     {a.hidden.extent(0), a.hidden.extent(1)}};
       }},
      {"normed in the workspace",
       [](Arguments& a) {
         a.options.normed = {reinterpret_cast<float*>(a.options.workspace.data()),
                             {a.hidden.extent(0), a.hidden.extent(1)}};
       }},
      {"infinite scale", [](Arguments& a) { a.config.softmax_scale = HUGE_VALF; }},
      {"infinite soft cap", [](Arguments& a) { a.config.soft_cap = HUGE_VALF; }},
      {"epsilon that is no number", [](Arguments& a) { a.config.norm_epsilon = std::nanf(""); }},
      {"epsilon below zero", [](Arguments& a) { a.config.norm_epsilon = -1.0f; }},
      {"magnitude that is no number", [](Arguments& a) { a.config.rope.magnitude = std::nanf(""); }},
      {"no slots", [](Arguments& a) { a.batch.sequence_slots = nullptr; }},
      {"falling query offsets",
       [](Arguments& a) { a.batch.query_offsets_host = with_middle(a, a.hidden.extent(0) + 1); }},
      {"query offsets below zero", [](Arguments& a) { a.batch.query_offsets_host = with_middle(a, -3); }},
      {"too many slices", [](Arguments& a) { a.options.hop_b_slices = 5; }}};
  check_bad_calls({}, {.kvp = 2, .tpa = 2}, calls);
}

TEST_CASE("Bad workspaces, hidden rows, caches and sizes are refused alike on every rank") {
  const std::vector<BadCall> calls{
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
      {"odd rotary", [](Arguments& a) { a.config.rope.rotary_dim = 7; }}};
  check_bad_calls({}, {.kvp = 2, .tpa = 2}, calls);
}

TEST_CASE("Bad weights of a dense layer are refused alike on every rank") {
  const std::vector<BadCall> calls{
      {"output projection of all heads", [](Arguments& a) { a.gqa().o.cols *= 2; }},
      {"no output projection", [](Arguments& a) { a.gqa().o = {}; }},
      {"qkv of another width", [](Arguments& a) { widen(a.gqa().qkv); }},
      {"qkv without values", [](Arguments& a) { a.gqa().qkv.rows -= 16; }},
      {"qkv bias of another width", [](Arguments& a) { a.gqa().qkv_bias = a.gqa().o; }},
      {"head norm of another width", [](Arguments& a) { a.gqa().q_norm = a.weights.input_norm; }},
      {"o bias of another width", [](Arguments& a) { a.gqa().o_bias = a.gqa().o; }},
      {"qkv of fp8", [](Arguments& a) { a.gqa().qkv.dtype = DType::fp8_e4m3; }},
      {"down without a type", [](Arguments& a) { a.dense().down.dtype = static_cast<DType>(77); }},
      {"no input norm", [](Arguments& a) { a.weights.input_norm = {}; }},
      {"post-attention norm of another width", [](Arguments& a) { widen(a.weights.post_attention_norm); }},
      {"gate and up of another width", [](Arguments& a) { widen(a.dense().gate_up); }},
      {"gate and up of another part", [](Arguments& a) { a.dense().gate_up.rows *= 2; }},
      {"down of another part", [](Arguments& a) { a.dense().down.cols *= 2; }},
      {"down of another width", [](Arguments& a) { a.dense().down.rows -= 1; }},
      {"gate bias of another width", [](Arguments& a) { a.dense().gate_up_bias = a.weights.input_norm; }},
      {"down bias of another width", [](Arguments& a) { a.dense().down_bias = a.dense().down; }},
      {"experts in a dense model", [](Arguments& a) { a.weights.ffn = MoeWeights{}; }}};
  check_bad_calls({}, {.kvp = 2, .tpa = 2}, calls);
}

TEST_CASE("Bad arguments of a layer of latents and experts are refused alike on every rank") {
  check_bad_calls(
      LayerSpec::deepseek(true), {.kvp = 4, .ep = 2},
      {{"grouped weights", [](Arguments& a) { a.weights.attention = GqaWeights{}; }},
       {"no q_b", [](Arguments& a) { a.mla().q_b = {}; }},
       {"no q_a_norm", [](Arguments& a) { a.mla().q_a_norm = {}; }},
       {"q_b of another latent", [](Arguments& a) { a.mla().q_b.cols -= 1; }},
       {"no qkv_a", [](Arguments& a) { a.mla().qkv_a = {}; }},
       {"qkv_a of fewer rows", [](Arguments& a) { a.mla().qkv_a.rows -= 1; }},
       {"qkv_a of another width", [](Arguments& a) { widen(a.mla().qkv_a); }},
       {"qkv_a_bias of the latent alone",
        [](Arguments& a) {
          a.mla().qkv_a_bias = {a.mla().o.data, DType::f32, 1, a.shape.mla->latent_dim()};
        }},
       {"no kv_a_norm", [](Arguments& a) { a.mla().kv_a_norm = {}; }},
       {"w_uk of other dims", [](Arguments& a) { a.mla().w_uk.cols += 1; }},
       {"w_uv of all heads", [](Arguments& a) { a.mla().w_uv.rows *= 4; }},
       {"expand_k alone", [](Arguments& a) { a.mla().expand_v = {}; }},
       {"expand_v of some heads", [](Arguments& a) { a.mla().expand_v.rows /= 2; }},
       {"expand_k of other dims", [](Arguments& a) { a.mla().expand_k.cols += 1; }},
       {"room below zero", [](Arguments& a) { a.config.mla_prefill.max_tokens = -1; }},
       {"output projection of other heads", [](Arguments& a) { a.mla().o.cols /= 2; }},
       {"o bias of another width", [](Arguments& a) { a.mla().o_bias = a.mla().o; }},
       {"other rope dims", [](Arguments& a) { a.shape.mla->qk_rope_head_dim += 2; }},
       {"rotary wider than rope", [](Arguments& a) { a.config.rope.rotary_dim = 10; }},
       {"no frequencies", [](Arguments& a) { a.config.rope.inverse_frequency = nullptr; }},
       {"latent epsilon that is no number",
        [](Arguments& a) { a.config.latent_norm_epsilon = std::nanf(""); }},
       {"scale of experts that is no number", [](Arguments& a) { a.config.router.scale = std::nanf(""); }},
       {"scoring without a name",
        [](Arguments& a) { a.config.router.scoring = static_cast<RouterScoring>(9); }},
       {"router of fewer experts", [](Arguments& a) { a.moe().router.rows -= 1; }},
       {"an expert too few", [](Arguments& a) { a.moe().experts.pop_back(); }},
       {"an expert of another part", [](Arguments& a) { a.moe().experts[1].down.cols *= 2; }},
       {"an expert of another width", [](Arguments& a) { a.moe().experts[0].gate_up.cols += 1; }},
       {"an expert without a type",
        [](Arguments& a) { a.moe().experts[0].down.dtype = static_cast<DType>(77); }},
       {"shared expert of another part", [](Arguments& a) { a.moe().shared.gate_up.rows *= 2; }},
       {"no shared expert", [](Arguments& a) { a.moe().shared = {}; }},
       {"top_k of zero", [](Arguments& a) { a.shape.top_k = 0; }},
       {"top_k beyond the kept groups", [](Arguments& a) { a.shape.top_k = 5; }},
       {"groups that do not divide", [](Arguments& a) { a.config.router.num_groups = 3; }},
       {"more groups kept than there are", [](Arguments& a) { a.config.router.groups_kept = 5; }},
       {"a dense layer of no width", [](Arguments& a) { a.weights.ffn = DenseFfnWeights{}; }}});
  LayerSpec without_query_lora = LayerSpec::deepseek(false);
  without_query_lora.q_lora = 0;
  check_bad_calls(
      without_query_lora, {.kvp = 2},
      {{"q_b without a query LoRA", [](Arguments& a) { a.mla().q_b = a.mla().w_uk; }},
       {"q_a_norm without a query LoRA", [](Arguments& a) { a.mla().q_a_norm = a.mla().kv_a_norm; }},
       {"qkv_a of the latent alone", [](Arguments& a) { a.mla().qkv_a.rows = a.shape.mla->latent_dim(); }}});
}

TEST_CASE("A KVP communicator that is not the topology's is refused with both ranks") {
  using Split = std::function<cpu::LocalComm(cpu::LocalComm&, const RankCoordinates&)>;
  const std::vector<std::pair<std::string_view, Split>> splits{
      {"the stage itself", [](cpu::LocalComm& stage, const RankCoordinates&) { return stage; }},
      {"the group in reverse",
       [](cpu::LocalComm& stage, const RankCoordinates& at) {
         return stage.split(at.tpa_rank, -at.kvp_rank);
       }},
      {"the TPA group", [](cpu::LocalComm& stage,
                           const RankCoordinates& at) { return stage.split(at.kvp_rank, at.tpa_rank); }},
      {"a group of one",
       [](cpu::LocalComm& stage, const RankCoordinates&) { return stage.split(stage.rank(), 0); }}};
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(3, layer.hidden, 9);
  const Topology topo({.kvp = 2, .tpa = 2}, shape_of(layer));
  for (const auto& [name, split] : splits) {
    const RankOutcomes outcomes = run_ranks(4, [&, &make = split](cpu::LocalComm& comm) {
      CpuBackend backend(comm, make(comm, topo.stage_coordinates(comm.rank())));
      LayerRank<CpuBackend> rank(backend, topo, layer, script, {.hop_b_slices = 2});
      rank.prepare(script.steps[0]);
      rank.launch();
    });
    CAPTURE(name, outcomes.all_messages());
    CHECK(outcomes.code(1) == ErrorCode::invalid_argument);
    CHECK(outcomes.message(1).find("the KVP communicator has rank ") != std::string::npos);
  }
}

/// Every rank of four has failed, out of step or because another one is, and at least one is out of step.
void check_out_of_step(const RankOutcomes& outcomes) {
  int out_of_step = 0;
  for (int r = 0; r < 4; ++r) {
    CAPTURE(r);
    REQUIRE(outcomes.code(r).has_value());
    CHECK((outcomes.code(r) == ErrorCode::out_of_step || outcomes.code(r) == ErrorCode::peer_failed));
    out_of_step += outcomes.code(r) == ErrorCode::out_of_step ? 1 : 0;
  }
  CHECK(out_of_step >= 1);
}

/// Runs the layer of `rank` in the first step of `script`, over `exchange` in place of the rank's own.
void decode_over(KvpAllToAll<CpuBackend>& exchange, CpuBackend& backend, const Topology& topo,
                 LayerRank<CpuBackend>& rank, const Script& script) {
  rank.prepare(script.steps[0]);
  DecodeLayerOptions<CpuBackend> options = rank.layer_options();
  options.exchange = &exchange;
  decode_layer(backend, topo.rank_shape(backend.comms().stage->rank()), rank.config(), rank.weights(),
               rank.cache().layer(0), rank.batch().batch(), rank.hidden(), options, rank.stream());
}

TEST_CASE("A KVP group of the right size with ranks of two groups is out of step, not a wrong result") {
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(3, layer.hidden, 9);
  const Topology topo({.kvp = 2, .tpa = 2}, shape_of(layer));
  for (const int slices : {1, 2}) {
    const RankOutcomes outcomes = run_ranks(4, [&](cpu::LocalComm& comm) {
      const RankCoordinates at = topo.stage_coordinates(comm.rank());
      // {0, 3} and {1, 2} for {0, 2} and {1, 3}: all have the rank that they should.
      CpuBackend backend(comm, comm.split((at.tpa_rank + at.kvp_rank) % 2, at.kvp_rank));
      LayerRank<CpuBackend> rank(backend, topo, layer, script, {.hop_b_slices = slices});
      rank.prepare(script.steps[0]);
      rank.launch();
      rank.finish(script.steps[0]);
    });
    CAPTURE(slices, outcomes.all_messages());
    check_out_of_step(outcomes);
    CHECK(outcomes.all_messages().find("the communicator has ranks of several KVP groups") !=
          std::string::npos);
  }
}

TEST_CASE("An exchange that was built for another KVP group is refused") {
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(3, layer.hidden, 9);
  const Topology topo({.kvp = 2, .tpa = 2}, shape_of(layer));
  const RankOutcomes outcomes = run_ranks(4, [&](cpu::LocalComm& comm) {
    auto backend = make_backend<CpuBackend>(topo, comm);
    LayerRank<CpuBackend> rank(backend, topo, layer, script, {});
    KvpAllToAllSpec spec =
        KvpAllToAllSpec::of_layers(topo.rank_shape(comm.rank()), script.max_step_tokens(), /*max_slices=*/4);
    spec.group = 2;
    KvpAllToAll<CpuBackend> other(backend, spec);
    decode_over(other, backend, topo, rank, script);
  });
  for (int r = 0; r < 4; ++r) {
    CAPTURE(r, outcomes.message(r));
    CHECK(outcomes.code(r) == ErrorCode::invalid_argument);
    CHECK(outcomes.message(r).find("built for KVP group 2, this rank has TPA rank " +
                                   std::to_string(r % 2)) != std::string::npos);
  }
}

TEST_CASE("A workspace that is too small is told all that the step needs") {
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(3, layer.hidden, 9);
  const Topology topo({}, shape_of(layer));
  const RankOutcomes outcomes = run_ranks(1, [&](cpu::LocalComm& comm) {
    auto backend = make_backend<CpuBackend>(topo, comm);
    LayerRank<CpuBackend> rank(backend, topo, layer, script, {});
    rank.prepare(script.steps[0]);
    DecodeLayerOptions<CpuBackend> options = rank.layer_options();
    const std::int64_t tokens = rank.batch().batch().num_tokens();
    const std::size_t needed = decode_layer_workspace_bytes(backend, topo.rank_shape(0), tokens);
    const auto decode = [&](std::size_t bytes) {
      options.workspace = options.workspace.first(bytes);
      decode_layer(backend, topo.rank_shape(0), rank.config(), rank.weights(), rank.cache().layer(0),
                   rank.batch().batch(), rank.hidden(), options, rank.stream());
    };
    decode(needed);
    backend.synchronize(rank.stream());
    const auto failure = failure_of([&] { decode(needed - 1); });
    REQUIRE(failure);
    CHECK(failure->code == ErrorCode::capacity);
    CHECK(failure->says(std::to_string(tokens) + " tokens need " + std::to_string(needed)));
    CHECK(failure->says(std::to_string(needed - 1) + " bytes"));
  });
  CHECK(outcomes.all_messages() == "");
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
    try {
      decode_over(small, backend, topo, rank, script);
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
  Script script;  // decode steps of equal sizes: only positions distinguish them
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
        if (comm.rank() == 3 && s == 2) continue;  // the cache grows, but the layer does not run
        rank.launch();
        rank.finish(script.steps[s]);
      }
    });
    CAPTURE(slices, outcomes.all_messages());
    check_out_of_step(outcomes);
  }
}

}  // namespace
}  // namespace helix::test
