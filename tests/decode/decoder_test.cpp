// SPDX-License-Identifier: Apache-2.0
// The decoder compared with transformers' outputs, under every legal topology and with many combinations of
// options.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "decode/golden.hpp"
#include "generate/generate.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"
#include "support/process.hpp"

namespace helix::test {
namespace {

using Catch::Matchers::ContainsSubstring;
using decode::GenerationRequest;
using decode::GenerationResult;
using decode::run_local;
using decode::TokenIds;

/// One value for each option that must not change a token.
struct Variant {
  std::size_t stage = 0;  // index into the legal stages
  std::int64_t chunk = 16;
  std::int64_t page_tokens = 64;
  int hop_b_slices = 1;
  std::int64_t draft_tokens = 1;
  int pp = 1;
  int dp = 1;
};

/// All variants with at most 16 ranks.
std::vector<Variant> all_variants(const std::vector<TopologySpec>& stages) {
  std::vector<Variant> all;
  for (std::size_t stage = 0; stage < stages.size(); ++stage)
    for (std::int64_t chunk : {1, 3, 16, 64})
      for (std::int64_t page_tokens : {16, 64})
        for (int hop_b_slices : {1, 2, 4})
          for (std::int64_t draft_tokens : {1, 2, 4, 8})
            for (int pp : {1, 2})
              for (int dp : {1, 2}) {
                if (stages[stage].kvp * stages[stage].tpa * pp * dp > 16) continue;
                all.push_back({stage, chunk, page_tokens, hop_b_slices, draft_tokens, pp, dp});
              }
  return all;
}

/// A subset of `all` that contains every pair of option values that occurs in `all`. Greedy and
/// deterministic.
std::vector<Variant> pairwise(const std::vector<Variant>& all) {
  const auto pairs_of = [](const Variant& v) {
    const std::vector<std::int64_t> values = {static_cast<std::int64_t>(v.stage),
                                              v.chunk,
                                              v.page_tokens,
                                              v.hop_b_slices,
                                              v.draft_tokens,
                                              v.pp,
                                              v.dp};
    std::vector<std::array<std::int64_t, 4>> pairs;
    for (std::size_t i = 0; i < values.size(); ++i)
      for (std::size_t j = i + 1; j < values.size(); ++j)
        pairs.push_back({static_cast<std::int64_t>(i), values[i], static_cast<std::int64_t>(j), values[j]});
    return pairs;
  };
  std::set<std::array<std::int64_t, 4>> missing;
  for (const Variant& v : all)
    for (const auto& pair : pairs_of(v)) missing.insert(pair);
  std::vector<Variant> chosen;
  while (!missing.empty()) {
    std::size_t best_count = 0;
    const Variant* best = nullptr;
    for (const Variant& v : all) {
      std::size_t count = 0;
      for (const auto& pair : pairs_of(v)) count += missing.count(pair);
      if (count > best_count) {
        best_count = count;
        best = &v;
      }
    }
    chosen.push_back(*best);
    for (const auto& pair : pairs_of(*best)) missing.erase(pair);
  }
  return chosen;
}

void check_variant(const ReferenceModel& model, const Golden& golden, const std::vector<TopologySpec>& stages,
                   const Variant& variant) {
  TopologySpec spec = stages[variant.stage];
  spec.pp = variant.pp;
  spec.dp = variant.dp;
  GenerationRequest request = golden_request(golden);
  request.chunk = variant.chunk;
  request.page_tokens = variant.page_tokens;
  request.hop_b_slices = variant.hop_b_slices;
  request.draft_tokens = variant.draft_tokens;
  if (variant.draft_tokens > 1) request.teacher = drafts_partly_wrong(golden);
  const Topology topo(spec, model.config.shape);
  INFO(describe(model.name, spec, request));
  const GenerationResult result = run_local(model.checkpoint, model.config, topo, request);
  CHECK(difference_from_golden(golden, result, topo.shape().vocab) == "");
}

void check_every_topology(const std::string& name) {
  const ReferenceModel model(name);
  const Golden golden = model.golden();
  const auto stages = legal_stages(model.config.shape);
  for (std::size_t stage = 0; stage < stages.size(); ++stage)
    check_variant(model, golden, stages, {.stage = stage});
}

void check_pairwise(const std::string& name) {
  const ReferenceModel model(name);
  const Golden golden = model.golden();
  const auto stages = legal_stages(model.config.shape);
  for (const Variant& variant : pairwise(all_variants(stages))) check_variant(model, golden, stages, variant);
}

void check_product(const std::string& name) {
  const ReferenceModel model(name);
  const Golden golden = model.golden();
  const auto stages = legal_stages(model.config.shape);
  for (const Variant& variant : all_variants(stages)) check_variant(model, golden, stages, variant);
}

void check_long(const std::string& name) {
  const ReferenceModel model(name);
  const Golden golden = model.golden_long();
  const auto stages = legal_stages(model.config.shape);
  for (std::size_t stage = 0; stage < stages.size(); ++stage)
    check_variant(model, golden, stages, {.stage = stage});
}

}  // namespace

TEST_CASE("one rank gives the golden tokens and logits", "[quick]") {
  const std::string name = GENERATE(from_range(kReferenceModels));
  const ReferenceModel model(name);
  const Golden golden = model.golden();
  check_variant(model, golden, {TopologySpec{}}, {});
}

TEST_CASE("every legal topology of llama-tiny gives the golden output") {
  check_every_topology("llama-tiny");
}
TEST_CASE("every legal topology of llama-tiny-16q8kv gives the golden output") {
  check_every_topology("llama-tiny-16q8kv");
}
TEST_CASE("every legal topology of deepseek-tiny gives the golden output") {
  check_every_topology("deepseek-tiny");
}
TEST_CASE("every legal topology of deepseek-tiny-fp8 gives the golden output") {
  check_every_topology("deepseek-tiny-fp8");
}
TEST_CASE("every legal topology of deepseek-v2-tiny gives the golden output") {
  check_every_topology("deepseek-v2-tiny");
}

TEST_CASE("prompts that attend expanded or absorbed give the golden output") {
  for (const char* name : {"deepseek-tiny", "deepseek-v2-tiny", "deepseek-tiny-fp8"}) {
    const ReferenceModel model(name);
    const Golden golden = model.golden();
    for (const int kvp : {1, 2, 4}) {
      for (const MlaForm form : {MlaForm::absorbed, MlaForm::expanded}) {
        for (const std::int64_t prefill_tokens : {5, 256}) {
          const TopologySpec spec{.kvp = kvp};
          const Topology topo(spec, model.config.shape);
          GenerationRequest request = golden_request(golden);
          request.chunk = 3;
          request.mla_prefill = form;
          request.prefill_tokens = prefill_tokens;
          INFO(describe(name, spec, request)
               << " form " << static_cast<int>(form) << " prefill " << prefill_tokens);
          const GenerationResult result = run_local(model.checkpoint, model.config, topo, request);
          CHECK(difference_from_golden(golden, result, topo.shape().vocab) == "");
        }
      }
    }
  }
}

TEST_CASE("every legal topology of llama-tiny gives the long golden output") {
  check_long("llama-tiny");
}
TEST_CASE("every legal topology of llama-tiny-16q8kv gives the long golden output") {
  check_long("llama-tiny-16q8kv");
}
TEST_CASE("every legal topology of deepseek-tiny gives the long golden output") {
  check_long("deepseek-tiny");
}

TEST_CASE("pairs of options of llama-tiny give the golden output") {
  check_pairwise("llama-tiny");
}
TEST_CASE("pairs of options of llama-tiny-16q8kv give the golden output") {
  check_pairwise("llama-tiny-16q8kv");
}
TEST_CASE("pairs of options of deepseek-tiny give the golden output") {
  check_pairwise("deepseek-tiny");
}
TEST_CASE("pairs of options of deepseek-tiny-fp8 give the golden output") {
  check_pairwise("deepseek-tiny-fp8");
}
TEST_CASE("pairs of options of deepseek-v2-tiny give the golden output") {
  check_pairwise("deepseek-v2-tiny");
}

// ./test.sh --full runs this test.
TEST_CASE("the product of options of llama-tiny gives the golden output", "[.full]") {
  check_product("llama-tiny");
}
TEST_CASE("the product of options of llama-tiny-16q8kv gives the golden output", "[.full]") {
  check_product("llama-tiny-16q8kv");
}
TEST_CASE("the product of options of deepseek-tiny gives the golden output", "[.full]") {
  check_product("deepseek-tiny");
}
TEST_CASE("the product of options of deepseek-tiny-fp8 gives the golden output", "[.full]") {
  check_product("deepseek-tiny-fp8");
}
TEST_CASE("the product of options of deepseek-v2-tiny gives the golden output", "[.full]") {
  check_product("deepseek-v2-tiny");
}

/// The step at which rounding the KV to bf16 changes the argmax even in exact arithmetic. In float64 with the
/// cached rows rounded to bf16, the router's second group of deepseek-tiny trails by 3e-4 instead of leading
/// by 2e-3, so other experts answer.
constexpr std::size_t kFlippedStep = 4;
constexpr std::int32_t kFlippedToken = 62;

TEST_CASE("bf16 KV, teacher-forced, keeps clear argmaxes and logits near the reference") {
  const std::string name = GENERATE(from_range(kReferenceModels));
  const ReferenceModel model(name);
  const Golden golden = model.golden();
  std::vector<ForcedComparison::Step> flips;
  if (name == "deepseek-tiny") flips = {{0, kFlippedStep, kFlippedToken, golden.greedy[0][kFlippedStep]}};
  for (const TopologySpec& spec : legal_stages(model.config.shape)) {
    const Topology topo(spec, model.config.shape);
    GenerationRequest request = golden_request(golden);
    request.kv_dtype = DType::bf16;
    request.teacher = golden.greedy;
    INFO(describe(name, spec, request));
    const GenerationResult result = run_local(model.checkpoint, model.config, topo, request);
    const ForcedComparison comparison = compare_forced(golden, result, topo.shape().vocab);
    CHECK(comparison.num_clear > 20);
    CHECK(comparison.other_argmax == flips);
    CHECK(comparison.worst_logit <= 3e-2f);
  }
}

TEST_CASE("KV of fp8_ds_mla gives one output under every topology, near that of f32") {
  for (const std::string name : {"deepseek-tiny", "deepseek-v2-tiny"}) {
    const ReferenceModel model(name);
    const Golden golden = model.golden();
    GenerationRequest request = golden_request(golden);
    request.kv_dtype = DType::fp8_ds_mla;
    std::vector<decode::TokenIds> alone;
    for (const TopologySpec& spec : legal_stages(model.config.shape)) {
      const Topology topo(spec, model.config.shape);
      INFO(describe(name, spec, request));
      request.teacher.clear();
      const GenerationResult free = run_local(model.checkpoint, model.config, topo, request);
      std::vector<decode::TokenIds> tokens;
      for (const auto& sequence : free.sequences) tokens.push_back(sequence.tokens);
      if (alone.empty()) alone = tokens;
      CHECK(tokens == alone);
      request.teacher = golden.greedy;
      const GenerationResult forced = run_local(model.checkpoint, model.config, topo, request);
      const ForcedComparison comparison = compare_forced(golden, forced, topo.shape().vocab);
      CHECK(comparison.num_clear > 20);
      CHECK(comparison.worst_logit <= 0.2f);
      CAPTURE(comparison.worst_logit, comparison.other_argmax.size());
      CHECK(comparison.other_argmax.size() <= 2);
    }
  }
}

TEST_CASE("the KV of all ranks adds up to the cache of one rank, within a page a sequence and rank",
          "[quick]") {
  const std::string name = GENERATE(from_range(kReferenceModels));
  const ReferenceModel model(name);
  const Golden golden = model.golden();
  GenerationRequest request = golden_request(golden);
  request.max_new_tokens = 2;
  request.page_tokens = 16;
  const Topology one({}, model.config.shape);
  const std::int64_t whole = run_local(model.checkpoint, model.config, one, request).memory.at(0).kv_bytes;
  for (const TopologySpec& spec : legal_stages(model.config.shape)) {
    const Topology topo(spec, model.config.shape);
    const GenerationResult result = run_local(model.checkpoint, model.config, topo, request);
    const auto plan = decode::plan_memory(model.checkpoint, model.config, topo, request);
    REQUIRE(result.memory.size() == static_cast<std::size_t>(topo.world_size()));
    std::int64_t sum = 0;
    for (std::size_t rank = 0; rank < result.memory.size(); ++rank) {
      sum += result.memory[rank].kv_bytes;
      CHECK(plan[rank].weights_bytes == result.memory[rank].weights_bytes);
      CHECK(plan[rank].workspace_bytes == result.memory[rank].workspace_bytes);
      CHECK(plan[rank].kv_bytes >= result.memory[rank].kv_bytes);
    }
    const std::int64_t page_bytes =
        kv_bytes_per_token(request, topo) * request.page_tokens / topo.tpa();  // for one rank, all layers
    INFO(describe(name, spec, request));
    CHECK(std::abs(sum - whole) <= page_bytes * topo.stage_size() * request.num_sequences());
  }
}

TEST_CASE("logits that are not finite end a generation, which says after how many tokens", "[quick]") {
  constexpr std::int32_t kNan = 500;
  const ScratchDirectory scratch;
  write_model_with_nan(scratch.path(), kNan);
  const ReferenceModel model(scratch.path().string());
  for (const TopologySpec& spec : {TopologySpec{}, TopologySpec{.kvp = 2, .tpa = 2, .pp = 2}}) {
    CAPTURE(spec.kvp);
    const Topology topo(spec, model.config.shape);
    const auto message_after = [&](TokenIds prompt, TokenIds teacher) {
      GenerationRequest request;
      request.prompts = {{1, 2, 3}, std::move(prompt)};
      request.teacher = {{}, std::move(teacher)};
      request.max_new_tokens = 8;
      request.ignore_eos = true;
      const auto failure =
          required_failure([&] { run_local(model.checkpoint, model.config, topo, request); });
      return failure.what;
    };
    CHECK_THAT(message_after({1, kNan}, {}), ContainsSubstring("no finite logits after 0 tokens"));
    CHECK_THAT(message_after({1, 2}, {5, 6, kNan}), ContainsSubstring("no finite logits after 3 tokens"));
  }
}

TEST_CASE("a generation's times and rates are those of its steps", "[quick]") {
  const ReferenceModel model("llama-tiny");
  const Topology topo({}, model.config.shape);
  GenerationRequest request;
  request.prompts = {{1, 2, 3}, {4, 5, 6, 7, 8}};
  request.max_new_tokens = 65;
  request.ignore_eos = true;
  for (const std::int64_t draft_tokens : {1, 4}) {
    CAPTURE(draft_tokens);
    request.draft_tokens = draft_tokens;
    const auto start = std::chrono::steady_clock::now();
    const GenerationResult result = run_local(model.checkpoint, model.config, topo, request);
    const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
    const decode::GenerationTiming& timing = result.timing;
    const double decoded = 2 * 64;  // the first tokens come from the prompts
    const double decode_ms = decoded / timing.tokens_per_s * 1e3;
    CHECK(timing.prefill_ms > 0.0);
    CHECK(timing.ttl_median_ms > 0.0);
    CHECK(timing.load_ms + timing.prefill_ms + decode_ms <= taken.count());
    // Each step reads the prompts, and what it and earlier ones have fed for each of the two.
    const std::int64_t steps = 64 / draft_tokens;
    const std::int64_t read_tokens = steps * (3 + 5) + 2 * draft_tokens * steps * (steps + 1) / 2;
    const double read_gb = static_cast<double>(read_tokens * kv_bytes_per_token(request, topo)) * 1e-9;
    CHECK(timing.kv_gb_per_s == Approx(read_gb / decode_ms * 1e3));
    request.teacher = {result.sequences.at(0).tokens, result.sequences.at(1).tokens};  // all drafts are right
    CHECK(result.sequences[1].prompt == request.prompts[1]);
  }
}

TEST_CASE("the exchange sends what the formula says, whatever the context", "[quick]") {
  const ReferenceModel model("llama-tiny");
  for (const TopologySpec& spec : legal_stages(model.config.shape)) {
    const Topology topo(spec, model.config.shape);
    for (std::int64_t context : {1024, 16384}) {
      GenerationRequest request;
      request.synthetic_context = context;
      request.max_new_tokens = 2;
      const GenerationResult result = run_local(model.checkpoint, model.config, topo, request);
      const ModelShape& shape = topo.shape();
      const std::int64_t expected =
          shape.num_query_heads / topo.tpa() * (shape.value_dim * 4 + 4) * (topo.kvp() - 1) / topo.kvp();
      CHECK(result.exchange_bytes_per_rank_per_layer == expected);
    }
  }
}

TEST_CASE("synthetic context gives the same tokens under every topology", "[quick]") {
  for (const char* name : {"llama-tiny", "deepseek-tiny"}) {
    const ReferenceModel model(name);
    GenerationRequest request;
    request.synthetic_context = 5000;
    request.max_new_tokens = 6;
    request.ignore_eos = true;
    request.kv_dtype = DType::f32;
    const auto alone = run_local(model.checkpoint, model.config, Topology({}, model.config.shape), request);
    for (const TopologySpec& spec : legal_stages(model.config.shape)) {
      const auto result =
          run_local(model.checkpoint, model.config, Topology(spec, model.config.shape), request);
      INFO(describe(name, spec, request));
      CHECK(result.sequences.at(0).tokens == alone.sequences.at(0).tokens);
    }
  }
}

TEST_CASE("drawn tokens are the same on every topology and change with the seed", "[quick]") {
  const ReferenceModel model("llama-tiny");
  const Golden golden = model.golden();
  GenerationRequest request = golden_request(golden);
  request.sampling = {.temperature = 0.8f, .top_p = 0.9f, .seed = 7};
  const auto alone = run_local(model.checkpoint, model.config, Topology({}, model.config.shape), request);
  const auto sharded = run_local(model.checkpoint, model.config,
                                 Topology({.kvp = 2, .tpa = 2, .dp = 2}, model.config.shape), request);
  request.sampling.seed = 8;
  const auto other = run_local(model.checkpoint, model.config, Topology({}, model.config.shape), request);
  for (std::size_t s = 0; s < golden.prompts.size(); ++s) {
    CHECK(sharded.sequences.at(s).tokens == alone.sequences.at(s).tokens);
    CHECK(other.sequences.at(s).tokens != alone.sequences.at(s).tokens);
    CHECK(golden.greedy[s] != alone.sequences.at(s).tokens);
  }
}

TEST_CASE("a request that cannot be served is refused with its values, on every rank alike", "[quick]") {
  const ReferenceModel model("llama-tiny");
  const Topology topo({.kvp = 2, .tpa = 2}, model.config.shape);
  const auto message = [&](const GenerationRequest& request) -> std::string {
    try {
      run_local(model.checkpoint, model.config, topo, request);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  GenerationRequest request;
  request.prompts = {{1, 2, 3}};
  auto changed = [&](auto change) {
    GenerationRequest copy = request;
    change(copy);
    return message(copy);
  };
  CHECK_THAT(changed([](auto& r) { r.prompts.clear(); }), ContainsSubstring("no prompts"));
  CHECK_THAT(changed([](auto& r) { r.prompts[0][1] = 512; }),
             ContainsSubstring("id 512") && ContainsSubstring("[0, 512)"));
  CHECK_THAT(changed([](auto& r) { r.prompts[0][1] = -1; }), ContainsSubstring("id -1"));
  CHECK_THAT(changed([](auto& r) { r.prompts.push_back({}); }), ContainsSubstring("prompt 1 is empty"));
  CHECK_THAT(changed([](auto& r) { r.max_new_tokens = 9000; }),
             ContainsSubstring("9003") && ContainsSubstring("8192"));
  CHECK_THAT(changed([](auto& r) { r.max_new_tokens = 0; }), ContainsSubstring("max_new_tokens is 0"));
  CHECK_THAT(changed([](auto& r) { r.draft_tokens = 4; }), ContainsSubstring("no drafts"));
  CHECK_THAT(changed([](auto& r) { r.chunk = 0; }), ContainsSubstring("chunk is 0"));
  CHECK_THAT(changed([](auto& r) { r.page_tokens = 0; }), ContainsSubstring("page_tokens is 0"));
  CHECK_THAT(changed([](auto& r) {
               r.teacher = {{1}, {2}};
             }),
             ContainsSubstring("2 teacher sequences for 1 prompts"));
}

TEST_CASE("products of bf16, teacher-forced, keep clear argmaxes and logits near the reference", "[quick]") {
  struct Case {
    std::string model;
    TopologySpec spec;
    std::size_t most_flips;
    float worst_logit;
  };
  // The rule for 16 bits: logits differ by at most 3e-2 of the RMS and no clear argmax changes. Routed
  // experts whose scores nearly tie change with any rounding of their inputs: there, one clear argmax in 57
  // changed, and logits changed by 2.3e-2.
  for (const Case& c : {Case{"llama-tiny", {}, 0, 3e-2f},
                        {"llama-tiny", {.kvp = 2, .tpa = 2}, 0, 3e-2f},
                        {"llama-tiny-16q8kv", {.kvp = 2, .tpa = 8}, 0, 3e-2f},
                        {"deepseek-tiny", {.kvp = 4}, 2, 0.1f},
                        {"deepseek-v2-tiny", {.kvp = 2, .ep = 2}, 2, 0.1f}}) {
    const ReferenceModel model(c.model);
    const Golden golden = model.golden();
    const Topology topo(c.spec, model.config.shape);
    decode::GenerationRequest request = golden_request(golden);
    request.teacher = golden.greedy;
    decode::LaunchOptions launch;
    launch.activation = DType::bf16;
    INFO(describe(c.model, c.spec, request));
    const auto result = decode::run_local(model.checkpoint, model.config, topo, request, launch);
    const ForcedComparison comparison = compare_forced(golden, result, topo.shape().vocab);
    for (const auto& step : comparison.other_argmax) UNSCOPED_INFO(step);
    CHECK(comparison.other_argmax.size() <= c.most_flips);
    CHECK(comparison.worst_logit <= c.worst_logit);
    CHECK(comparison.worst_logit > 0.0f);  // rounding took place
  }
}

}  // namespace helix::test
