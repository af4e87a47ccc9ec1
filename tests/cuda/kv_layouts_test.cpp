// SPDX-License-Identifier: Apache-2.0
// Partial attention on a GPU over the paged pools of other engines, read in place.
#include <cstddef>
#include <cstdint>
#include <utility>

#include <helix/cuda/backend.hpp>

#include "cuda/attention_world.hpp"
#include "cuda/gpu.hpp"
#include "cuda/kv_pools.hpp"
#include "support/catch.hpp"

namespace helix::test {

TEMPLATE_TEST_CASE("attention on a GPU reads the pools of other engines where they lie", "", float, f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  constexpr std::int64_t kDims[] = {64, 128, 256};
  std::size_t turn = 0;
  for (const MakeKvPool pool : kv_pool_makers()) {
    for (const std::int64_t page_tokens : {1, 8, 16, 17, 24, 64}) {
      for (const bool is_csr : {false, true}) {
        for (const std::int64_t window : {0, 100}) {
          AttentionCase c = case_of<TestType>(kDims[turn % 3]);
          c.pool = pool;
          c.is_csr = is_csr;
          c.page_tokens = page_tokens;
          c.window = window;
          c.forgets = window > 0;
          c.kvp = turn % 2 == 0 ? 1 : 2;
          c.kv_heads = turn % 5 == 0 ? 1 : 3;
          c.group = turn % 4 == 0 ? 20 : 4;
          c.sequences = {{70, 1}, {333, 4}, {20, 8}, {5, 0}, {700, 2}};
          ++turn;
          CAPTURE(pool({c.kv_dtype, c.kv_heads, c.d, c.dv, page_tokens, 1}).name, page_tokens, is_csr, window,
                  c.d, c.kvp, c.kv_heads, c.group);
          CHECK(AttentionWorld<TestType>(c).check(operators) == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU splits token-major ranges exactly at every edge of its tiles", "", f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t d : {64, 128, 256}) {
    for (const std::int64_t page_tokens : {1, 8, 17, 48, 64}) {
      AttentionCase c = case_of<TestType>(d);
      c.pool = vllm_pool;
      c.page_tokens = page_tokens;
      c.sequences.clear();
      for (const std::int64_t length : {1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 5000})
        c.sequences.push_back({length, 1});
      CAPTURE(d, page_tokens);
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      c.sequences = {{20000, 1}};
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      c.sequences = {{300, 300}, {5000, 7}};
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU reads foreign pools of every storage type and of unequal head sizes",
                   "", float, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  constexpr std::int64_t kDims[][2] = {{48, 16}, {96, 64}, {128, 128}, {192, 128}};
  std::size_t turn = 0;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
    for (const auto& [d, dv] : kDims) {
      for (const MakeKvPool pool : kv_pool_makers()) {
        AttentionCase c = case_of<TestType>(d);
        c.kv_dtype = dtype;
        // A pool in a single tensor has room for D columns in V too.
        c.dv = dv;
        c.pool = pool;
        c.is_csr = turn % 2 == 0;
        c.page_tokens = turn % 3 == 0 ? 1 : 16;
        c.kvp = 2;
        c.sequences = {{150, 1}, {41, 4}};
        ++turn;
        CAPTURE(pool({dtype, c.kv_heads, d, dv, 1, 1}).name, to_string(dtype), d, dv, c.page_tokens);
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU reads latents whose rope columns lie apart", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const DType dtype : {kDTypeOf<TestType>, DType::fp8_e4m3}) {
    for (const MakeKvPool pool : latent_pool_makers()) {
      for (const std::int64_t page_tokens : {1, 17, 64}) {
        for (const bool is_csr : {false, true}) {
          AttentionCase c = case_of<TestType>(576);
          c.kv_dtype = dtype;
          c.dv = 512;
          c.pool = pool;
          c.is_csr = is_csr;
          c.page_tokens = page_tokens;
          c.kv_heads = 1;
          c.group = 16;
          c.kvp = 2;
          c.sequences = {{150, 1}, {20, 2}};
          CAPTURE(to_string(dtype), page_tokens, is_csr);
          CHECK(AttentionWorld<TestType>(c).check(operators) == "");
        }
      }
    }
  }
}

// Negative control: a row at another place than the view says is detected.
TEST_CASE("attention on a GPU of a pool in other places than its view says is wrong") {
  HELIX_REQUIRE_GPUS(1);
  AttentionCase c = case_of<bf16>(128);
  c.sequences = {{100, 1}};
  c.pool = [](const KvPoolSizes& sizes) {
    KvPool pool = vllm_pool(sizes);
    std::swap(pool.format.v.token, pool.format.v.head);
    return pool;
  };
  CHECK(AttentionWorld<bf16>(c).check(cuda::Operators<bf16>()) != "");
}

}  // namespace helix::test
