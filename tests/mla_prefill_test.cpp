// SPDX-License-Identifier: Apache-2.0
// Latent attention of long chunks with expanded keys and values: compared with an unsharded layer in double
// precision, and when expansion is chosen.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <helix/decode_layer.hpp>
#include <helix/mla_prefill.hpp>

#include "support/catch.hpp"
#include "support/layer_fixture.hpp"
#include "support/oracle.hpp"
#include "support/ranks.hpp"
#include "support/recording_backend.hpp"
#include "support/reference_backend.hpp"
#include "support/sanitizers.hpp"

namespace helix::test {
namespace {

constexpr MlaShape kDeepSeek{.q_lora_rank = 1536,
                             .kv_lora_rank = 512,
                             .qk_nope_head_dim = 128,
                             .qk_rope_head_dim = 64,
                             .v_head_dim = 128};

/// The last `tokens` tokens of a sequence of `length` on one of `kvp` ranks.
MlaChunk chunk_of(std::int64_t tokens, std::int64_t length, int kvp = 1) {
  return {.tokens = tokens, .length = length, .local_tokens = length / kvp, .kvp = kvp};
}

LayerSpec latent_spec() {
  LayerSpec spec;
  spec.is_mla = true;
  spec.is_interleaved = true;
  return spec;
}

/// Steps with the given numbers of tokens per sequence; some tokens are rejected after the draft step.
Script script_of(std::vector<std::vector<std::int64_t>> steps, std::int64_t hidden) {
  Script script;
  script.sequences = static_cast<std::int64_t>(steps.front().size());
  for (std::vector<std::int64_t>& counts : steps) {
    Step step;
    const bool has_drafts = std::ranges::all_of(counts, [](std::int64_t count) { return count == 3; });
    step.rejected.assign(counts.size(), has_drafts ? 2 : 0);
    step.counts = std::move(counts);
    step.hidden = RandomMatrices(static_cast<std::uint32_t>(70 + script.steps.size()))
                      .vector(step.num_tokens() * hidden, 1.0);
    script.steps.push_back(std::move(step));
  }
  return script;
}

/// Ragged prefill, one token per sequence, chunks after a context together with decode steps, drafts, and a
/// last chunk.
Script mixed_script(std::int64_t hidden) {
  return script_of({{37, 1, 0, 9}, {1, 1, 1, 1}, {40, 5, 1, 33}, {3, 3, 3, 3}, {0, 6, 70, 0}}, hidden);
}

/// Number of calls of `name` in each step of a script on one or more ranks, counted on rank 0.
std::vector<std::size_t> calls_of(std::string_view name, const Script& script, int kvp,
                                  const MlaPrefill& prefill, const LayerSpec& spec = latent_spec()) {
  const oracle::Layer layer = random_layer(spec, 5);
  const Topology topo({.kvp = kvp}, shape_of(layer));
  std::vector<std::size_t> counts;
  run_ranks_or_throw(kvp, [&](cpu::LocalComm& comm) {
    auto backend = make_backend<RecordingBackend>(topo, comm);
    LayerRank<RecordingBackend> rank(backend, topo, layer, script, {.mla_prefill = prefill});
    for (const Step& step : script.steps) {
      backend.recording().clear();
      rank.run(step);
      const auto calls = backend.recording().calls();
      if (comm.rank() == 0)
        counts.push_back(static_cast<std::size_t>(
            std::ranges::count_if(calls, [&](const Call& call) { return call.name == name; })));
    }
  });
  return counts;
}

TEST_CASE("work of both forms is what is multiplied") {
  // 3 tokens at the end of 10 see 8 + 9 + 10 keys.
  const MlaShape tiny{.kv_lora_rank = 5, .qk_nope_head_dim = 3, .qk_rope_head_dim = 2, .v_head_dim = 4};
  CHECK(absorbed_work(tiny, chunk_of(3, 10)) == 27 * (7 + 5) + 3 * 5 * (3 + 4));
  CHECK(expanded_work(tiny, chunk_of(3, 10)) == 10 * 5 * (3 + 4) + 27 * (5 + 4));
  CHECK(absorbed_work(tiny, chunk_of(3, 10, 2)) == 27 * (7 + 5) / 2.0 + 3 * 5 * (3 + 4 / 2.0));
  CHECK(expanded_work(tiny, chunk_of(3, 10, 2)) == 5 * 5 * (3 + 4) + 27 * (5 + 4) / 2.0);
}

TEST_CASE("long chunks of DeepSeek-V3 are expanded, short ones and what the workspace cannot hold are not") {
  constexpr std::int64_t kRoom = 1 << 18;
  const MlaPrefill automatic{.max_tokens = kRoom};
  const auto expands_of = [&](const MlaPrefill& prefill, const MlaChunk& chunk) {
    return expands(prefill, kDeepSeek, chunk);
  };
  CHECK(expands_of(automatic, chunk_of(32, 32)));
  CHECK_FALSE(expands_of(automatic, chunk_of(31, 31)));
  CHECK(expands_of(automatic, chunk_of(4096, 4096)));
  CHECK_FALSE(expands_of(automatic, chunk_of(160, 100000)));
  CHECK(expands_of(automatic, chunk_of(180, 100000)));
  CHECK(expands_of(automatic, chunk_of(180, 800000, 8)));
  CHECK_FALSE(expands_of(automatic, chunk_of(1, 100000)));
  CHECK(expands_of(automatic, chunk_of(512, kRoom)));
  CHECK_FALSE(expands_of(automatic, chunk_of(512, kRoom + 1)));
  CHECK(expands_of(automatic, chunk_of(512, 8 * kRoom, 8)));
  CHECK_FALSE(expands_of(MlaPrefill{}, chunk_of(4096, 4096)));

  // With a GPU's costs, few heads need longer chunks.
  const auto expands_at = [&](std::int64_t heads, std::int64_t tokens) {
    MlaChunk chunk = chunk_of(tokens, 4352);
    chunk.heads = heads;
    return expands(automatic, kDeepSeek, chunk,
                   {.expanded_time = 1.4, .launch_work = 1.1e10, .absorbed_keys = 384.0});
  };
  CHECK_FALSE(expands_at(128, 256));
  CHECK(expands_at(128, 512));
  CHECK_FALSE(expands_at(16, 384));
  CHECK(expands_at(16, 512));

  const MlaPrefill expanded{.form = MlaForm::expanded, .max_tokens = 100};
  CHECK(expands_of(expanded, chunk_of(1, 100)));
  CHECK_FALSE(expands_of(expanded, chunk_of(1, 101)));
  CHECK_FALSE(expands_of(expanded, chunk_of(0, 50)));
  CHECK_FALSE(expands_of(expanded, chunk_of(1, 0)));  // only padding
  CHECK_FALSE(expands_of({.form = MlaForm::absorbed, .max_tokens = kRoom}, chunk_of(4096, 4096)));

  // Values wider than latents do not fit into the exchange. With KVP = 1 there is no exchange.
  MlaShape wide = kDeepSeek;
  wide.v_head_dim = 513;
  CHECK(expands(expanded, wide, chunk_of(50, 50)));
  CHECK_FALSE(expands(expanded, wide, chunk_of(50, 50, 2)));
  wide.v_head_dim = 512;
  CHECK(expands(expanded, wide, chunk_of(50, 50, 2)));
}

/// A backend on which an expanded chunk costs launches.
struct LaunchingBackend : cpu::Backend<cpu::LocalComm> {
  static constexpr MlaPrefillCosts kMlaPrefillCosts{.launch_work = 1e8};
};

TEST_CASE("the form of a sequence follows from its queries, its length and the heads of the rank") {
  // Of 170 queries, an expansion saves 11.2 million multiply-adds a head less 512 for each token: 3.5 million
  // after 15,000 tokens, none after 30,000.
  LayerConfig config;
  config.mla_prefill.max_tokens = 1 << 18;
  const float weight = 0.0f;
  MlaWeights weights;
  weights.expand_k = {&weight, DType::f32, 1, 1};
  const std::vector<std::int32_t> offsets{0, 170, 340, 510};
  const std::vector<std::int64_t> lengths{15000, 30000, 14000};
  const Batch batch{.query_offsets_host = offsets, .lengths_host = lengths};
  const KvLayout layout(1, 16);
  RankShape shape;
  shape.mla = kDeepSeek;
  using Plain = cpu::Backend<cpu::LocalComm>;
  for (const std::int64_t heads : {1, 128}) {
    CAPTURE(heads);
    shape.query_heads = heads;
    for (std::int64_t b = 0; b < 3; ++b) {
      const std::int64_t length = b == 1 ? 0 : lengths[static_cast<std::size_t>(b)];
      CHECK(detail::expanded_tokens<Plain>(shape, config, weights, layout, batch, b) == length);
      CHECK(detail::expanded_tokens<LaunchingBackend>(shape, config, weights, layout, batch, b) ==
            (heads == 1 ? 0 : length));
    }
    CHECK(detail::most_expanded_tokens<Plain>(shape, config, weights, layout, batch) == 15000);
  }
}

TEST_CASE("a batch buffer of a size that cannot be is refused with the value") {
  cpu::Backend<cpu::LocalComm> backend;
  using Buffer = BatchBuffer<cpu::Backend<cpu::LocalComm>>;
  for (const std::int64_t size : {std::int64_t{-1}, std::int64_t{1} << 33, std::int64_t{1} << 62,
                                  std::numeric_limits<std::int64_t>::max()}) {
    CAPTURE(size);
    CHECK_THROWS_WITH(Buffer(backend, size, 4),
                      Catch::Matchers::ContainsSubstring("max_sequences is " + std::to_string(size)));
    CHECK_THROWS_WITH(Buffer(backend, 4, size),
                      Catch::Matchers::ContainsSubstring("max_tokens is " + std::to_string(size)));
  }
}

TEST_CASE("a batch takes no position or slot that no cache has") {
  cpu::Backend<cpu::LocalComm> backend;
  const auto stream = backend.create_stream();
  BatchBuffer<cpu::Backend<cpu::LocalComm>> buffer(backend, 4, 8);
  const std::vector<std::int32_t> offsets{0, 1, 2};
  const auto set = [&](std::int64_t position, std::int32_t slot) {
    buffer.set(offsets, std::vector<std::int64_t>{3, position}, std::vector<std::int32_t>{0, slot}, stream);
  };
  CHECK_NOTHROW(set(kMaxTokens - 1, 1));
  CHECK_THROWS_WITH(set(std::numeric_limits<std::int64_t>::max(), 1),
                    Catch::Matchers::ContainsSubstring(
                        "positions[1] is 9223372036854775807; it must be in [0, 1099511627776)"));
  CHECK_THROWS_WITH(set(kMaxTokens, 1), Catch::Matchers::ContainsSubstring("positions[1] is 1099511627776"));
  CHECK_THROWS_WITH(set(-5, 1), Catch::Matchers::ContainsSubstring("positions[1] is -5"));
  CHECK_THROWS_WITH(set(-1, -3), Catch::Matchers::ContainsSubstring("slots[1] is -3; slots count from 0"));
  CHECK_NOTHROW(set(-1, 1));
  backend.synchronize(stream);
}

TEST_CASE("a batch buffer that was moved from is refused, and the one that it was moved to goes on") {
  cpu::Backend<cpu::LocalComm> backend;
  const auto stream = backend.create_stream();
  BatchBuffer<cpu::Backend<cpu::LocalComm>> old(backend, 1, 1);
  const auto set = [&](auto& buffer) {
    buffer.set(std::vector<std::int32_t>{0, 1}, std::vector<std::int64_t>{3}, std::vector<std::int32_t>{0},
               stream);
  };
  set(old);
  auto buffer = std::move(old);
  CHECK_THROWS_WITH(set(old), Catch::Matchers::ContainsSubstring("BatchBuffer: this object was moved from"));
  CHECK_THROWS_AS(old.advance(stream), Error);
  CHECK_THROWS_AS(old.batch(), Error);
  set(buffer);
  CHECK(buffer.batch().num_tokens() == 1);
  backend.synchronize(stream);
}

TEST_CASE("a batch knows the lengths of its sequences until it advances") {
  cpu::Backend<cpu::LocalComm> backend;
  const auto stream = backend.create_stream();
  BatchBuffer<cpu::Backend<cpu::LocalComm>> buffer(backend, 4, 8);
  const std::vector<std::int32_t> offsets{0, 3, 3, 5, 7};
  const std::vector<std::int64_t> positions{4, 5, -1, -1, -1, 9, 10};
  const std::vector<std::int32_t> slots{0, 1, 2, 3};
  buffer.set(offsets, positions, slots, stream);
  const Batch batch = buffer.batch();
  CHECK(std::ranges::equal(batch.lengths_host, std::vector<std::int64_t>{6, 0, 0, 11}));
  CHECK(std::ranges::equal(batch.slice(2, 2).lengths_host, std::vector<std::int64_t>{0, 11}));
  buffer.advance(stream);
  CHECK(buffer.batch().lengths_host.empty());
  CHECK(buffer.batch().slice(1, 2).lengths_host.empty());
  buffer.set(offsets, positions, slots, stream);
  CHECK(buffer.batch().lengths_host.size() == 4);
  buffer.set(offsets, positions, slots, stream, /*tells_lengths=*/false);
  CHECK(buffer.batch().lengths_host.empty());
  backend.synchronize(stream);
}

TEST_CASE("both forms of latent attention equal the oracle under KVP, for any chunks and pages") {
  for (const bool has_query_latent : {true, false}) {
    LayerSpec spec = latent_spec();
    if (!has_query_latent) spec.q_lora = 0;
    const oracle::Layer layer = random_layer(spec, 21);
    const Script script = mixed_script(spec.hidden);
    const Expected expected = run_oracle(layer, script);
    for (const int kvp : {1, 2, 4, 8}) {
      const Topology topo({.kvp = kvp}, shape_of(layer));
      for (const std::int64_t chunk : {1, 3, 16}) {
        if (kIsSanitized && chunk != 3) continue;
        for (const std::int64_t page_tokens : {1, 16, 64}) {
          for (const MlaForm form : {MlaForm::absorbed, MlaForm::expanded, MlaForm::automatic}) {
            for (const int slices : {1, 3}) {
              if (slices > 1 && (page_tokens > 1 || kvp == 1)) continue;
              CAPTURE(has_query_latent, kvp, chunk, page_tokens, static_cast<int>(form), slices);
              const std::vector<RankResult> ranks =
                  run_script(topo, layer, script,
                             {.chunk = chunk,
                              .page_tokens = page_tokens,
                              .hop_b_slices = slices,
                              .mla_prefill = {.form = form, .max_tokens = 128}});
              CHECK(error_of(ranks.front(), expected) <= kLayerTolerance);
              for (const RankResult& rank : ranks) CHECK(rank.hidden == ranks.front().hidden);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("chunks of DeepSeek's head sizes behind a context equal the oracle, across boxes of rows") {
  LayerSpec spec = latent_spec();
  spec.query_heads = 4;
  spec.kv_lora = 512;
  spec.nope = spec.value = 128;
  spec.rope = 64;
  const oracle::Layer layer = random_layer(spec, 4);
  const Script script = script_of({{63, 1}, {2, 64}}, spec.hidden);
  const Expected expected = run_oracle(layer, script);
  for (const int kvp : {1, 2, 4}) {
    const Topology topo({.kvp = kvp}, shape_of(layer));
    for (const MlaForm form : {MlaForm::absorbed, MlaForm::expanded, MlaForm::automatic}) {
      CAPTURE(kvp, static_cast<int>(form));
      const MlaPrefill prefill{.form = form, .max_tokens = 512};
      const auto ranks =
          run_script(topo, layer, script, {.chunk = 16, .page_tokens = 16, .mla_prefill = prefill});
      CHECK(error_of(ranks.front(), expected) <= kLayerTolerance);
      for (const RankResult& rank : ranks) CHECK(rank.hidden == ranks.front().hidden);
    }
  }
}

TEST_CASE("expanded latents of 16 bits and fp8 give what absorbed ones of the same cache do") {
  LayerSpec spec = latent_spec();
  spec.kv_lora = 20;  // a multiple of four, as fp8_ds_mla needs
  const oracle::Layer layer = random_layer(spec, 33);
  const Script script = mixed_script(spec.hidden);
  for (const DType dtype : {DType::bf16, DType::f16, DType::fp8_e4m3, DType::fp8_ds_mla}) {
    for (const int kvp : {1, 4}) {
      CAPTURE(to_string(dtype), kvp);
      const Topology topo({.kvp = kvp}, shape_of(layer));
      const auto run = [&](MlaForm form) {
        return run_script(topo, layer, script,
                          {.chunk = 3, .kv_dtype = dtype, .mla_prefill = {.form = form, .max_tokens = 128}})
            .front();
      };
      const RankResult absorbed = run(MlaForm::absorbed);
      Expected expected;
      for (const std::vector<float>& step : absorbed.hidden)
        expected.hidden.emplace_back(step.begin(), step.end());
      CHECK(error_of(run(MlaForm::expanded), expected) <= kLayerTolerance);
    }
  }
}

TEMPLATE_TEST_CASE("Other models of Backend expand latents", "", ReferenceBackend, RecordingBackend) {
  const oracle::Layer layer = random_layer(LayerSpec::deepseek(true), 8);
  const Script script = mixed_script(layer.hidden);
  const Expected expected = run_oracle(layer, script);
  const Topology topo({.kvp = 4, .ep = 2}, shape_of(layer));
  const auto ranks = run_script<TestType>(
      topo, layer, script,
      {.chunk = 3, .hop_b_slices = 2, .mla_prefill = {.form = MlaForm::expanded, .max_tokens = 128}});
  for (const RankResult& rank : ranks) {
    CHECK(error_of(rank, expected) <= kLayerTolerance);
    CHECK(rank.hidden == ranks.front().hidden);
  }
}

TEST_CASE("the sequences that are expanded are those that the choice names") {
  using Counts = std::vector<std::size_t>;
  const Script script = mixed_script(latent_spec().hidden);
  for (const int kvp : {1, 2}) {
    const auto reads = [&](const MlaPrefill& prefill) {
      return calls_of("read_latents", script, kvp, prefill);
    };
    CAPTURE(kvp);
    CHECK(reads({}) == Counts{0, 0, 0, 0, 0});
    CHECK(reads({.form = MlaForm::absorbed, .max_tokens = 128}) == Counts{0, 0, 0, 0, 0});
    CHECK(reads({.form = MlaForm::expanded, .max_tokens = 128}) == Counts{3, 4, 4, 4, 2});
    // Chunks of 37 tokens, of 40 and 33, and of 70.
    CHECK(reads({.max_tokens = 128}) == Counts{1, 0, 2, 0, 1});
    for (const std::int64_t window : {1, 200}) {
      LayerSpec spec = latent_spec();
      spec.window = window;
      CHECK(calls_of("read_latents", script, kvp, {.form = MlaForm::expanded, .max_tokens = 128}, spec) ==
            Counts{0, 0, 0, 0, 0});  // pages before a window may be gone
    }
    // The chunk of 40 makes 78 tokens, which is 39 on each of two ranks; the chunk of 70 makes 73, which is
    // 37.
    CHECK(reads({.max_tokens = kvp == 1 ? 77 : 38}) == Counts{1, 0, 1, 0, 1});
  }
}

TEST_CASE("a layer without weights that expand, or a batch that knows no lengths, attends absorbed") {
  const oracle::Layer layer = random_layer(latent_spec(), 5);
  const Script script = script_of({{40, 33}}, layer.hidden);
  const Topology topo({}, shape_of(layer));
  run_ranks_or_throw(1, [&](cpu::LocalComm& comm) {
    auto backend = make_backend<RecordingBackend>(topo, comm);
    LayerRank<RecordingBackend> rank(backend, topo, layer, script,
                                     {.mla_prefill = {.form = MlaForm::expanded, .max_tokens = 128}});
    rank.prepare(script.steps.front());
    const auto reads = [&](bool has_weights, bool has_lengths) {
      LayerWeights weights = rank.weights();
      auto& mla = std::get<MlaWeights>(weights.attention);
      if (!has_weights) mla.expand_k = mla.expand_v = {};
      Batch batch = rank.batch().batch();
      if (!has_lengths) batch.lengths_host = {};
      backend.recording().clear();
      decode_layer(backend, topo.rank_shape(0), rank.config(), weights, rank.cache().layer(0), batch,
                   rank.hidden(), rank.layer_options(), rank.stream());
      return std::ranges::count(backend.recording().calls(), "read_latents", &Call::name);
    };
    CHECK(reads(true, true) == 2);
    CHECK(reads(false, true) == 0);
    CHECK(reads(true, false) == 0);
  });
}

TEST_CASE("without a query latent there is no norm of it, and no second product") {
  const auto calls = [](std::string_view name, std::int64_t q_lora) {
    LayerSpec spec = latent_spec();
    spec.q_lora = q_lora;
    return calls_of(name, script_of({{1, 1}}, spec.hidden), 1, {}, spec).front();
  };
  CHECK(calls("rms_norm", 16) == calls("rms_norm", 0) + 1);
  CHECK(calls("linear", 16) == calls("linear", 0) + 1);
}

TEST_CASE("expanded parts of a step take messages of values, absorbed ones of latents") {
  const Script script = script_of({{1, 40, 1, 1, 40}}, latent_spec().hidden);
  for (const int kvp : {1, 2}) {
    CAPTURE(kvp);
    const MlaPrefill prefill{.max_tokens = 64};
    const std::size_t exchanges = kvp == 1 ? 0 : 4;  // one token, 40, two of one token, 40
    CHECK(calls_of("partial_attention", script, kvp, prefill) == std::vector<std::size_t>{4});
    CHECK(calls_of("kvp.all_to_all", script, kvp, prefill) == std::vector<std::size_t>{exchanges});
  }
}

TEST_CASE("the workspace grows by what is expanded, and by nothing without room") {
  cpu::Backend<cpu::LocalComm> backend;
  const oracle::Layer layer = random_layer(latent_spec(), 3);
  const RankShape shape = Topology({}, shape_of(layer)).rank_shape(0);
  const auto bytes = [&](const MlaPrefill& prefill) {
    return decode_layer_workspace_bytes(backend, shape, 40, LayerInput::hidden, prefill);
  };
  CHECK(bytes({}) == bytes({.form = MlaForm::absorbed, .max_tokens = 1000}));
  const std::int64_t token =
      layer.kv_lora + layer.rope + layer.query_heads * (layer.nope + layer.rope + layer.value);
  CHECK(bytes({.max_tokens = 2048}) - bytes({.max_tokens = 1024}) ==
        static_cast<std::size_t>(1024 * token * 4));
  CHECK(bytes({.max_tokens = 1000}) == bytes({.max_tokens = 1024}));  // whole boxes of rows
  CHECK(bytes({.max_tokens = 1024}) > bytes({}) + static_cast<std::size_t>(1024 * token * 4));
}

TEST_CASE("the workspace of steps and expansions beyond all limits is refused with the value") {
  cpu::Backend<cpu::LocalComm> backend;
  const oracle::Layer layer = random_layer(latent_spec(), 3);
  const RankShape shape = Topology({}, shape_of(layer)).rank_shape(0);
  const auto refuses = [&](std::int64_t tokens, std::int64_t expanded) {
    const MlaPrefill prefill{.max_tokens = expanded};
    const std::string numbers =
        "max_tokens is " + std::to_string(tokens) + " and mla_prefill.max_tokens " + std::to_string(expanded);
    CHECK_THROWS_WITH(decode_layer_workspace_bytes(backend, shape, tokens, LayerInput::hidden, prefill),
                      Catch::Matchers::ContainsSubstring(numbers));
  };
  refuses(-1, 0);
  refuses(kMaxStepTokens + 1, 0);
  refuses(1, -1);
  refuses(1, kMaxPageTokens + 1);
  CHECK_NOTHROW(decode_layer_workspace_bytes(backend, shape, kMaxStepTokens));
}

}  // namespace
}  // namespace helix::test
