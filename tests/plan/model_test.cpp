// SPDX-License-Identifier: Apache-2.0
// The planner's models: parameters as in the checkpoints, KV bytes as in the paper, invalid sizes.
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include <helix/error.hpp>
#include <helix/plan/model.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"

namespace {

using namespace helix::plan;
using helix::ErrorCode;
using helix::MlaShape;
using helix::MoeShape;
using helix::test::failure_of;

TEST_CASE("presets have as many parameters as their checkpoints") {
  struct Known {
    const char* name;
    std::int64_t parameters;
    double tolerance;  // for small parts that the planner leaves out: biases, sinks
  };
  // Sums over the checkpoints' tensors, as published on their hubs.
  const std::vector<Known> known{
      {"llama-3.1-8b", 8030261248, 0},      {"llama-3.1-70b", 70553706496, 0},
      {"llama-3.1-405b", 405853388800, 0},  {"deepseek-v2-lite", 15706484224, 0},
      {"deepseek-r1", 671026404352, 1e-7},  {"qwen3-32b", 32762123264, 0},
      {"qwen3-235b-a22b", 235093634560, 0}, {"mixtral-8x22b", 140630071296, 0},
      {"gpt-oss-120b", 116829156672, 1e-3}, {"llama-4-maverick", 400711848960, 3e-3}};
  REQUIRE(known.size() == model_preset_names().size());
  for (const Known& expected : known) {
    INFO(expected.name);
    const auto counted = static_cast<double>(count_parameters(model_preset(expected.name)).total());
    CHECK(counted == Approx(static_cast<double>(expected.parameters)).epsilon(expected.tolerance));
  }
}

TEST_CASE("bits of a cached element by hand") {
  using helix::DType;
  const helix::ModelShape heads = model_preset("llama-3.1-8b").shape;
  CHECK(kv_element_bits(heads, DType::f32) == 32);
  CHECK(kv_element_bits(heads, DType::bf16) == 16);
  CHECK(kv_element_bits(heads, DType::fp8_e4m3) == 8);
  // 512 latent columns of 8 bits with 4 scales of 32, and 64 rope columns of 16: 656 bytes for 576 columns.
  const helix::ModelShape latent = model_preset("deepseek-r1").shape;
  CHECK(kv_element_bits(latent, DType::bf16) == 16);
  CHECK(kv_element_bits(latent, DType::fp8_ds_mla) == 8.0 * 656 / 576);
}

TEST_CASE("active parameters are those that one token uses") {
  const auto active = [](const char* name) {
    return static_cast<double>(count_parameters(model_preset(name)).active()) / 1e9;
  };
  CHECK(active("deepseek-r1") == Approx(37.5).epsilon(0.01));
  CHECK(active("qwen3-235b-a22b") == Approx(22.2).epsilon(0.01));
  CHECK(active("llama-3.1-8b") == Approx(8.03).epsilon(0.001));
}

TEST_CASE("expected hits of experts by hand, and none of what has no expectation") {
  // One token hits the experts that it chooses. If two tokens choose 1 of 2 experts each, the second hits a
  // new expert every other time.
  CHECK(expected_expert_hits({.num_experts = 256, .top_k = 8}, 1) == 8);
  CHECK(expected_expert_hits({.num_experts = 2, .top_k = 1}, 2) == 1.5);
  CHECK(expected_expert_hits({.num_experts = 4, .top_k = 4}, 3) == 4);
  CHECK(expected_expert_hits({.num_experts = 4, .top_k = 1}, 0) == 0);
  const auto refuses = [](const MoeShape& moe, double tokens, const char* says) {
    const auto failure = failure_of([&] { expected_expert_hits(moe, tokens); });
    return failure && failure->code == ErrorCode::invalid_argument && failure->says(says);
  };
  CHECK(refuses({}, 5, "of 0 experts"));
  CHECK(refuses({.num_experts = 8, .top_k = 9}, 5, "top_k is 9 of 8"));
  CHECK(refuses({.num_experts = 8, .top_k = 2}, -1, "-1 tokens"));
  CHECK(refuses({.num_experts = 8, .top_k = 2}, std::nan(""), "nan tokens"));
}

TEST_CASE("the KV cache of one request of a million tokens in 4 bits") {
  const Precision fp4{4, 4, 4};
  CHECK(in_bytes(kv_cache_bytes(model_preset("llama-3.1-405b"), fp4, tokens(1e6))) == 129024000000.0);
  CHECK(in_bytes(kv_cache_bytes(model_preset("deepseek-r1"), fp4, tokens(1e6))) == 17568000000.0);
}

TEST_CASE("the KV cache of a context or in bits that cannot be is refused with the value") {
  const auto refuses = [](double kv_bits, double length, const char* says) {
    const auto failure = failure_of(
        [&] { kv_cache_bytes(model_preset("llama-3.1-8b"), {.kv_bits = kv_bits}, tokens(length)); });
    return failure && failure->code == ErrorCode::invalid_argument && failure->says(says);
  };
  CHECK(refuses(16, -1, "context is -1"));
  CHECK(refuses(16, std::nan(""), "context is nan"));
  CHECK(refuses(-4, 10, "kv_bits is -4"));
  CHECK(in_bytes(kv_cache_bytes(model_preset("llama-3.1-8b"), {}, tokens(0))) == 0);
}

TEST_CASE("presets are sound and known by name") {
  for (const std::string& name : model_preset_names()) {
    INFO(name);
    const Model model = model_preset(name);
    CHECK(model.name == name);
    CHECK_NOTHROW(model.check());
    CHECK(model.source.find("config.json") != std::string::npos);
  }
  const auto failure = failure_of([] { model_preset("llama-9"); });
  REQUIRE(failure);
  CHECK(failure->code == ErrorCode::invalid_argument);
  CHECK(failure->says("llama-9"));
  for (const std::string& name : model_preset_names()) CHECK(failure->says(name));
}

TEST_CASE("layers alternate as the models say") {
  const Model maverick = model_preset("llama-4-maverick");
  CHECK_FALSE(maverick.shape.is_moe_layer(0));
  CHECK(maverick.shape.is_moe_layer(1));
  CHECK_FALSE(maverick.shape.is_moe_layer(2));
  CHECK(maverick.is_window_layer(2));
  CHECK_FALSE(maverick.is_window_layer(3));
  const Model deepseek = model_preset("deepseek-r1");
  CHECK_FALSE(deepseek.shape.is_moe_layer(2));
  CHECK(deepseek.shape.is_moe_layer(3));
  CHECK_FALSE(deepseek.is_window_layer(0));
  Model listed = maverick;
  listed.window_layers.assign(static_cast<std::size_t>(listed.shape.num_layers), false);
  listed.window_layers[3] = true;
  CHECK_FALSE(listed.is_window_layer(2));  // from the list, not the stride
  CHECK(listed.is_window_layer(3));
  for (const std::int64_t layer : {std::int64_t{-1}, listed.shape.num_layers}) {
    const auto failure = failure_of([&] { listed.is_window_layer(layer); });
    REQUIRE(failure);
    CHECK(failure->says("layer " + std::to_string(layer)));
  }
  listed.window = 0;
  CHECK_FALSE(listed.is_window_layer(3));
}

TEST_CASE("absurd models are refused with the value") {
  struct Bad {
    std::function<void(Model&)> spoil;
    const char* says;
  };
  const std::vector<Bad> all{
      {[](Model& m) { m.shape.hidden = 0; }, "hidden is 0"},
      {[](Model& m) { m.shape.hidden = std::int64_t{1} << 62; }, "hidden is 4611686018427387904"},
      {[](Model& m) { m.shape.num_layers = -1; }, "num_layers is -1"},
      {[](Model& m) { m.shape.num_query_heads = 127; }, "num_query_heads 127"},
      {[](Model& m) {
         m.window_layers = {true, false};
       },
       "window_layers has 2 layers"},
      {[](Model& m) { m.shape.num_kv_heads = 0; }, "num_kv_heads is 0"},
      {[](Model& m) { m.shape.ffn = 0; }, "dense layers"},
      {[](Model& m) { m.shape.num_layers = 65536, m.shape.ffn = 1 << 24; }, "parameters"},
      {[](Model& m) { m.shape.moe = MoeShape{.num_experts = 8, .top_k = 9, .expert_ffn = 8}; }, "top_k is 9"},
      {[](Model& m) { m.shape.moe = MoeShape{.num_experts = 8, .expert_ffn = 8, .layer_stride = 0}; },
       "layer_stride is 0"},
      {[](Model& m) {
         m.shape.mla = MlaShape{0, 512, 128, 64, 128};
       },
       "latent attention"}};
  for (const Bad& bad : all) {
    Model model = model_preset("llama-3.1-405b");
    bad.spoil(model);
    const auto failure = failure_of([&] { model.check(); });
    INFO(bad.says);
    REQUIRE(failure);
    CHECK(failure->code == ErrorCode::invalid_argument);
    CHECK(failure->says(bad.says));
  }
  CHECK(failure_of([] { Precision{.kv_bits = 0}.check(); })->says("kv_bits is 0"));
  CHECK(failure_of([] { Precision{.weight_bits = std::nan("")}.check(); })->says("weight_bits is nan"));
}

}  // namespace
