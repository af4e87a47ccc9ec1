// SPDX-License-Identifier: Apache-2.0
// --topology auto: which properties of a request and a machine decide the topology.
#include "cli/planning.hpp"

#include <cstdint>
#include <vector>

#include "cli/machine.hpp"
#include "model/parse_config.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"

namespace helix::test {
namespace {

using decode::GenerationRequest;

/// Two layers with one KV head of 128, so a cached token takes 512 elements. Everything else is small, so
/// that one rank is fastest for few tokens and four ranks for many.
decode::ModelConfig small_model() {
  return decode::parse_model_config(R"({"model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128,
    "vocab_size": 16})",
                                    "config.json");
}

GenerationRequest request_of(std::size_t sequences, std::int64_t tokens) {
  GenerationRequest request;
  request.prompts.assign(sequences, decode::TokenIds{1});
  request.max_new_tokens = tokens - 1;
  return request;
}

int ranks_of(const GenerationRequest& request, const std::vector<int>& num_ranks) {
  const TopologySpec chosen = decode::choose_topology(small_model(), request, {}, num_ranks);
  return chosen.kvp * chosen.tpa * chosen.pp;
}

TEST_CASE("the fastest number of ranks grows with the sequences and their length") {
  CHECK(ranks_of(request_of(1, 16), {1, 4}) == 1);
  CHECK(ranks_of(request_of(1, 200'000), {1, 4}) == 4);
  CHECK(ranks_of(request_of(1, 500), {1, 4}) == 1);
  CHECK(ranks_of(request_of(200, 500), {1, 4}) == 4);
  // A server's sequences are not known yet, so it plans for as many and as long ones as it allows.
  GenerationRequest served;
  served.serving = decode::ServeLimits{.max_sequences = 1, .max_tokens = 500};
  CHECK(ranks_of(served, {1, 4}) == 1);
  served.serving->max_sequences = 200;
  CHECK(ranks_of(served, {1, 4}) == 4);
  served.serving = decode::ServeLimits{.max_sequences = 1, .max_tokens = 200'000};
  CHECK(ranks_of(served, {1, 4}) == 4);
}

TEST_CASE("layers are dealt to any number of stages") {
  decode::ModelConfig model = small_model();
  model.shape.num_layers = 3;
  const TopologySpec chosen = decode::choose_topology(model, request_of(1, 16), {}, {6});
  CHECK(chosen.pp == 3);
  CHECK(chosen.kvp * chosen.tpa == 2);
}

TEST_CASE("a number of ranks without a legal topology is refused with the nearest one that has one") {
  decode::ModelConfig model = small_model();  // two layers, and stages of 1, 2 or 4 ranks
  const auto refuses = [&](const std::vector<int>& num_ranks, const std::string& message) {
    const auto failure =
        failure_of([&] { decode::choose_topology(model, request_of(1, 16), {}, num_ranks); });
    REQUIRE(failure);
    CHECK(failure->code == ErrorCode::invalid_topology);
    CHECK(failure->what == message);
  };
  const std::string rest = " ranks is legal for this model; the nearest number that has one is ";
  refuses({3}, "no topology of 3" + rest + "2");
  refuses({7}, "no topology of 7" + rest + "8");
  refuses({100}, "no topology of 100" + rest + "8");
  refuses({32768}, "no topology of 32768" + rest + "8");
  refuses({5, 6}, "no topology of 5 or 6" + rest + "4");
  model.shape.num_layers = 60;
  refuses({250}, "no topology of 250" + rest + "240");
  refuses({123}, "no topology of 123" + rest + "124");
  for (int ranks = 1; ranks <= 130; ++ranks) {
    INFO(ranks);
    const auto failure = failure_of([&] { decode::choose_topology(model, request_of(1, 16), {}, {ranks}); });
    bool is_legal = false;
    for (const int stage_size : {1, 2, 4})
      is_legal |= ranks % stage_size == 0 && ranks / stage_size <= model.shape.num_layers;
    CHECK(failure.has_value() != is_legal);
  }
}

TEST_CASE("ranks share the memory of the machine, and a cached element takes its type's bytes") {
  // A rank that has a quarter of the memory may use 0.9 of it, which is 0.225 of the total. Four ranks of one
  // sequence each hold a quarter of the tokens, at 512 f32 elements per token.
  const auto memory = static_cast<double>(decode::host_memory());
  const auto request_for = [&](double fraction, DType type) {
    GenerationRequest request = request_of(1, static_cast<std::int64_t>(fraction * memory / (512 * 4 / 4)));
    request.kv_dtype = type;
    return request;
  };
  CHECK(ranks_of(request_for(0.18, DType::f32), {4}) == 4);
  const auto full = failure_of([&] { ranks_of(request_for(0.3, DType::f32), {4}); });
  REQUIRE(full);
  CHECK(full->code == ErrorCode::capacity);
  CHECK(ranks_of(request_for(0.3, DType::bf16), {4}) == 4);  // the same tokens in half the bytes
}

TEST_CASE("a rank plans with the memory that its launcher has found for it", "[quick]") {
  const std::int64_t memory = decode::host_memory();
  // A quarter of the tokens, at 512 f32 elements each, takes 0.3 of a machine's memory.
  GenerationRequest request =
      request_of(1, static_cast<std::int64_t>(0.3 * static_cast<double>(memory) / 512));
  request.kv_dtype = DType::f32;
  const auto chosen = [&](std::int64_t rank_memory) {
    return decode::choose_topology(small_model(), request, {.rank_memory = rank_memory}, {4});
  };
  CHECK(chosen(memory).kvp == 4);  // one machine per rank
  for (const std::int64_t share : {memory / 4, std::int64_t{0}}) {
    const auto full = failure_of([&] { chosen(share); });
    REQUIRE(full);
    CHECK(full->code == ErrorCode::capacity);
  }
}

TEST_CASE("block-scaled fp8 weights are planned as the f32 that they are widened to", "[quick]") {
  decode::ModelConfig wide = small_model();
  wide.dtype = DType::f32;
  decode::ModelConfig fp8 = small_model();
  fp8.dtype = DType::bf16;
  fp8.fp8_blocks = {128, 128};
  GenerationRequest request = request_of(1, 64);
  request.kv_dtype = DType::f32;
  const auto fits = [&](const decode::ModelConfig& config, std::int64_t rank_memory) {
    return !failure_of([&] { decode::choose_topology(config, request, {.rank_memory = rank_memory}, {1}); });
  };
  std::int64_t least = 1 << 10;  // for f32
  while (!fits(wide, least)) least += least / 16;
  CHECK(fits(fp8, least));
  CHECK_FALSE(fits(fp8, least - least / 8));
}

}  // namespace
}  // namespace helix::test
