// SPDX-License-Identifier: Apache-2.0
// config.json: what is read, what is refused and with which message. Rope constants are compared with
// double-precision formulas.
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <numbers>
#include <numeric>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>
#include <helix/topology.hpp>

#include "generate/generation_defaults.hpp"
#include "model/parse_config.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"

using namespace helix;
using namespace helix::decode;
using helix::test::Failure;
using helix::test::required_failure;
using nlohmann::json;

namespace {

json data_config(const std::string& name) {
  std::ifstream in(std::string(HELIX_TEST_DATA "/") + name + "/config.json");
  return json::parse(std::string(std::istreambuf_iterator<char>(in), {}));
}

ModelConfig parse(const json& config) {
  return parse_model_config(config.dump(), "config.json");
}

Failure failure_of_config(const std::string& text) {
  return required_failure([&] { parse_model_config(text, "config.json"); });
}

json llama() {
  return {{"model_type", "llama"},    {"hidden_size", 256},
          {"intermediate_size", 512}, {"num_hidden_layers", 3},
          {"num_attention_heads", 8}, {"num_key_value_heads", 2},
          {"vocab_size", 1000},       {"max_position_embeddings", 8192},
          {"rms_norm_eps", 1e-5}};
}

json deepseek_v3() {
  json config = llama();
  config.update({{"model_type", "deepseek_v3"},
                 {"q_lora_rank", 128},
                 {"kv_lora_rank", 512},
                 {"qk_nope_head_dim", 128},
                 {"qk_rope_head_dim", 64},
                 {"v_head_dim", 128},
                 {"n_routed_experts", 16},
                 {"n_shared_experts", 2},
                 {"moe_intermediate_size", 96},
                 {"num_experts_per_tok", 3},
                 {"n_group", 4},
                 {"topk_group", 2},
                 {"first_k_dense_replace", 1}});
  return config;
}

json deepseek_v2() {
  json config = deepseek_v3();
  config["model_type"] = "deepseek_v2";
  config["topk_method"] = "group_limited_greedy";
  return config;
}

/// Unscaled inverse frequency, in double.
double standard_frequency(double theta, std::int64_t dim, std::size_t i) {
  return std::exp(-std::log(theta) * 2.0 * static_cast<double>(i) / static_cast<double>(dim));
}

void check_frequencies(const std::vector<float>& actual, const std::vector<double>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    CAPTURE(i, actual[i], expected[i]);
    // float32 powers and quotients err by a few ulp, times the logarithm of theta in the exponent
    CHECK(std::abs(actual[i] - expected[i]) <= 3e-6 * expected[i]);
  }
}

}  // namespace

TEST_CASE("the reference configs are read whole") {
  SECTION("llama") {
    const ModelConfig config = parse(data_config("llama-tiny"));
    const ModelShape shape = config.shape;
    CHECK(shape.num_query_heads == 8);
    CHECK(shape.num_kv_heads == 2);
    CHECK(shape.head_dim == 64);
    CHECK(shape.value_dim == 64);
    CHECK(shape.hidden == 256);
    CHECK(shape.ffn == 512);
    CHECK(shape.num_experts() == 0);
    CHECK(shape.expert_ffn() == 0);
    CHECK(shape.vocab == 512);
    CHECK(shape.num_layers == 2);
    CHECK_FALSE(shape.is_mla());
    CHECK(config.rms_norm_eps == 1e-5f);
    CHECK(config.max_positions == 8192);
    CHECK(config.eos_ids == std::vector<std::int64_t>{2});
    CHECK_FALSE(config.has_qkv_bias);
    CHECK_FALSE(config.tie_word_embeddings);
    CHECK(config.rope.type == RopeType::llama3);
    CHECK(config.rope.rotary_dim == 64);
    CHECK_FALSE(config.rope.is_interleaved);
    CHECK(config.softmax_scale() == 0.125f);
    CHECK(config.rope.magnitude() == 1.0f);
    CHECK(config.window(1) == 0);
    CHECK_FALSE(config.shape.is_moe_layer(1));
  }
  SECTION("deepseek v3") {
    const ModelConfig config = parse(data_config("deepseek-tiny"));
    const ModelShape shape = config.shape;
    CHECK(shape.num_kv_heads == 1);  // not num_key_value_heads, which is 8
    CHECK(shape.head_dim == 576);    // not head_dim, which is the rope size
    CHECK(shape.value_dim == 512);
    CHECK(shape.is_mla());
    CHECK(shape.ffn == 512);
    CHECK(shape.expert_ffn() == 64);
    CHECK(shape.shared_ffn() == 64);
    CHECK(shape.num_experts() == 8);
    CHECK(config.rope.rotary_dim == 64);
    CHECK(config.rope.is_interleaved);
    CHECK_FALSE(config.shape.is_moe_layer(0));
    CHECK(config.shape.is_moe_layer(1));
    REQUIRE(config.shape.moe.has_value());
    CHECK(config.router.scoring == RouterScoring::sigmoid);
    CHECK(config.has_router_bias);
    CHECK(config.router.num_groups == 4);
    CHECK(config.router.groups_kept == 2);
    CHECK(config.shape.moe->top_k == 2);
    CHECK(config.router.normalize);
    CHECK(config.router.scale == 2.5f);
    CHECK_FALSE(config.fp8_blocks.has_value());
  }
  SECTION("deepseek v3 in fp8") {
    const ModelConfig config = parse(data_config("deepseek-tiny-fp8"));
    REQUIRE(config.fp8_blocks.has_value());
    CHECK(config.fp8_blocks->block_rows == 128);
    CHECK(config.fp8_blocks->block_cols == 128);
  }
  SECTION("deepseek v2") {
    const ModelConfig config = parse(data_config("deepseek-v2-tiny"));
    CHECK(config.shape.mla->q_lora_rank == 0);
    CHECK(config.rope.is_interleaved);
    CHECK(config.router.scoring == RouterScoring::softmax);
    CHECK_FALSE(config.has_router_bias);
    CHECK_FALSE(config.router.normalize);
    CHECK(config.router.num_groups == 4);
    CHECK(config.router.scale == 1.0f);
    CHECK(config.rope.magnitude() == 1.0f);  // mscale and mscale_all_dim are equal
  }
}

TEST_CASE("absent optional keys have the values that transformers gives them") {
  json config = llama();
  config["hidden_act"] = "swish";  // another name of silu
  config.erase("num_key_value_heads");
  config.erase("max_position_embeddings");
  config.erase("rms_norm_eps");
  ModelConfig parsed = parse(config);
  CHECK(parsed.shape.num_kv_heads == 8);
  CHECK(parsed.shape.head_dim == 32);
  CHECK(parsed.max_positions == 2048);
  CHECK(parsed.rms_norm_eps == 1e-6f);
  CHECK(parsed.rope.theta == 10000.0);
  CHECK(parsed.rope.type == RopeType::standard);

  parsed = parse(deepseek_v3());
  CHECK(parsed.router.scale == 2.5f);
  CHECK(parsed.router.normalize);
  CHECK(parsed.rope.is_interleaved);
  CHECK(parsed.shape.shared_ffn() == 192);

  config = deepseek_v2();
  config.erase("topk_method");
  parsed = parse(config);
  CHECK(parsed.router.num_groups == 1);  // greedy routing ignores groups, whatever n_group says
  CHECK(parsed.router.groups_kept == 1);
  CHECK(parsed.router.scale == 1.0f);
  config["rope_interleave"] = false;
  CHECK(parse(config).rope.is_interleaved);  // only V3 has the key

  config = deepseek_v3();
  config["rope_interleave"] = false;
  CHECK_FALSE(parse(config).rope.is_interleaved);
  config["n_shared_experts"] = nullptr;
  config["n_group"] = nullptr;
  config["topk_group"] = nullptr;
  parsed = parse(config);
  CHECK(parsed.shape.shared_ffn() == 0);
  CHECK(parsed.router.num_groups == 1);
  config.erase("topk_group");
  CHECK(parse(config).router.groups_kept == 1);

  config["n_routed_experts"] = nullptr;
  CHECK_FALSE(parse(config).shape.moe.has_value());
  CHECK(parse(config).shape.num_experts() == 0);
}

TEST_CASE("relatives of Llama differ where their architecture does") {
  json config = llama();
  config["attention_bias"] = true;
  config["mlp_bias"] = true;
  CHECK(parse(config).has_qkv_bias);
  CHECK(parse(config).has_output_bias);
  CHECK(parse(config).has_mlp_bias);

  config = llama();
  config["model_type"] = "qwen2";
  CHECK(parse(config).has_qkv_bias);
  CHECK_FALSE(parse(config).has_output_bias);
  CHECK(parse(config).window(0) == 0);  // sliding_window counts only with use_sliding_window
  config["use_sliding_window"] = true;
  config["sliding_window"] = 100;
  config["max_window_layers"] = 2;
  CHECK(parse(config).window(1) == 0);
  CHECK(parse(config).window(2) == 100);
  config["layer_types"] = {"sliding_attention", "full_attention", "full_attention"};
  CHECK(parse(config).window(0) == 100);
  CHECK(parse(config).window(2) == 0);

  config = llama();
  config["model_type"] = "qwen3";
  CHECK(parse(config).has_qk_norm);
  CHECK(parse(config).shape.head_dim == 128);
  CHECK_FALSE(parse(config).has_qkv_bias);
  config["head_dim"] = 64;
  CHECK(parse(config).shape.head_dim == 64);

  config = llama();
  config["model_type"] = "mistral";
  CHECK(parse(config).window(0) == 4096);
  config["sliding_window"] = 77;
  CHECK(parse(config).window(2) == 77);
  config["sliding_window"] = nullptr;
  CHECK(parse(config).window(0) == 0);
}

TEST_CASE("layer_types say which layers of a mistral or a ministral have the window") {
  for (const char* type : {"mistral", "ministral"}) {
    json config = llama();
    config["model_type"] = type;
    config["sliding_window"] = 7;
    config["max_window_layers"] = 1;  // only Qwen has the key
    CHECK(parse(config).window(0) == 7);
    config["layer_types"] = {"full_attention", "sliding_attention", "full_attention"};
    CHECK(parse(config).window(0) == 0);
    CHECK(parse(config).window(1) == 7);
    CHECK(parse(config).window(2) == 0);
    config["layer_types"] = {"full_attention", "sliding_attention"};
    CHECK_THAT(failure_of_config(config.dump()).what,
               Catch::Matchers::ContainsSubstring("expected an array of 3 strings"));
  }
}

TEST_CASE("layer_types of a model without a window are full attention, or refused") {
  const auto fails = [](json config) { return failure_of_config(config.dump()).what; };
  for (const char* type : {"llama", "qwen2", "qwen3", "mistral", "deepseek_v3"}) {
    CAPTURE(type);
    json config = type == std::string("deepseek_v3") ? deepseek_v3() : llama();
    config["model_type"] = type;
    config["sliding_window"] = nullptr;
    const auto layers = config["num_hidden_layers"].get<std::size_t>();
    config["layer_types"] = json(std::vector<std::string>(layers, "full_attention"));
    CHECK(parse(config).window(0) == 0);
    for (const char* other : {"sliding_attention", "chunked_attention", "linear_attention"}) {
      config["layer_types"][0] = other;
      CHECK_THAT(fails(config), Catch::Matchers::ContainsSubstring(other) &&
                                    Catch::Matchers::ContainsSubstring("the model has no sliding window"));
    }
    config["layer_types"] = json::array({"full_attention"});
    CHECK_THAT(fails(config), Catch::Matchers::ContainsSubstring("expected an array of"));
  }
  json qwen = llama();
  qwen["model_type"] = "qwen3";
  qwen["sliding_window"] = 8;  // without use_sliding_window
  CHECK(parse(qwen).unread_attention_keys.empty());
  qwen["layer_types"] = {"full_attention", "sliding_attention", "full_attention"};
  CHECK_THAT(fails(qwen), Catch::Matchers::ContainsSubstring("the model has no sliding window"));
}

TEST_CASE(
    "windows and chunks of an architecture that has none are told, layers with configs of their own "
    "refused") {
  for (json config : {llama(), deepseek_v2(), deepseek_v3()}) {
    CHECK(parse(config).unread_attention_keys.empty());
    config["sliding_window"] = 8;
    config["attention_chunk_size"] = 16;
    config["dual_chunk_attention_config"] = {{"chunk_size", 262144}};
    CHECK(parse(config).unread_attention_keys ==
          std::vector<std::string>{"sliding_window", "attention_chunk_size", "dual_chunk_attention_config"});
    config["per_layer_config"] = {{"0", {{"rms_norm_eps", 1.0}}}};
    CHECK_THAT(failure_of_config(config.dump()).what, Catch::Matchers::ContainsSubstring("per_layer_config"));
  }
}

TEST_CASE("sizes that no layer uses do not bind a topology") {
  json config = deepseek_v3();
  config["first_k_dense_replace"] = 0;
  CHECK(parse(config).shape.ffn == 0);
  CHECK(parse(config).shape.expert_ffn() == 96);
  config["moe_layer_freq"] = 2;
  CHECK(parse(config).shape.ffn == 512);
  CHECK(parse(config).shape.is_moe_layer(0));
  CHECK_FALSE(parse(config).shape.is_moe_layer(1));
  config["num_hidden_layers"] = 5;
  config["first_k_dense_replace"] = 1;  // of the layers from 1 on, those with even numbers
  for (const std::int64_t layer : {0, 1, 2, 3, 4}) {
    CAPTURE(layer);
    CHECK(parse(config).shape.is_moe_layer(layer) == (layer == 2 || layer == 4));
  }
  config["num_hidden_layers"] = 3;
  config["first_k_dense_replace"] = 3;
  CHECK(parse(config).shape.ffn == 512);
  CHECK(parse(config).shape.num_experts() == 0);
  config["moe_layer_freq"] = 1;
  CHECK(parse(config).shape.num_experts() == 0);
  config["first_k_dense_replace"] = 2;
  CHECK(parse(config).shape.num_experts() == 16);
}

TEST_CASE("end tokens are one id, a list, or none") {
  json config = llama();
  config["eos_token_id"] = {3, 5, 7};
  CHECK(parse(config).eos_ids == std::vector<std::int64_t>{3, 5, 7});
  config["eos_token_id"] = nullptr;
  CHECK(parse(config).eos_ids.empty());
}

TEST_CASE("config.json and generation_config.json take equally many end tokens") {
  json config = llama();
  std::vector<std::int64_t> ids(1024);
  std::iota(ids.begin(), ids.end(), 0);
  config["eos_token_id"] = ids;
  CHECK(parse(config).eos_ids == ids);
  const json generation = {{"eos_token_id", ids}};
  CHECK(parse_generation_config(generation.dump(), "generation_config.json").eos_ids == ids);
  ids.push_back(1024);
  config["eos_token_id"] = ids;
  const std::string says = "eos_token_id is an array of 1025; expected at most 1024 integers";
  CHECK_THAT(failure_of_config(config.dump()).what, Catch::Matchers::ContainsSubstring(says));
  const json longer = {{"eos_token_id", ids}};
  CHECK_THAT(required_failure([&] { parse_generation_config(longer.dump(), "f"); }).what,
             Catch::Matchers::ContainsSubstring(says));
}

TEST_CASE("a family's end token stands for an absent one, and null is none") {
  const auto check = [](json config, const char* type, const std::vector<std::int64_t>& eos_ids) {
    CAPTURE(type);
    config["model_type"] = type;
    CHECK(parse(config).eos_ids == eos_ids);
    config["eos_token_id"] = nullptr;
    CHECK(parse(config).eos_ids.empty());
    config["eos_token_id"] = 9;
    CHECK(parse(config).eos_ids == std::vector<std::int64_t>{9});
  };
  for (const char* type : {"llama", "mistral", "ministral"}) check(llama(), type, {2});
  for (const char* type : {"qwen2", "qwen3"}) check(llama(), type, {});
  check(deepseek_v2(), "deepseek_v2", {2});
  check(deepseek_v3(), "deepseek_v3", {1});
}

namespace {

/// A config with one value changed or removed, and the expected message.
struct BadValue {
  json config;
  const char* key;  // dotted
  json value;       // discarded: the key is removed
  const char* says;
};

const json kGone = json(json::value_t::discarded);

void check_refused(const std::vector<BadValue>& cases) {
  for (const BadValue& c : cases) {
    json config = c.config;
    std::string key = c.key;
    json* object = &config;
    if (const auto dot = key.find('.'); dot != std::string::npos) {
      object = &config[key.substr(0, dot)];
      key.erase(0, dot + 1);
    }
    CHECK_NOTHROW(parse(config));  // negative control: valid before the change
    if (c.value.is_discarded()) {
      object->erase(key);
    } else {
      (*object)[key] = c.value;
    }
    CAPTURE(c.key, c.says);
    const auto [code, message] = failure_of_config(config.dump());
    CHECK(code == ErrorCode::invalid_file);
    CHECK_THAT(message, Catch::Matchers::ContainsSubstring("config.json: ") &&
                            Catch::Matchers::ContainsSubstring(c.says));
  }
}

}  // namespace

TEST_CASE("missing, mistyped and absurd values give one Error with key, value and expectation") {
  check_refused({
      {llama(), "model_type", kGone, "model_type is missing; expected a string"},
      {llama(), "model_type", 7, "model_type is 7; expected a string"},
      {llama(), "hidden_size", kGone, "hidden_size is missing; expected an integer from 1 to 16777216"},
      {llama(), "hidden_size", nullptr, "hidden_size is missing"},
      {llama(), "hidden_size", 0, "hidden_size is 0; expected an integer from 1"},
      {llama(), "hidden_size", -256, "hidden_size is -256; expected"},
      {llama(), "hidden_size", "256", "hidden_size is '256'; expected"},
      {llama(), "hidden_size", 256.5, "hidden_size is 256.5; expected"},
      {llama(), "hidden_size", true, "hidden_size is true; expected"},
      {llama(), "hidden_size", json::array({256}), "hidden_size is an array of 1; expected"},
      {llama(), "hidden_size", (1 << 24) + 1, "hidden_size is 16777217; expected"},
      {llama(), "hidden_size", std::uint64_t{1} << 63, "hidden_size is 9223372036854775808; expected"},
      {llama(), "hidden_size", 257,
       "num_attention_heads is 8; expected a divisor of hidden_size, which is 257"},
      {llama(), "intermediate_size", kGone, "intermediate_size is missing"},
      {llama(), "intermediate_size", -1, "intermediate_size is -1"},
      {llama(), "num_hidden_layers", kGone, "num_hidden_layers is missing"},
      {llama(), "num_hidden_layers", 0, "num_hidden_layers is 0"},
      {llama(), "num_hidden_layers", 1 << 21,
       "num_hidden_layers is 2097152; expected an integer from 1 to 1048576"},
      {llama(), "num_attention_heads", kGone, "num_attention_heads is missing"},
      {llama(), "num_attention_heads", 0, "num_attention_heads is 0"},
      {llama(), "num_key_value_heads", 3,
       "num_key_value_heads is 3; expected a divisor of num_attention_heads, which is 8"},
      {llama(), "num_key_value_heads", 16, "num_key_value_heads is 16"},
      {llama(), "num_key_value_heads", 0, "num_key_value_heads is 0"},
      {llama(), "head_dim", 0, "head_dim is 0"},
      {llama(), "head_dim", 63, "head_dim is 63; expected an even number"},
      {llama(), "head_dim", 1 << 20, "head_dim is 1048576"},
      {llama(), "vocab_size", kGone, "vocab_size is missing"},
      {llama(), "vocab_size", 0, "vocab_size is 0"},
      {llama(), "vocab_size", std::int64_t{1} << 40, "vocab_size is 1099511627776"},
      {llama(), "max_position_embeddings", 0, "max_position_embeddings is 0"},
      {llama(), "rms_norm_eps", 0, "rms_norm_eps is 0; expected a number from"},
      {llama(), "rms_norm_eps", -1e-5, "rms_norm_eps is -1e-05"},
      {llama(), "rms_norm_eps", "1e-5", "rms_norm_eps is '1e-5'"},
      {llama(), "tie_word_embeddings", 1, "tie_word_embeddings is 1; expected true or false"},
      {llama(), "attention_bias", "no", "attention_bias is 'no'"},
      {llama(), "eos_token_id", -2, "eos_token_id is -2"},
      {llama(), "eos_token_id", "x", "eos_token_id is 'x'"},
      {llama(), "eos_token_id", json::array({1, "x"}), "eos_token_id is 'x'"},
      {llama(), "rope_theta", 0, "rope_theta is 0"},
      {llama(), "rope_theta", 1, "rope_theta is 1;"},
      {llama(), "rope_theta", 1e300, "rope_theta is 1e+300"},
      {llama(), "rope_scaling", 7, "rope_scaling is 7; expected an object"},
  });
}

TEST_CASE("missing, mistyped and absurd values of rope scaling give one Error") {
  json scaled = llama();
  scaled["rope_theta"] = 500000.0;
  scaled["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 256}};
  json yarn = deepseek_v3();
  yarn["rope_scaling"] = {{"type", "yarn"}, {"factor", 40}, {"original_max_position_embeddings", 4096}};
  check_refused({
      {scaled, "rope_scaling.factor", kGone, "rope_scaling.factor is missing"},
      {scaled, "rope_scaling.factor", 0, "rope_scaling.factor is 0; expected a number from 1"},
      {scaled, "rope_scaling.factor", nullptr, "rope_scaling.factor is missing"},
      {scaled, "rope_scaling.low_freq_factor", kGone, "rope_scaling.low_freq_factor is missing"},
      {scaled, "rope_scaling.high_freq_factor", kGone, "rope_scaling.high_freq_factor is missing"},
      {scaled, "rope_scaling.high_freq_factor", 1, "expected more than low_freq_factor, which is 1"},
      {scaled, "rope_scaling.original_max_position_embeddings", 0, "original_max_position_embeddings is 0"},
      {scaled, "rope_scaling.rope_theta", -5, "rope_scaling.rope_theta is -5"},
      {yarn, "rope_scaling.factor", kGone, "rope_scaling.factor is missing"},
      {yarn, "rope_scaling.beta_fast", -1, "rope_scaling.beta_fast is -1"},
      {yarn, "rope_scaling.beta_slow", 33,
       "rope_scaling.beta_fast is 32.0; expected at least beta_slow, which is 33"},
      {yarn, "rope_scaling.mscale", -1, "rope_scaling.mscale is -1"},
      {yarn, "rope_scaling.attention_factor", 0, "rope_scaling.attention_factor is 0"},
  });
}

TEST_CASE("missing, mistyped and absurd values of DeepSeek's configs give one Error") {
  json fp8 = deepseek_v3();
  fp8["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  check_refused({
      {deepseek_v3(), "kv_lora_rank", kGone, "kv_lora_rank is missing"},
      {deepseek_v3(), "q_lora_rank", kGone, "q_lora_rank is missing; expected an integer, or null"},
      {deepseek_v3(), "q_lora_rank", 0, "q_lora_rank is 0"},
      {deepseek_v3(), "qk_nope_head_dim", kGone, "qk_nope_head_dim is missing"},
      {deepseek_v3(), "qk_rope_head_dim", 63, "qk_rope_head_dim is 63; expected an even number"},
      {deepseek_v3(), "v_head_dim", 0, "v_head_dim is 0"},
      {deepseek_v3(), "n_routed_experts", kGone, "n_routed_experts is missing"},
      {deepseek_v3(), "n_routed_experts", 0, "n_routed_experts is 0"},
      {deepseek_v3(), "n_routed_experts", 18,
       "n_group is 4; expected a divisor of n_routed_experts, which is 18"},
      {deepseek_v3(), "n_routed_experts", 4, "groups of at least 2"},
      {deepseek_v3(), "moe_intermediate_size", kGone, "moe_intermediate_size is missing"},
      {deepseek_v3(), "moe_intermediate_size", 1 << 24,
       "n_shared_experts is 2; expected at most 16777216 in"},
      {deepseek_v3(), "num_experts_per_tok", 9, "num_experts_per_tok is 9; expected at most the 8 experts"},
      {deepseek_v3(), "num_experts_per_tok", 17, "num_experts_per_tok is 17"},
      {deepseek_v3(), "topk_group", 5, "topk_group is 5; expected at most n_group, which is 4"},
      {deepseek_v3(), "topk_group", nullptr,
       "topk_group is null; expected an integer from 1 to n_group, which is 4"},
      {deepseek_v3(), "routed_scaling_factor", 0, "routed_scaling_factor is 0"},
      {deepseek_v3(), "moe_layer_freq", 0, "moe_layer_freq is 0"},
      {deepseek_v2(), "num_experts_per_tok", kGone, "num_experts_per_tok is missing"},
      {fp8, "quantization_config.weight_block_size", json::array({128}),
       "weight_block_size is an array of 1"},
      {fp8, "quantization_config.weight_block_size", json::array({128, 0}), "weight_block_size is 0"},
      {fp8, "quantization_config.quant_method", kGone, "quantization_config.quant_method is missing"},
  });
}

TEST_CASE("what is legal but not built is unsupported and says what is") {
  struct Case {
    json config;
    json change;
    const char* says;
  };
  const std::vector<Case> cases = {
      {llama(),
       {{"model_type", "gpt2"}},
       "model_type is 'gpt2'; supported are llama, mistral, ministral, qwen2, qwen3, deepseek_v2"},
      {llama(), {{"hidden_act", "gelu"}}, "hidden_act is 'gelu'; supported is silu"},
      {llama(),
       {{"rope_scaling", {{"type", "longrope"}, {"factor", 2}}}},
       "type is 'longrope'; supported are default, linear, dynamic, llama3, yarn"},
      {llama(),
       {{"rope_scaling", {{"rope_type", "proportional"}, {"partial_rotary_factor", 0.5}}}},
       "rope_type is 'proportional'"},
      {llama(),
       {{"rope_parameters", {{"full_attention", {{"rope_theta", 1e4}}}}}},
       "one rope for all layers"},
      {llama(), {{"partial_rotary_factor", 0.5}}, "partial_rotary_factor is not 1"},
      {llama(),
       {{"rope_scaling", {{"type", "linear"}, {"factor", 2}, {"partial_rotary_factor", 0.5}}}},
       "rope_scaling.partial_rotary_factor is not 1"},
      {llama(),
       {{"quantization_config", {{"quant_method", "awq"}}}},
       "quant_method is 'awq'; supported is fp8"},
      {llama(),
       {{"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", nullptr}}}},
       "weight_block_size is null"},
      {llama(), {{"is_causal", false}}, "is_causal is not true"},
      {deepseek_v2(), {{"is_causal", nullptr}}, "is_causal is not true"},
      {llama(), {{"transformers_weights", "other.safetensors"}}, "transformers_weights names another file"},
      {deepseek_v3(), {{"topk_method", "greedy"}}, "topk_method is 'greedy' with scoring_func 'sigmoid'"},
      {deepseek_v3(), {{"scoring_func", "softmax"}}, "with scoring_func 'softmax'"},
      {deepseek_v2(), {{"topk_method", "noaux_tc"}}, "topk_method is 'noaux_tc'"},
      {deepseek_v2(),
       {{"mlp_bias", true}, {"n_shared_experts", 0}},
       "mlp_bias is true with n_shared_experts 0"},
  };
  for (const Case& c : cases) {
    json config = c.config;
    config.update(c.change);
    const auto [code, message] = failure_of_config(config.dump());
    CAPTURE(c.says);
    CHECK(code == ErrorCode::unsupported);
    CHECK_THAT(message, Catch::Matchers::ContainsSubstring("config.json: ") &&
                            Catch::Matchers::ContainsSubstring(c.says));
  }
}

TEST_CASE("null is no absent key where transformers tells them apart") {
  json config = deepseek_v3();
  for (const char* key : {"norm_topk_prob", "rope_interleave"}) config.erase(key);
  CHECK(parse(config).router.normalize);
  CHECK(parse(config).rope.is_interleaved);
  config["norm_topk_prob"] = nullptr;
  config["rope_interleave"] = nullptr;
  CHECK_FALSE(parse(config).router.normalize);
  CHECK_FALSE(parse(config).rope.is_interleaved);

  config = llama();
  config["is_causal"] = true;
  config["transformers_weights"] = "model.safetensors";
  config["rope_scaling"] = {{"type", "yarn"}, {"factor", 4}};
  CHECK(parse(config).rope.truncate);
  config["rope_scaling"]["truncate"] = nullptr;
  CHECK_FALSE(parse(config).rope.truncate);

  config["eos_token_id"] = {-1, 3};
  CHECK(parse(config).eos_ids == std::vector<std::int64_t>{3});
  config["eos_token_id"] = -1;
  CHECK(parse(config).eos_ids.empty());

  config["quantization_config"] = {{"quant_method", "fp8"}};
  CHECK(parse(config).fp8_blocks->block_rows == 128);
  CHECK(parse(config).fp8_blocks->block_cols == 128);
}

TEST_CASE("what generation_config.json asks for and is not built is named, what changes nothing is not") {
  const auto unheeded = [](const json& file) {
    return parse_generation_config(file.dump(), "generation_config.json").unheeded;
  };
  CHECK(unheeded({{"num_beams", 1},
                  {"min_length", 0},
                  {"suppress_tokens", json::array()},
                  {"bad_words_ids", nullptr},
                  {"typical_p", 1.0},
                  {"eos_token_id", 2},
                  {"max_length", 20}})
            .empty());
  CHECK(unheeded({{"num_beams", 4}, {"suppress_tokens", {5, 6}}, {"forced_eos_token_id", 2}}) ==
        std::vector<std::string>{"num_beams", "suppress_tokens", "forced_eos_token_id"});
  CHECK(parse_generation_config(R"({"eos_token_id": [-1, 7]})", "f").eos_ids == std::vector<std::int64_t>{7});
}

TEST_CASE("text that is no sound JSON object is refused") {
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "{\"a\":";
  for (const std::string& text : {std::string(), std::string("{"), std::string("[]"), std::string("null"),
                                  deep, std::string(R"({"model_type":"llama","model_type":"llama"})"),
                                  std::string(R"({"model_type":"llama","rms_norm_eps":NaN})"),
                                  std::string(R"({"model_type":"llama","rms_norm_eps":1e999})"),
                                  std::string("{\"model_type\":\"\xff\"}")}) {
    CAPTURE(text.substr(0, 100));
    const auto [code, message] = failure_of_config(text);
    CHECK(code == ErrorCode::invalid_file);
    CHECK(message.size() < 500);
  }
}

TEST_CASE("standard and linear frequencies equal the double-precision formula") {
  json config = llama();
  config["head_dim"] = 128;
  config["rope_theta"] = 500000.0;
  std::vector<double> expected;
  for (std::size_t i = 0; i < 64; ++i) expected.push_back(standard_frequency(500000.0, 128, i));
  check_frequencies(parse(config).rope.inverse_frequencies(), expected);

  config["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}};
  for (double& frequency : expected) frequency /= 4.0;
  check_frequencies(parse(config).rope.inverse_frequencies(), expected);
  CHECK(parse(config).rope.magnitude() == 1.0f);
}

TEST_CASE("dynamic frequencies are the standard ones, and max_position_embeddings stays the limit") {
  json config = llama();
  config["head_dim"] = 128;
  config["rope_theta"] = 500000.0;
  const ModelConfig standard = parse(config);
  const json scaling = {{"rope_type", "dynamic"}, {"factor", 4.0}};
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    CAPTURE(key);
    json dynamic = config;
    dynamic[key] = scaling;
    const ModelConfig parsed = parse(dynamic);
    CHECK(parsed.rope.inverse_frequencies() == standard.rope.inverse_frequencies());
    CHECK(parsed.rope.magnitude() == 1.0f);
    CHECK(parsed.max_positions == 8192);
    CHECK(parsed.unread_rope_keys.empty());
    dynamic[key].erase("factor");
    CHECK_THAT(failure_of_config(dynamic.dump()).what,
               Catch::Matchers::ContainsSubstring("factor is missing"));
  }
}

TEST_CASE("llama3 frequencies equal the double-precision formula, in the old layout and the new") {
  const json scaling = {{"rope_type", "llama3"},
                        {"factor", 8.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 8192}};
  json old_layout = llama();
  old_layout["head_dim"] = 128;
  old_layout["rope_theta"] = 500000.0;
  old_layout["rope_scaling"] = scaling;
  json new_layout = llama();
  new_layout["head_dim"] = 128;
  new_layout["rope_parameters"] = scaling;
  new_layout["rope_parameters"]["rope_theta"] = 500000.0;

  int kept = 0;
  int divided = 0;
  int blended = 0;
  std::vector<double> expected;
  for (std::size_t i = 0; i < 64; ++i) {
    const double frequency = standard_frequency(500000.0, 128, i);
    const double turns = 8192.0 * frequency / (2.0 * std::numbers::pi);  // over the original context
    if (turns > 4.0) {
      expected.push_back(frequency);
      ++kept;
    } else if (turns < 1.0) {
      expected.push_back(frequency / 8.0);
      ++divided;
    } else {
      const double smooth = (turns - 1.0) / 3.0;
      expected.push_back((1.0 - smooth) * frequency / 8.0 + smooth * frequency);
      ++blended;
    }
  }
  CHECK(kept > 0);
  CHECK(divided > 0);
  CHECK(blended > 0);
  check_frequencies(parse(old_layout).rope.inverse_frequencies(), expected);
  CHECK(parse(old_layout).rope.inverse_frequencies() == parse(new_layout).rope.inverse_frequencies());
}

TEST_CASE("keys that the rope's type does not take are told, those of transformers are not") {
  for (const char* name : {"llama-tiny", "deepseek-tiny", "deepseek-v2-tiny"}) {
    CAPTURE(name);
    CHECK(parse(data_config(name)).unread_rope_keys.empty());
  }
  json config = deepseek_v3();
  config["rope_scaling"] = {{"type", "yarn"},        {"rope_type", "yarn"},
                            {"factor", 40},          {"original_max_position_embeddings", 4096},
                            {"beta_fast", 32},       {"beta_slow", 1},
                            {"mscale", 1.0},         {"mscale_all_dim", 1.0},
                            {"attention_factor", 1}, {"truncate", true},
                            {"rope_theta", 10000},   {"partial_rotary_factor", 1.0},
                            {"attn_factor", nullptr}};
  CHECK(parse(config).unread_rope_keys.empty());
  config["rope_scaling"]["attn_factor"] = 2;
  CHECK(parse(config).unread_rope_keys == std::vector<std::string>{"attn_factor"});
  config["rope_scaling"] = {{"type", "linear"}, {"factor", 2}, {"beta_fast", 32}, {"low_freq_factor", 1}};
  CHECK(parse(config).unread_rope_keys == std::vector<std::string>{"beta_fast", "low_freq_factor"});
  config["rope_scaling"] = {{"rope_type", "default"}, {"factor", 2}};
  CHECK(parse(config).unread_rope_keys == std::vector<std::string>{"factor"});
}

TEST_CASE("yarn frequencies, cos/sin factor and softmax scale equal the double-precision formulas") {
  json config = deepseek_v3();  // DeepSeek-V3's original rope
  config["rope_theta"] = 10000;
  config["max_position_embeddings"] = 163840;
  config["rope_scaling"] = {{"type", "yarn"},
                            {"factor", 40},
                            {"beta_fast", 32},
                            {"beta_slow", 1},
                            {"mscale", 1.0},
                            {"mscale_all_dim", 1.0},
                            {"original_max_position_embeddings", 4096}};
  const auto dimension_of = [](double rotations) {
    return 64.0 * std::log(4096.0 / (rotations * 2.0 * std::numbers::pi)) / (2.0 * std::log(10000.0));
  };
  const double low = std::floor(dimension_of(32.0));
  const double high = std::ceil(dimension_of(1.0));
  REQUIRE(low == 10.0);
  REQUIRE(high == 23.0);
  std::vector<double> expected;
  for (std::size_t i = 0; i < 32; ++i) {
    const double frequency = standard_frequency(10000.0, 64, i);
    double slow = (static_cast<double>(i) - low) / (high - low);
    slow = slow < 0.0 ? 0.0 : slow > 1.0 ? 1.0 : slow;
    expected.push_back(frequency / 40.0 * slow + frequency * (1.0 - slow));
  }
  const ModelConfig v3 = parse(config);
  CHECK(v3.max_positions == 163840);
  json trained = config;  // some files give the trained length
  trained["max_position_embeddings"] = 4096;
  CHECK(parse(trained).max_positions == 163840);
  trained["max_position_embeddings"] = 200000;
  CHECK(parse(trained).max_positions == 200000);
  check_frequencies(v3.rope.inverse_frequencies(), expected);
  CHECK(v3.rope.magnitude() == 1.0f);
  CHECK(v3.softmax_scale() == Approx(0.1352337788608801).epsilon(1e-6));

  config["rope_scaling"]["mscale_all_dim"] = 0.5;
  const double m = 0.1 * std::log(40.0) + 1.0;
  const double m_half = 0.05 * std::log(40.0) + 1.0;
  CHECK(parse(config).rope.magnitude() == Approx(m / m_half).epsilon(1e-6));
  CHECK(parse(config).softmax_scale() == Approx(m_half * m_half / std::sqrt(192.0)).epsilon(1e-6));

  // Any type that scales has the factor m^2.
  for (const char* type : {"linear", "dynamic", "llama3", "default"}) {
    json other = config;
    other["rope_scaling"].update({{"type", type}, {"low_freq_factor", 1}, {"high_freq_factor", 4}});
    const double factor = std::string(type) == "default" ? 1.0 : m_half * m_half;
    CHECK(parse(other).rope.magnitude() == 1.0f);
    CHECK(parse(other).softmax_scale() == Approx(factor / std::sqrt(192.0)).epsilon(1e-6));
  }

  config["rope_scaling"].erase("mscale_all_dim");
  CHECK(parse(config).rope.magnitude() == Approx(m).epsilon(1e-6));
  CHECK(parse(config).softmax_scale() == Approx(1.0 / std::sqrt(192.0)).epsilon(1e-6));

  config["rope_scaling"]["attention_factor"] = 1.25;
  CHECK(parse(config).rope.magnitude() == 1.25f);

  config["rope_scaling"]["factor"] = nullptr;  // defaults to the ratio of the context lengths, 40
  check_frequencies(parse(config).rope.inverse_frequencies(), expected);
}

TEST_CASE("yarn blends between the first and the last dimension, over at least a thousandth of one") {
  struct Row {
    double theta;
    double original;
    double beta_fast;
    double beta_slow;
    bool truncate;
  };
  for (const Row& row :
       {Row{10000, 128, 32, 1, true}, Row{10, 4096, 300, 1, true}, Row{10000, 6, 32, 1, true}}) {
    CAPTURE(row.theta, row.original);
    json config = deepseek_v3();
    config["rope_theta"] = row.theta;
    config["rope_scaling"] = {{"type", "yarn"},
                              {"factor", 4},
                              {"beta_fast", row.beta_fast},
                              {"beta_slow", row.beta_slow},
                              {"truncate", row.truncate},
                              {"original_max_position_embeddings", static_cast<std::int64_t>(row.original)}};
    const auto dimension_of = [&](double rotations) {
      return 64.0 * std::log(row.original / (rotations * 2.0 * std::numbers::pi)) /
             (2.0 * std::log(row.theta));
    };
    double low = dimension_of(row.beta_fast);
    double high = dimension_of(row.beta_slow);
    if (row.truncate) low = std::floor(low);
    if (row.truncate) high = std::ceil(high);
    low = low < 0.0 ? 0.0 : low;
    high = high > 63.0 ? 63.0 : high;
    if (low == high) high += 0.001;
    std::vector<double> expected;
    for (std::size_t i = 0; i < 32; ++i) {
      const double frequency = standard_frequency(row.theta, 64, i);
      double slow = (static_cast<double>(i) - low) / (high - low);
      slow = slow < 0.0 ? 0.0 : slow > 1.0 ? 1.0 : slow;
      expected.push_back(frequency / 4.0 * slow + frequency * (1.0 - slow));
    }
    check_frequencies(parse(config).rope.inverse_frequencies(), expected);
  }
}

TEST_CASE("yarn over less than the trained context scales nothing up") {
  json config = deepseek_v3();
  config["max_position_embeddings"] = 2048;
  config["rope_scaling"] = {
      {"type", "yarn"}, {"factor", nullptr}, {"original_max_position_embeddings", 4096}};
  CHECK(parse(config).rope.magnitude() == 1.0f);
}

TEST_CASE("a layer's config has the layer's window, the rope's magnitude and the latent norm's own epsilon") {
  const float frequency = 0.25f;
  json config = llama();
  config.update({{"model_type", "mistral"},
                 {"sliding_window", 7},
                 {"layer_types", {"full_attention", "sliding_attention", "full_attention"}}});
  const ModelConfig mistral = parse(config);
  for (const std::int64_t index : {0, 1, 2}) {
    const LayerConfig layer = mistral.layer(index, &frequency);
    CHECK(layer.window == (index == 1 ? 7 : 0));
    CHECK(layer.norm_epsilon == 1e-5f);
    CHECK(layer.softmax_scale == Approx(1.0 / std::sqrt(32.0)).epsilon(1e-6));
    CHECK(layer.rope.inverse_frequency == &frequency);
    CHECK(layer.rope.rotary_dim == 32);
    CHECK_FALSE(layer.rope.is_interleaved);
    CHECK(layer.rope.magnitude == 1.0f);
  }

  config = deepseek_v3();
  config["rope_scaling"] = {{"type", "yarn"}, {"factor", 40}, {"attention_factor", 1.25}};
  const LayerConfig layer = parse(config).layer(1, &frequency);
  CHECK(layer.window == 0);
  CHECK(layer.norm_epsilon == 1e-5f);
  CHECK(layer.latent_norm_epsilon == 1e-6f);  // hard-coded in transformers, whatever rms_norm_eps says
  CHECK(layer.softmax_scale == Approx(1.0 / std::sqrt(192.0)).epsilon(1e-6));
  CHECK(layer.rope.rotary_dim == 64);
  CHECK(layer.rope.is_interleaved);
  CHECK(layer.rope.magnitude == 1.25f);
  CHECK(layer.router.num_groups == 4);
  CHECK(layer.router.groups_kept == 2);
  CHECK(layer.router.scale == 2.5f);
}

TEST_CASE("each key of generation_config.json sets its own default, draws' only with do_sample") {
  json file = {{"eos_token_id", {3, 5}}, {"do_sample", true}, {"temperature", 0.5},       {"top_p", 0.75},
               {"min_p", 0.125},         {"top_k", 7},        {"repetition_penalty", 1.5}};
  const auto defaults = [&] { return parse_generation_config(file.dump(), "generation_config.json"); };
  CHECK(defaults().eos_ids == std::vector<std::int64_t>{3, 5});
  CHECK(defaults().sampling ==
        SamplingConfig{.temperature = 0.5f, .top_p = 0.75f, .min_p = 0.125f, .top_k = 7});
  CHECK(defaults().penalties == Penalties{.repetition = 1.5f});

  for (const json& no : {json(false), json(nullptr)}) {
    file["do_sample"] = no;
    CHECK(defaults().eos_ids == std::vector<std::int64_t>{3, 5});
    CHECK(defaults().sampling == SamplingConfig{});
    CHECK(defaults().penalties == Penalties{.repetition = 1.5f});
  }
  file = {{"do_sample", true}, {"top_k", 20.0}};  // some files write whole numbers this way
  CHECK(defaults().sampling == SamplingConfig{.temperature = 1.0f, .top_k = 20});
  for (const double wrong : {20.5, -2147483649.0, 2147483648.0, 1e300}) {
    file["top_k"] = wrong;
    CHECK_THAT(required_failure([&] { defaults(); }).what,
               Catch::Matchers::ContainsSubstring("top_k is ") &&
                   Catch::Matchers::ContainsSubstring("an integer from -2147483648 to 2147483647"));
    CHECK(parse_generation_config(file.dump(), "generation_config.json", false).sampling == SamplingConfig{});
  }
  // The command line may replace what is out of range, so only numbers that no float holds are refused.
  file = {{"do_sample", true}, {"temperature", -150}, {"top_p", 1e-7},
          {"min_p", 2},        {"top_k", -1},         {"repetition_penalty", 0}};
  CHECK(defaults().sampling ==
        SamplingConfig{.temperature = -150.0f, .top_p = 1e-7f, .min_p = 2.0f, .top_k = -1});
  CHECK(defaults().penalties == Penalties{.repetition = 0.0f});
  file["temperature"] = 1e39;
  CHECK_THAT(required_failure([&] { defaults(); }).what,
             Catch::Matchers::ContainsSubstring("temperature is 1e+39"));
  file = {{"do_sample", true}};
  CHECK(defaults().eos_ids.empty());
  CHECK(defaults().sampling == SamplingConfig{.temperature = 1.0f});
  CHECK(defaults().penalties == Penalties{});
  CHECK(parse_generation_config("", "generation_config.json").sampling == SamplingConfig{});
}
