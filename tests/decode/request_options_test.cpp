// SPDX-License-Identifier: Apache-2.0
// How a model's windows and a request's sampling options and penalties change its tokens, on one and on
// several ranks.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <set>
#include <vector>

#include "decode/golden.hpp"
#include "generate/generation.hpp"
#include "support/catch.hpp"

namespace helix::test {
namespace {

using decode::GenerationRequest;
using decode::TokenIds;

std::vector<decode::GeneratedSequence> run(const ReferenceModel& model, const TopologySpec& spec,
                                           const GenerationRequest& request) {
  return decode::run_local(model.checkpoint, model.config, Topology(spec, model.config.shape), request)
      .sequences;
}

std::vector<TokenIds> tokens_of(const ReferenceModel& model, const TopologySpec& spec,
                                const GenerationRequest& request) {
  std::vector<TokenIds> tokens;
  for (const decode::GeneratedSequence& sequence : run(model, spec, request))
    tokens.push_back(sequence.tokens);
  return tokens;
}

}  // namespace

TEST_CASE("windows of some layers and of all change tokens, and alike on every topology", "[quick]") {
  ReferenceModel model("llama-tiny");
  const GenerationRequest request = golden_request(model.golden());
  std::set<std::vector<TokenIds>> seen = {tokens_of(model, {}, request)};
  model.config.sliding_window = 4;
  for (const std::vector<bool>& is_window_layer :
       {std::vector<bool>{}, std::vector<bool>{true, false}, std::vector<bool>{false, true}}) {
    model.config.is_window_layer = is_window_layer;
    const std::vector<TokenIds> alone = tokens_of(model, {}, request);
    CHECK(seen.insert(alone).second);
    for (const TopologySpec& spec : {TopologySpec{.pp = 2}, TopologySpec{.kvp = 2, .tpa = 2, .pp = 2}}) {
      INFO(describe(model.name, spec, request)
           << " window layers " << Catch::Detail::stringify(is_window_layer));
      CHECK(tokens_of(model, spec, request) == alone);
    }
  }
}

TEST_CASE("what lies before all windows changes nothing", "[quick]") {
  ReferenceModel model("llama-tiny");
  GenerationRequest request;
  request.kv_dtype = DType::f32;
  request.ignore_eos = true;
  // Two layers with windows of 4 tokens: the last token depends on the 6 before it.
  for (const std::int32_t first : {10, 20}) {
    TokenIds prompt(20, first);
    prompt.insert(prompt.end(), {383, 198, 141, 403, 7, 8, 9});
    request.prompts.push_back(prompt);
  }
  /// Distance between the logits of the two sequences, relative to their norm.
  const auto difference = [&] {
    const auto sequences = run(model, {}, request);
    const float norm = sequences[0].logits_norm[0];
    float most = 0.0f;
    for (std::size_t i = 0; i < decode::kFirstLogits; ++i)
      most = std::max(most, std::abs(sequences[0].logits_first8[0][i] - sequences[1].logits_first8[0][i]));
    return most / norm;
  };
  CHECK(difference() > 1e-3f);
  model.config.sliding_window = 4;
  CHECK(difference() <= 1e-6f);
  request.prompts[1][20] = 384;  // the first of the 7 visible tokens
  CHECK(difference() > 1e-3f);
}

TEST_CASE("equal prompts in one batch draw tokens of their own", "[quick]") {
  const ReferenceModel model("llama-tiny");
  GenerationRequest request;
  request.prompts.assign(2, {383, 198, 141, 403});
  request.ignore_eos = true;
  const auto greedy = tokens_of(model, {}, request);
  CHECK(greedy[0] == greedy[1]);
  request.sampling = {.temperature = 2.0f, .seed = 5};
  const auto drawn = tokens_of(model, {}, request);
  CHECK(drawn[0] != drawn[1]);
  CHECK(drawn[0][0] != drawn[1][0]);  // from equal logits
  CHECK(tokens_of(model, {.dp = 2}, request) == drawn);
}

TEST_CASE("no token comes twice where having it costs more than any logit", "[quick]") {
  const ReferenceModel model("llama-tiny");
  GenerationRequest request;
  request.prompts = {{383, 198, 141, 403}, {1, 2}};
  request.max_new_tokens = 24;
  request.ignore_eos = true;
  const auto repeats = [&](const TopologySpec& spec) {
    std::size_t count = 0;
    for (const TokenIds& tokens : tokens_of(model, spec, request))
      count += tokens.size() - std::set<std::int32_t>(tokens.begin(), tokens.end()).size();
    return count;
  };
  CHECK(repeats({}) > 0);
  request.penalties = {.presence = 100.0f};
  CHECK(repeats({}) == 0);
  CHECK(repeats({.kvp = 2, .pp = 2}) == 0);
  request.penalties = {.frequency = 100.0f};
  CHECK(repeats({}) == 0);
}

TEST_CASE("a repetition penalty keeps away tokens of the prompt, in whatever chunks it runs", "[quick]") {
  const ReferenceModel model("llama-tiny");
  GenerationRequest request;
  TokenIds& prompt = request.prompts.emplace_back(256);  // half of the vocabulary
  std::iota(prompt.begin(), prompt.end(), 0);
  request.max_new_tokens = 8;
  request.ignore_eos = true;
  request.penalties.repetition = 100.0f;
  for (const std::int64_t prefill_tokens : {256, 7}) {
    request.prefill_tokens = prefill_tokens;
    const TokenIds tokens = tokens_of(model, {}, request).at(0);
    REQUIRE(tokens.size() == 8);
    const std::set<std::int32_t> distinct(tokens.begin(), tokens.end());
    CHECK(distinct.size() == 8);
    CHECK(*distinct.begin() >= 256);
  }
}

}  // namespace helix::test
