// SPDX-License-Identifier: Apache-2.0
// The sizes of a request's caches, and the steps that warm up for it.
#include "generate/request_plan.hpp"

#include <cstdint>
#include <vector>

#include <helix/topology.hpp>

#include "support/catch.hpp"

namespace helix::test {
namespace {

ModelShape small_shape() {
  ModelShape shape;
  shape.num_query_heads = 8;
  shape.num_kv_heads = 2;
  shape.head_dim = shape.value_dim = 64;
  shape.hidden = shape.ffn = 64;
  shape.vocab = 10;
  shape.num_layers = 3;
  return shape;
}

}  // namespace

TEST_CASE("a token's KV is that of all layers, as often as a replica stores it", "[quick]") {
  const ModelShape shape = small_shape();
  decode::GenerationRequest request;
  request.kv_dtype = DType::f32;
  CHECK(kv_bytes_per_token(request, Topology({}, shape)) == 3 * 2 * 128 * 4);
  CHECK(kv_bytes_per_token(request, Topology({.kvp = 2, .tpa = 2}, shape)) == 3 * 2 * 128 * 4);
  CHECK(kv_bytes_per_token(request, Topology({.tpa = 8, .allow_kv_duplication = true}, shape)) ==
        4 * 3 * 2 * 128 * 4);
}

TEST_CASE("a serving decoder has pages for all tokens, and one for each request that runs or is kept",
          "[quick]") {
  decode::GenerationRequest request;
  request.page_tokens = 16;
  request.serving = {.max_sequences = 2, .max_tokens = 64, .kv_tokens = 128};
  const KvCacheSpec one = decode::plan_cache(request, Topology({}, small_shape()), 0, 0);
  CHECK(one.num_layers == 3);
  CHECK(one.max_sequences == 4);
  CHECK(one.max_tokens == 64);
  CHECK(one.num_pages == 8 + 4);
  const KvCacheSpec sharded = decode::plan_cache(request, Topology({.kvp = 2, .pp = 2}, small_shape()), 1, 0);
  CHECK(sharded.num_layers == 1);
  CHECK(sharded.num_pages == 4 + 4);
}

TEST_CASE("a generation's pages hold its longest sequences", "[quick]") {
  decode::GenerationRequest request;
  request.page_tokens = 16;
  request.max_new_tokens = 10;
  request.prompts = {decode::TokenIds(7, 1), decode::TokenIds(6, 1), decode::TokenIds(30, 1)};
  const KvCacheSpec spec = decode::plan_cache(request, Topology({}, small_shape()), 0, 0);
  CHECK(spec.max_sequences == 3);
  CHECK(spec.max_tokens == 40);
  CHECK(spec.num_pages == 2 + 1 + 3);
}

TEST_CASE("rows of fp8_ds_mla are refused for latents that they do not fit", "[quick]") {
  ModelShape shape = small_shape();
  shape.num_kv_heads = 1;
  shape.mla = MlaShape{.kv_lora_rank = 33, .qk_nope_head_dim = 8, .qk_rope_head_dim = 2, .v_head_dim = 8};
  shape.head_dim = 35;
  shape.value_dim = 33;
  decode::GenerationRequest request;
  request.prompts = {decode::TokenIds(7, 1)};
  request.kv_dtype = DType::fp8_ds_mla;
  decode::ModelConfig config;
  config.shape = shape;
  CHECK_THROWS_WITH(check_request(request, config, Topology({}, shape)),
                    Catch::Matchers::ContainsSubstring("latents have 33 columns and 2 of rope"));
  config.shape = small_shape();
  CHECK_THROWS_WITH(check_request(request, config, Topology({}, small_shape())),
                    Catch::Matchers::ContainsSubstring("no latent attention"));
}

TEST_CASE("prompts that may be expanded warm up with blocks of every size that they may have", "[quick]") {
  using Lengths = std::vector<std::int64_t>;
  ModelShape shape = small_shape();
  shape.num_kv_heads = 1;
  shape.mla =
      MlaShape{.kv_lora_rank = 512, .qk_nope_head_dim = 128, .qk_rope_head_dim = 64, .v_head_dim = 128};
  shape.head_dim = 576;
  shape.value_dim = 512;
  const auto prompts_of = [&](const decode::GenerationRequest& request, const TopologySpec& spec = {}) {
    return decode::plan_warm_up(request, Topology(spec, shape), 0).prompts;
  };
  decode::GenerationRequest request;
  request.max_new_tokens = 10;
  request.prompts = {decode::TokenIds(100, 1), decode::TokenIds(3000, 1)};
  CHECK(prompts_of(request) == Lengths{2048, 2048 - 64});
  CHECK(prompts_of(request, {.kvp = 2}) == Lengths{2048, 2048 - 64});
  CHECK(decode::plan_warm_up(request, Topology({}, small_shape()), 0).prompts.empty());

  decode::GenerationRequest short_one = request;
  short_one.prompts = {decode::TokenIds(40, 1)};
  CHECK(prompts_of(short_one) == Lengths{40});
  decode::GenerationRequest absorbed = request;
  absorbed.mla_prefill = MlaForm::absorbed;
  CHECK(prompts_of(absorbed).empty());
  decode::GenerationRequest served;
  served.serving = {.max_sequences = 2, .max_tokens = 10000, .kv_tokens = 20000};
  CHECK(prompts_of(served) == Lengths{8192, 8192 - 64});
}

}  // namespace helix::test
