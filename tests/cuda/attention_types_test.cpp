// SPDX-License-Identifier: Apache-2.0
// Partial attention on a GPU over e4m3 KV and over head sizes that are not powers of two, compared with a
// naive reference.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <helix/cuda/backend.hpp>

#include "cuda/attention_world.hpp"
#include "cuda/gpu.hpp"
#include "cuda/kv_pools.hpp"
#include "support/catch.hpp"

namespace helix::test {
namespace {

// 1 to 8 draft tokens, prefills that fill query tiles with a remainder, and one sequence without query
// tokens.
const std::vector<Sequence> kRagged = {{40, 1}, {41, 2}, {5, 3},   {70, 4},  {31, 5},  {32, 6},
                                       {33, 7}, {9, 0},  {90, 17}, {96, 70}, {1234, 3}};

// As many, of few rows each: the first runs the kernel for many rows of e4m3, this one that for few.
const std::vector<Sequence> kFewRows = {{40, 1}, {41, 2}, {5, 3}, {70, 2}, {9, 0}, {1234, 3}};

/// What the tensor-core kernel supports in addition to 16-bit KV of 64, 128 and 256 columns.
struct Built {
  DType kv_dtype;
  std::int64_t d;
  std::int64_t dv = d;
};

template <class T>
std::vector<Built> all_built() {
  std::vector<Built> all;
  for (const std::int64_t d : {64, 80, 96, 112, 128, 256}) all.push_back({DType::fp8_e4m3, d});
  for (const std::int64_t d : {80, 96, 112}) all.push_back({kDTypeOf<T>, d});
  all.push_back({kDTypeOf<T>, 192, 128});
  return all;
}

template <class T>
AttentionCase case_of(const Built& built) {
  AttentionCase c;
  c.kv_dtype = built.kv_dtype;
  c.d = built.d;
  c.dv = built.dv;
  return c;
}

}  // namespace

TEMPLATE_TEST_CASE("attention on a GPU of e4m3 and of odd head sizes serves every grouping of heads", "", f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const Built& built : all_built<TestType>()) {
    for (const std::int64_t group : {1, 4, 5, 8, 16, 20}) {
      AttentionCase c = case_of<TestType>(built);
      c.group = group;
      CAPTURE(to_string(c.kv_dtype), c.d, group);
      for (const auto& sequences : {kRagged, kFewRows}) {
        c.sequences = sequences;
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of e4m3 and of odd head sizes is exact at every edge of its tiles", "",
                   f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  std::size_t turn = 0;
  for (const Built& built : all_built<TestType>()) {
    for (const std::int64_t page_tokens : {1, 2, 8, 17, 48, 64}) {
      AttentionCase c = case_of<TestType>(built);
      c.pool = turn++ % 2 == 0 ? helix_pool : vllm_pool;
      c.page_tokens = page_tokens;
      c.kv_heads = 3;
      c.sequences.clear();
      for (const std::int64_t length : {1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000})
        c.sequences.push_back({length, 1});
      CAPTURE(to_string(c.kv_dtype), c.d, page_tokens, c.pool == vllm_pool);
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
    for (const MakeKvPool pool : {helix_pool, vllm_pool}) {
      // A single sequence: clusters of blocks, or the whole GPU.
      for (const std::int64_t length : {700, 2300, 9000}) {
        AttentionCase c = case_of<TestType>(built);
        c.pool = pool;
        c.kv_heads = 1;
        c.sequences = {{length, 1}};
        CAPTURE(to_string(c.kv_dtype), c.d, length, pool == vllm_pool);
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      }
    }
    ++turn;
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of e4m3 and of odd head sizes honours windows, soft caps and shards",
                   "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  std::size_t turn = 0;
  for (const Built& built : all_built<TestType>()) {
    for (const std::int64_t window : {0, 5, 100}) {
      for (const std::int64_t kvp : {1, 3}) {
        AttentionCase c = case_of<TestType>(built);
        c.pool = turn % 2 == 0 ? helix_pool : vllm_pool;
        c.window = window;
        c.forgets = window > 0;
        c.soft_cap = std::array{30.0f, 30.0f, 1e6f, 3e38f, 0.0f}[turn % 5];
        c.kvp = kvp;
        c.chunk = turn % 3 == 0 ? 3 : 16;
        ++turn;
        CAPTURE(to_string(c.kv_dtype), c.d, window, c.soft_cap, kvp, c.chunk);
        c.sequences = kRagged;
        c.padding = {3, 17};
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
        c.sequences = kFewRows;
        c.padding = {3, 7};
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      }
    }
    ++turn;
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of e4m3 without scales takes the stored values", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  AttentionCase c = case_of<TestType>(Built{DType::fp8_e4m3, 128});
  c.is_scaled = false;
  for (const auto& sequences : {kRagged, kFewRows}) {
    c.sequences = sequences;
    CHECK(AttentionWorld<TestType>(c).check(cuda::Operators<TestType>()) == "");
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of e4m3 that is NaN gives NaN", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  struct Rows {
    MakeKvPool pool;
    std::int64_t d;
    std::int64_t dv;
  };
  for (const auto& [pool, d, dv] :
       {Rows{helix_pool, 128, 128}, {vllm_pool, 64, 64}, {helix_pool, 72, 72}, {latent_pool, 576, 512}}) {
    AttentionCase c;
    c.kv_dtype = DType::fp8_e4m3;
    c.kv_heads = pool == latent_pool ? 1 : 2;
    c.pool = pool;
    c.d = d;
    c.dv = dv;
    c.nan_tokens = 1;
    CAPTURE(d);
    for (const std::int64_t queries : {3, 40}) {
      c.sequences = {{40, 1}, {1000, queries}};
      const auto result = AttentionWorld<TestType>(c).run(operators);
      const auto rows = static_cast<std::size_t>((1 + queries) * c.kv_heads * c.group);
      std::vector<TestType> out(rows * static_cast<std::size_t>(dv));
      std::vector<float> lse(rows);
      std::memcpy(out.data(), result.out.data(), out.size() * sizeof(TestType));
      std::memcpy(lse.data(), result.lse.data(), lse.size() * sizeof(float));
      CHECK(
          std::all_of(out.begin(), out.end(), [](TestType x) { return std::isnan(static_cast<float>(x)); }));
      CHECK(std::all_of(lse.begin(), lse.end(), [](float x) { return std::isnan(x); }));
    }
  }
}

TEST_CASE("attention on a GPU of e4m3 is exact for bf16 queries far outside the range of f16") {
  HELIX_REQUIRE_GPUS(1);
  for (const int q_power : {-60, -20, 17, 60}) {
    for (const std::int64_t d : {64, 96, 128}) {
      AttentionCase c = case_of<bf16>(Built{DType::fp8_e4m3, d});
      c.q_power = q_power;
      CAPTURE(q_power, d);
      for (const auto& sequences : {kRagged, kFewRows}) {
        c.sequences = sequences;
        CHECK(AttentionWorld<bf16>(c).check(cuda::Operators<bf16>()) == "");
      }
    }
  }
}

TEMPLATE_TEST_CASE(
    "attention on a GPU of e4m3 and of odd head sizes gives the same bits twice, on few blocks", "", f16,
    bf16) {
  HELIX_REQUIRE_GPUS(1);
  auto operators = attention_operators<TestType>();
  for (const Built& built : all_built<TestType>()) {
    for (const auto& sequences : {kRagged, kFewRows}) {
      AttentionCase c = case_of<TestType>(built);
      c.sequences = sequences;
      const AttentionWorld<TestType> world(c);
      for (const int blocks : {1, 7, 0}) {
        operators.set_attention_blocks(blocks);
        CAPTURE(to_string(c.kv_dtype), c.d, blocks);
        const auto result = world.run(operators);
        CHECK(world.problem({result}) == "");
        CHECK(world.run(operators) == result);
      }
    }
  }
}

}  // namespace helix::test
