// SPDX-License-Identifier: Apache-2.0
// What a request's caches hold.
#include "generate/request_plan.hpp"

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
  CHECK(one.layers == 3);
  CHECK(one.max_sequences == 4);
  CHECK(one.max_tokens == 64);
  CHECK(one.pages == 8 + 4);
  const KvCacheSpec sharded = decode::plan_cache(request, Topology({.kvp = 2, .pp = 2}, small_shape()), 1, 0);
  CHECK(sharded.layers == 1);
  CHECK(sharded.pages == 4 + 4);
}

TEST_CASE("a generation's pages hold its longest sequences", "[quick]") {
  decode::GenerationRequest request;
  request.page_tokens = 16;
  request.max_new_tokens = 10;
  request.prompts = {decode::TokenIds(7, 1), decode::TokenIds(6, 1), decode::TokenIds(30, 1)};
  const KvCacheSpec spec = decode::plan_cache(request, Topology({}, small_shape()), 0, 0);
  CHECK(spec.max_sequences == 3);
  CHECK(spec.max_tokens == 40);
  CHECK(spec.pages == 2 + 1 + 3);
}

}  // namespace helix::test
