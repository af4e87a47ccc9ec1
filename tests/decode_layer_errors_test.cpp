// SPDX-License-Identifier: Apache-2.0
// decode_layer refuses contradictory arguments equally on every rank, and names ranks that are out of step.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
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

using Catch::Matchers::ContainsSubstring;
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
  std::string_view says;  ///< Part of the error's message on every rank.
  std::function<void(Arguments&)> spoil;
  ErrorCode code = ErrorCode::invalid_argument;
};

/// Every rank must throw `code` and say what is wrong before it communicates: the good step that follows
/// shows that the ranks are still in step.
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
        if (error.code() != call.code ||
            std::string_view(error.what()).find(call.says) == std::string_view::npos)
          surprises[me].push_back(std::string(call.name) + ": " + error.what());
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
      {"shape of another rank", "the shape is of stage_rank ", [](Arguments& a) { a.shape.stage_rank += 1; }},
      {"shape of another stage", "of 5; the backend is rank ", [](Arguments& a) { a.shape.stage_size += 1; }},
      {"no KV heads", "the shape has 4 query heads of 0 KV heads and combines 2 over",
       [](Arguments& a) { a.shape.kv_heads = 0; }},
      {"no query heads", "the shape has 0 query heads of 2 KV heads and combines 0 over",
       [](Arguments& a) { a.shape.query_heads = a.shape.combined_heads = 0; }},
      {"hidden rows below 0", "the shape's hidden is -1, ffn", [](Arguments& a) { a.shape.hidden = -1; }},
      {"routed experts below 0", "shared_ffn 0, expert_ffn -1",
       [](Arguments& a) { a.shape.expert_ffn = -1; }},
      {"heads that KVP does not make", "the shape has 4 query heads of 2 KV heads and combines 3 over",
       [](Arguments& a) { a.shape.combined_heads += 1; }},
      {"KV heads that do not divide", "the shape has 4 query heads of 5 KV heads and combines 2 over",
       [](Arguments& a) { a.shape.kv_heads = a.shape.query_heads + 1; }},
      {"an FFN below 0", "the shape's hidden is 32, ffn -1, shared_ffn 0, expert_ffn 0",
       [](Arguments& a) { a.shape.ffn = -1; }},
      {"a shared expert below 0", "shared_ffn -1, expert_ffn 0",
       [](Arguments& a) { a.shape.shared_ffn = -1; }},
      {"a bias that was not loaded", "qkv_bias is [1, 128] without data",
       [](Arguments& a) {
         std::get<GqaWeights>(a.weights.attention).qkv_bias = {nullptr, DType::f32, 1, a.shape.qkv_columns()};
       }},
      {"no address of normed", "normed is null",
       [](Arguments& a) {
         a.options.normed = {nullptr, {a.hidden.extent(0), a.hidden.extent(1)}};
       }},
      {"normed of fewer rows", "normed is [14, 32] with strides [32, 1]",
       [](Arguments& a) { a.options.normed = beside_hidden(a).slice(0, 0, a.hidden.extent(0) - 1); }},
      {"normed without rows", "normed is [0, 32] with strides [32, 1]",
       [](Arguments& a) { a.options.normed = beside_hidden(a).slice(0, 0, 0); }},
      {"no exchange", "options.exchange and options.hop_b must be set",
       [](Arguments& a) { a.options.exchange = nullptr; }},
      {"no HopB", "options.exchange and options.hop_b must be set",
       [](Arguments& a) { a.options.hop_b = nullptr; }},
      {"negative slices", "hop_b_slices is -1", [](Arguments& a) { a.options.hop_b_slices = -1; }},
      {"lengths of some sequences", "the batch has 3 sequences and 1 in lengths_host",
       [](Arguments& a) { a.batch.lengths_host = a.batch.lengths_host.first(1); }},
      {"no positions", "the batch's positions is null", [](Arguments& a) { a.batch.positions = nullptr; }},
      {"no query offsets", "the batch's query_offsets is null",
       [](Arguments& a) { a.batch.query_offsets = nullptr; }},
      {"no frequencies", "rope.inverse_frequency is null",
       [](Arguments& a) { a.config.rope.inverse_frequency = nullptr; }},
      {"no address of hidden", "hidden is null",
       [](Arguments& a) {
         a.hidden = {nullptr, {a.hidden.extent(0), a.hidden.extent(1)}};
       }},
      {"no address of the workspace", "workspace is null with ",
       [](Arguments& a) {
         a.options.workspace = {static_cast<std::byte*>(nullptr), a.options.workspace.size()};
       }},
      {"workspace that begins between two vectors", "it must be aligned to 16 bytes",
       [](Arguments& a) { a.options.workspace = a.options.workspace.subspan(8); }},
      {"next_norm without normed", "options.next_norm is given without options.normed, where what",
       [](Arguments& a) { a.options.next_norm = a.weights.input_norm; }},
      {"next_norm of another width", "next_norm is [1, 1]",
       [](Arguments& a) {
         a.options.normed = beside_hidden(a);
         a.options.next_norm = a.weights.input_norm;
         a.options.next_norm.cols = 1;
       }},
      {"next_norm of fp8", "next_norm is fp8_e4m3",
       [](Arguments& a) {
         a.options.normed = beside_hidden(a);
         a.options.next_norm = a.weights.input_norm;
         a.options.next_norm.dtype = DType::fp8_e4m3;
       }},
      {"normed in place", "overlap; a layer writes both", [](Arguments& a) { a.options.normed = a.hidden; }},
      {"normed that begins in hidden", "and hidden at ",
       [](Arguments& a) {
         a.options.normed = {a.hidden.data() + a.hidden.size() - 1, {a.hidden.extent(0), a.hidden.extent(1)}};
       }},
      {"hidden in the workspace", "and the workspace at ",
       [](Arguments& a) {
         a.hidden = {reinterpret_cast<float*>(a.options.workspace.data()) + 4,
                     {a.hidden.extent(0), a.hidden.extent(1)}};
       }},
      {"normed in the workspace", "and the workspace at ",
       [](Arguments& a) {
         a.options.normed = {reinterpret_cast<float*>(a.options.workspace.data()),
                             {a.hidden.extent(0), a.hidden.extent(1)}};
       }},
      {"infinite scale", "softmax_scale is inf (> 0 and finite), window 0 (>= 0),",
       [](Arguments& a) { a.config.softmax_scale = HUGE_VALF; }},
      {"infinite soft cap", "softmax_scale is 0.25 (> 0 and finite), window 0 (>= 0),",
       [](Arguments& a) { a.config.soft_cap = HUGE_VALF; }},
      {"epsilon that is no number", "norm_epsilon is nan",
       [](Arguments& a) { a.config.norm_epsilon = std::nanf(""); }},
      {"epsilon below zero", "norm_epsilon is -1", [](Arguments& a) { a.config.norm_epsilon = -1.0f; }},
      {"magnitude that is no number", "rope.magnitude is nan",
       [](Arguments& a) { a.config.rope.magnitude = std::nanf(""); }},
      {"no slots", "the batch's sequence_slots is null",
       [](Arguments& a) { a.batch.sequence_slots = nullptr; }},
      {"falling query offsets", "the batch's query_offsets_host[2] is 13",
       [](Arguments& a) { a.batch.query_offsets_host = with_middle(a, a.hidden.extent(0) + 1); }},
      {"query offsets below zero", "the batch's query_offsets_host[1] is -3",
       [](Arguments& a) { a.batch.query_offsets_host = with_middle(a, -3); }},
      {"too many slices", "hop_b_slices is 5", [](Arguments& a) { a.options.hop_b_slices = 5; }}};
  check_bad_calls({}, {.kvp = 2, .tpa = 2}, calls);
}

TEST_CASE("Bad workspaces, hidden rows, caches and sizes are refused alike on every rank") {
  const std::vector<BadCall> calls{
      {"no workspace", "the workspace has 0 bytes", [](Arguments& a) { a.options.workspace = {}; },
       ErrorCode::capacity},
      {"small workspace", "the workspace has 1024 bytes",
       [](Arguments& a) { a.options.workspace = a.options.workspace.first(1024); }, ErrorCode::capacity},
      {"workspace a byte short of its last piece", "the workspace has 124800 bytes",
       [](Arguments& a) { a.options.workspace = a.options.workspace.first(a.options.workspace.size() / 2); },
       ErrorCode::capacity},
      {"too few rows", "hidden is [14, 32] with strides [32, 1]",
       [](Arguments& a) { a.hidden = a.hidden.slice(0, 0, a.hidden.extent(0) - 1); }},
      {"too narrow", "hidden is [15, 31] with strides [32, 1]",
       [](Arguments& a) { a.hidden = a.hidden.slice(1, 0, a.hidden.extent(1) - 1); }},
      {"dense and too narrow", "hidden is [15, 31] with strides [31, 1]",
       [](Arguments& a) {
         a.hidden = {a.hidden.data(), {a.hidden.extent(0), a.hidden.extent(1) - 1}};
       }},
      {"strided hidden", "hidden is [15, 32] with strides [33, 1]",
       [](Arguments& a) {
         a.hidden = {a.hidden.data(), {a.hidden.extent(0), a.hidden.extent(1)}, {a.hidden.extent(1) + 1, 1}};
       }},
      {"a slice of a batch", "the batch starts at token 13",
       [](Arguments& a) {
         a.batch = a.batch.slice(1, 2);
         a.hidden = a.hidden.slice(0, 0, a.batch.num_tokens());
       }},
      {"cache of other heads", "the KV view's v lies 512 bytes behind its k, where rows of both",
       [](Arguments& a) { a.kv.format.num_heads += 1; }},
      {"cache of fewer heads", "the cache has 1 heads of 16/16",
       [](Arguments& a) { a.kv.format.num_heads = 1; }},
      {"cache of another head size", "the KV view's k.token stride is 16, but what lies between takes",
       [](Arguments& a) { a.kv.format.head_dim *= 2; }},
      {"cache of another value size", "the cache has 2 heads of 16/15",
       [](Arguments& a) { a.kv.format.value_dim -= 1; }},
      {"shape of another head size", "; this rank of the topology stores 2 heads of 8/16",
       [](Arguments& a) { a.shape.head_dim = 8; }},
      {"cache of latents", "the KV view is latent with 2 heads",
       [](Arguments& a) { a.kv.format.is_latent = true; }},
      {"cache of another KVP", " of 3; this rank of the topology stores 2 heads of 16/16",
       [](Arguments& a) { a.kv.layout = KvLayout(3, 1); }},
      {"cache of another rank", "; this rank of the topology stores 2 heads of 16/16",
       [](Arguments& a) { a.kv.kvp_rank = 1 - a.kv.kvp_rank; }},
      {"latent weights", "the shape is not MLA but the layer holds the other kind of",
       [](Arguments& a) { a.weights.attention = MlaWeights{}; }},
      {"scale of zero", "softmax_scale is 0 (> 0 and finite), window 0 (>= 0), soft_cap",
       [](Arguments& a) { a.config.softmax_scale = 0.0f; }},
      {"scale that is no number", "softmax_scale is nan (> 0 and finite), window 0 (>= 0),",
       [](Arguments& a) { a.config.softmax_scale = std::nanf(""); }},
      {"negative window", "softmax_scale is 0.25 (> 0 and finite), window -1 (>= 0),",
       [](Arguments& a) { a.config.window = -1; }},
      {"negative soft cap", "softmax_scale is 0.25 (> 0 and finite), window 0 (>= 0),",
       [](Arguments& a) { a.config.soft_cap = -1.0f; }},
      {"rotary wider than a head", "rotary_dim is 18", [](Arguments& a) { a.config.rope.rotary_dim = 18; }},
      {"odd rotary", "rotary_dim is 7", [](Arguments& a) { a.config.rope.rotary_dim = 7; }}};
  check_bad_calls({}, {.kvp = 2, .tpa = 2}, calls);
}

TEST_CASE("Bad weights of a dense layer are refused alike on every rank") {
  const std::vector<BadCall> calls{
      {"output projection of all heads", "the output projection is [32, 64]",
       [](Arguments& a) { a.gqa().o.cols *= 2; }},
      {"no output projection", "the output projection is empty, [0, 0]",
       [](Arguments& a) { a.gqa().o = {}; }},
      {"qkv of another width", "qkv is [128, 33]", [](Arguments& a) { widen(a.gqa().qkv); }},
      {"qkv without values", "qkv is [112, 32]", [](Arguments& a) { a.gqa().qkv.rows -= 16; }},
      {"qkv bias of another width", "qkv_bias is [32, 32]",
       [](Arguments& a) { a.gqa().qkv_bias = a.gqa().o; }},
      {"head norm of another width", "q_norm is [1, 32]",
       [](Arguments& a) { a.gqa().q_norm = a.weights.input_norm; }},
      {"o bias of another width", "o_bias is [32, ", [](Arguments& a) { a.gqa().o_bias = a.gqa().o; }},
      {"o bias on each rank, which the sum would add as often", "o_bias",
       [](Arguments& a) {
         a.gqa().o_bias = a.weights.input_norm;
         if (a.shape.stage_rank == 0) widen(a.gqa().o_bias);  // the rank that may hold one is refused too
       }},
      {"down bias on each rank, which the sum would add as often", "down_bias",
       [](Arguments& a) {
         a.dense().down_bias = a.weights.input_norm;
         if (a.shape.stage_rank == 0) widen(a.dense().down_bias);
       }},
      {"qkv of fp8", "qkv is fp8_e4m3", [](Arguments& a) { a.gqa().qkv.dtype = DType::fp8_e4m3; }},
      {"down without a type", "the FFN is unknown",
       [](Arguments& a) { a.dense().down.dtype = static_cast<DType>(77); }},
      {"qkv between two elements", "bytes of its f32: copy it to aligned memory",
       [](Arguments& a) { a.gqa().qkv.data = static_cast<const std::byte*>(a.gqa().qkv.data) + 2; }},
      {"no input norm", "input_norm is empty, [0, 0]", [](Arguments& a) { a.weights.input_norm = {}; }},
      {"input norm without data", "input_norm is empty, [1, ",
       [](Arguments& a) { a.weights.input_norm.data = nullptr; }},
      {"post-attention norm of another width", "post_attention_norm is [1, 33]",
       [](Arguments& a) { widen(a.weights.post_attention_norm); }},
      {"gate and up of another width", "the FFN is [24, 33]", [](Arguments& a) { widen(a.dense().gate_up); }},
      {"gate and up of another part", "the FFN is [48, 32]",
       [](Arguments& a) { a.dense().gate_up.rows *= 2; }},
      {"down of another part", "the FFN is [32, 24]", [](Arguments& a) { a.dense().down.cols *= 2; }},
      {"down of another width", "the FFN is [31, 12]", [](Arguments& a) { a.dense().down.rows -= 1; }},
      {"gate bias of another width", "gate_up_bias is [1, 32]",
       [](Arguments& a) { a.dense().gate_up_bias = a.weights.input_norm; }},
      {"down bias of another width", "down_bias is [32, 12]",
       [](Arguments& a) { a.dense().down_bias = a.dense().down; }},
      {"experts in a dense model", "the layer holds experts but the model's num_experts is 0",
       [](Arguments& a) { a.weights.ffn = MoeWeights{}; }}};
  check_bad_calls({}, {.kvp = 2, .tpa = 2}, calls);
}

TEST_CASE("Bad arguments of a layer of latents and experts are refused alike on every rank") {
  check_bad_calls(
      LayerSpec::deepseek(true), {.kvp = 4, .ep = 2},
      {{"grouped weights", "the shape is MLA but the layer holds the other kind of",
        [](Arguments& a) { a.weights.attention = GqaWeights{}; }},
       {"cache of latents under a shape of keys and values", "1 latent heads of 24/16 as KVP rank ",
        [](Arguments& a) { a.shape.mla.reset(); }},
       {"no q_b", "q_b is empty, [0, 0]", [](Arguments& a) { a.mla().q_b = {}; }},
       {"no q_a_norm", "q_a_norm is empty, [0, 0]", [](Arguments& a) { a.mla().q_a_norm = {}; }},
       {"q_b of another latent", "q_b is [128, 23]", [](Arguments& a) { a.mla().q_b.cols -= 1; }},
       {"no qkv_a", "qkv_a is empty, [0, 0]", [](Arguments& a) { a.mla().qkv_a = {}; }},
       {"qkv_a of fewer rows", "qkv_a is [47, 32]", [](Arguments& a) { a.mla().qkv_a.rows -= 1; }},
       {"qkv_a of another width", "qkv_a is [48, 33]", [](Arguments& a) { widen(a.mla().qkv_a); }},
       {"qkv_a_bias of the latent alone", "qkv_a_bias is [1, 24]",
        [](Arguments& a) {
          a.mla().qkv_a_bias = {a.mla().o.data, DType::f32, 1, a.shape.mla->latent_dim()};
        }},
       {"no kv_a_norm", "kv_a_norm is empty, [0, 0]", [](Arguments& a) { a.mla().kv_a_norm = {}; }},
       {"w_uk of other dims", "w_uk is [128, 9]", [](Arguments& a) { a.mla().w_uk.cols += 1; }},
       {"w_uv of all heads", "w_uv is [96, 16]", [](Arguments& a) { a.mla().w_uv.rows *= 4; }},
       {"expand_k alone", "of expand_k and expand_v one alone is empty",
        [](Arguments& a) { a.mla().expand_v = {}; }},
       {"expand_v of some heads", "expand_v is [48, 16]", [](Arguments& a) { a.mla().expand_v.rows /= 2; }},
       {"expand_k of other dims", "expand_k is [64, 17]", [](Arguments& a) { a.mla().expand_k.cols += 1; }},
       {"room below zero", "mla_prefill.max_tokens is -1",
        [](Arguments& a) { a.config.mla_prefill.max_tokens = -1; }},
       {"output projection of other heads", "the output projection is [32, 12]",
        [](Arguments& a) { a.mla().o.cols /= 2; }},
       {"o bias of another width", "o_bias is [32, ", [](Arguments& a) { a.mla().o_bias = a.mla().o; }},
       {"other rope dims", "MLA has 8 nope, 10 rope and 12 value dims and a latent of 16",
        [](Arguments& a) { a.shape.mla->qk_rope_head_dim += 2; }},
       {"no nope dims", "MLA has 0 nope, 8 rope and 12 value dims and a latent of 16",
        [](Arguments& a) { a.shape.mla->qk_nope_head_dim = 0; }},
       {"room for more than all limits", "mla_prefill.max_tokens is 16777217; it must be in [0, ",
        [](Arguments& a) { a.config.mla_prefill.max_tokens = kMaxPageTokens + 1; }},
       {"rotary wider than rope", "rotary_dim is 10", [](Arguments& a) { a.config.rope.rotary_dim = 10; }},
       {"no frequencies", "rope.inverse_frequency is null",
        [](Arguments& a) { a.config.rope.inverse_frequency = nullptr; }},
       {"latent epsilon that is no number", "latent_norm_epsilon is nan",
        [](Arguments& a) { a.config.latent_norm_epsilon = std::nanf(""); }},
       {"scale of experts that is no number",
        "router.scoring is 1, which must be softmax (0) or sigmoid (1),",
        [](Arguments& a) { a.config.router.scale = std::nanf(""); }},
       {"scoring without a name", "router.scoring is 9, which must be softmax (0) or sigmoid (1),",
        [](Arguments& a) { a.config.router.scoring = static_cast<RouterScoring>(9); }},
       {"router of fewer experts", "the router is [7, 32]", [](Arguments& a) { a.moe().router.rows -= 1; }},
       {"an expert too few", "the layer holds 3 experts", [](Arguments& a) { a.moe().experts.pop_back(); }},
       {"an expert of another part", "a routed expert is [32, 16]",
        [](Arguments& a) { a.moe().experts[1].down.cols *= 2; }},
       {"an expert of another width", "a routed expert is [16, 33]",
        [](Arguments& a) { a.moe().experts[0].gate_up.cols += 1; }},
       {"an expert without a type", "a routed expert is unknown",
        [](Arguments& a) { a.moe().experts[0].down.dtype = static_cast<DType>(77); }},
       {"shared expert of another part", "the shared expert is [24, 32]",
        [](Arguments& a) { a.moe().shared.gate_up.rows *= 2; }},
       {"no shared expert", "the shared expert is empty, [0, 0]", [](Arguments& a) { a.moe().shared = {}; }},
       {"top_k of zero", "top_k is 0; it must be in [1, 4], the experts of the kept groups",
        [](Arguments& a) { a.shape.top_k = 0; }},
       {"top_k beyond the kept groups", "top_k is 5; it must be in [1, 4], the experts of the kept groups",
        [](Arguments& a) { a.shape.top_k = 5; }},
       {"groups that do not divide", "the router keeps 2 of 3 groups of 8 experts",
        [](Arguments& a) { a.config.router.num_groups = 3; }},
       {"more groups kept than there are", "the router keeps 5 of 4 groups of 8 experts",
        [](Arguments& a) { a.config.router.groups_kept = 5; }},
       {"a dense layer of no width", "the FFN is empty, [0, 0]",
        [](Arguments& a) { a.weights.ffn = DenseFfnWeights{}; }}});
  LayerSpec without_query_lora = LayerSpec::deepseek(false);
  without_query_lora.q_lora = 0;
  check_bad_calls(
      without_query_lora, {.kvp = 2},
      {{"q_b without a query LoRA", "q_lora_rank is 0, but the layer holds q_a_norm [0, 0] and q_b",
        [](Arguments& a) { a.mla().q_b = a.mla().w_uk; }},
       {"q_a_norm without a query LoRA", "q_lora_rank is 0, but the layer holds q_a_norm [1, 16] and q_b",
        [](Arguments& a) { a.mla().q_a_norm = a.mla().kv_a_norm; }},
       {"qkv_a of the latent alone", "qkv_a is [24, 32]",
        [](Arguments& a) { a.mla().qkv_a.rows = a.shape.mla->latent_dim(); }}});
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

/// Makes a KVP communicator of a stage of KVP 2 and TPA 2.
using Split = std::function<cpu::LocalComm(cpu::LocalComm&, const RankCoordinates&)>;

/// Ways to make one that is not the topology's, with their names.
std::vector<std::pair<std::string_view, Split>> wrong_splits() {
  return {{"the stage itself", [](cpu::LocalComm& stage, const RankCoordinates&) { return stage; }},
          {"the group in reverse",
           [](cpu::LocalComm& stage, const RankCoordinates& at) {
             return stage.split(at.tpa_rank, -at.kvp_rank);
           }},
          {"the TPA group", [](cpu::LocalComm& stage,
                               const RankCoordinates& at) { return stage.split(at.kvp_rank, at.tpa_rank); }},
          {"a group of one",
           [](cpu::LocalComm& stage, const RankCoordinates&) { return stage.split(stage.rank(), 0); }}};
}

TEST_CASE("A KVP communicator that is not the topology's is refused with both ranks") {
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(3, layer.hidden, 9);
  const Topology topo({.kvp = 2, .tpa = 2}, shape_of(layer));
  for (const auto& [name, split] : wrong_splits()) {
    // The cache refuses it; with a cache of the right group, decode_layer() does.
    for (const bool has_own_cache : {false, true}) {
      const RankOutcomes outcomes = run_ranks(4, [&, &make = split](cpu::LocalComm& comm) {
        CpuBackend wrong(comm, make(comm, topo.stage_coordinates(comm.rank())));
        auto right = make_backend<CpuBackend>(topo, comm);
        LayerRank<CpuBackend> rank(has_own_cache ? right : wrong, topo, layer, script, {.hop_b_slices = 2});
        decode_over(*rank.layer_options().exchange, wrong, topo, rank, script);
      });
      CAPTURE(name, has_own_cache, outcomes.all_messages());
      CHECK(outcomes.code(1) == ErrorCode::invalid_argument);
      CHECK_THAT(outcomes.message(1),
                 ContainsSubstring(has_own_cache ? "decode_layer: the KVP communicator has rank "
                                                 : "ShardedKVCache: the KVP communicator has rank "));
    }
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

/// Checks that each of the ranks of KVP 2 and TPA 2 refuses a layer over an exchange whose spec
/// `change(spec)` has changed. `words(rank)` is a part of its message.
template <class Change, class Words>
void check_exchange_is_refused(const Change& change, const Words& words) {
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(3, layer.hidden, 9);
  const Topology topo({.kvp = 2, .tpa = 2}, shape_of(layer));
  const RankOutcomes outcomes = run_ranks(4, [&](cpu::LocalComm& comm) {
    auto backend = make_backend<CpuBackend>(topo, comm);
    LayerRank<CpuBackend> rank(backend, topo, layer, script, {});
    KvpAllToAllSpec spec = KvpAllToAllSpec::of_layers(topo.rank_shape(comm.rank()), script.max_step_tokens(),
                                                      /*max_slices=*/4);
    change(spec);
    KvpAllToAll<CpuBackend> exchange(backend, spec);
    decode_over(exchange, backend, topo, rank, script);
  });
  for (int r = 0; r < 4; ++r) {
    CAPTURE(r, outcomes.message(r));
    CHECK(outcomes.code(r) == ErrorCode::invalid_argument);
    CHECK_THAT(outcomes.message(r), ContainsSubstring(words(r)));
  }
}

TEST_CASE("An exchange that was built for another KVP group is refused") {
  check_exchange_is_refused(
      [](KvpAllToAllSpec& spec) { spec.group = 2; },
      [](int rank) { return "built for KVP group 2, this rank has TPA rank " + std::to_string(rank % 2); });
}

TEST_CASE("An exchange that was built for fewer slices than HopB is refused") {
  check_exchange_is_refused([](KvpAllToAllSpec& spec) { spec.max_slices = 3; },
                            [](int) { return std::string("give KvpAllToAllSpec::max_slices as many"); });
}

TEST_CASE("An exchange that was built for fewer tokens, or for other heads, is refused") {
  const auto says = [](std::string built) {
    return [built](int) {
      return "the exchange was built for " + built + "; this step has 15 tokens of 4 heads of 16";
    };
  };
  check_exchange_is_refused([](KvpAllToAllSpec& spec) { spec.max_tokens = 14; },
                            says("14 tokens of 4 heads of 16"));
  check_exchange_is_refused([](KvpAllToAllSpec& spec) { spec.num_query_heads = 8; },
                            says("15 tokens of 8 heads of 16"));
  check_exchange_is_refused([](KvpAllToAllSpec& spec) { spec.value_dim = 32; },
                            says("15 tokens of 4 heads of 32"));
}

TEST_CASE("An exchange of another KVP width is refused, and without KVP its group and slices do not count") {
  const oracle::Layer layer = random_layer({}, 8);
  const Script script = ragged_script(3, layer.hidden, 9);
  for (const int kvp : {2, 1}) {
    const Topology topo({.kvp = kvp, .tpa = 4 / kvp}, shape_of(layer));
    const RankOutcomes outcomes = run_ranks(4, [&](cpu::LocalComm& comm) {
      auto backend = make_backend<CpuBackend>(topo, comm);
      LayerRank<CpuBackend> rank(backend, topo, layer, script, {});
      CpuBackend lone(comm, comm.split(comm.rank(), 0));
      KvpAllToAllSpec spec =
          KvpAllToAllSpec::of_layers(topo.rank_shape(comm.rank()), script.max_step_tokens(), 1);
      spec.group = 77;
      KvpAllToAll<CpuBackend> exchange(lone, spec);
      decode_over(exchange, backend, topo, rank, script);
      backend.synchronize(rank.stream());
    });
    for (int r = 0; r < 4; ++r) {
      CAPTURE(kvp, r);
      if (kvp == 1) {
        CHECK(outcomes.message(r) == "");
      } else {
        CHECK_THAT(outcomes.message(r),
                   ContainsSubstring("the exchange was built for KVP 1, the shape is KVP 2"));
      }
    }
  }
}

TEST_CASE("A backend without one of its communicators is refused") {
  struct LoneBackend : CpuBackend {
    StageComms<cpu::LocalComm> comms() { return given; }
    StageComms<cpu::LocalComm> given{};
  };
  LoneBackend backend;
  const auto failure = [&] {
    return required_failure([&] {
      decode_layer(backend, RankShape{}, LayerConfig{}, LayerWeights{}, KvView{}, Batch{}, {}, {},
                   backend.create_stream());
    });
  };
  CHECK(failure().says("decode_layer: the backend's comms().stage is null"));
  cpu::LocalComm stage = cpu::LocalComm::create_group(1).front();
  backend.given.stage = &stage;
  CHECK(failure().says("decode_layer: the backend's comms().kvp is null"));
}

TEST_CASE("What a layer writes may lie side by side, and may not share a byte") {
  const std::vector<std::byte> memory(32);
  const std::span<const std::byte> all(memory);
  const auto is_refused = [&](std::span<const std::byte> x, std::span<const std::byte> y) {
    return failure_of([&] { detail::check_apart("x", x, "y", y); }).has_value();
  };
  const auto are_refused = [&](std::span<const std::byte> x, std::span<const std::byte> y) {
    CHECK(is_refused(x, y) == is_refused(y, x));
    return is_refused(x, y);
  };
  CHECK_FALSE(are_refused(all.first(16), all.last(16)));
  CHECK(are_refused(all.first(17), all.last(16)));
  CHECK(are_refused(all, all.subspan(8, 4)));
  CHECK_FALSE(are_refused(all, all.subspan(8, 0)));
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

TEST_CASE("A rank that takes one token for another position is out of step, in whatever slice it is") {
  const oracle::Layer layer = random_layer({}, 8);
  Script script;
  script.sequences = 3;
  for (std::uint32_t s = 0; s < 2; ++s)
    script.steps.push_back({{1, 1, 1}, {0, 0, 0}, RandomMatrices(s).vector(3 * layer.hidden, 1.0)});
  const Topology topo({.kvp = 2, .tpa = 2}, shape_of(layer));
  for (const int slices : {1, 3}) {
    for (const std::size_t token : {0u, 1u, 2u}) {
      const RankOutcomes outcomes = run_ranks(4, [&](cpu::LocalComm& comm) {
        auto backend = make_backend<CpuBackend>(topo, comm);
        LayerRank<CpuBackend> rank(backend, topo, layer, script, {.hop_b_slices = slices});
        rank.run(script.steps[0]);
        rank.prepare(script.steps[1]);
        if (comm.rank() == 3) {
          backend.synchronize(rank.stream());
          const Batch batch = rank.batch().batch();
          std::vector<std::int64_t> positions(batch.positions, batch.positions + 3);
          --positions[token];
          const std::vector<std::int32_t> slots(batch.sequence_slots, batch.sequence_slots + 3);
          rank.batch().set(std::vector<std::int32_t>{0, 1, 2, 3}, positions, slots, rank.stream());
        }
        rank.launch();
        rank.finish(script.steps[1]);
      });
      CAPTURE(slices, token, outcomes.all_messages());
      check_out_of_step(outcomes);
    }
  }
}

}  // namespace
}  // namespace helix::test
