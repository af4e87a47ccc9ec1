// SPDX-License-Identifier: Apache-2.0
// Properties of partial attention on a GPU with many query rows per KV head, as in prefill and draft steps,
// over KV of q's type and of e4m3, compared with a naive reference.
#include <cstddef>
#include <cstdint>
#include <vector>

#include <helix/cuda/backend.hpp>

#include "cuda/attention_world.hpp"
#include "cuda/gpu.hpp"
#include "cuda/kv_pools.hpp"
#include "support/catch.hpp"

namespace helix::test {
namespace {

// Chunks that end some query tiles and begin others, draft tokens, one token, and one sequence without query
// tokens.
const std::vector<Sequence> kChunks = {{300, 300}, {41, 2},  {700, 129}, {9, 0},
                                       {1500, 33}, {64, 64}, {70, 1}};

/// Types of KV with q of type T.
template <class T>
constexpr DType kKvTypes[] = {kDTypeOf<T>, DType::fp8_e4m3};

}  // namespace

TEMPLATE_TEST_CASE(
    "attention on a GPU of many rows serves every grouping of heads and number of query tokens", "", f16,
    bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t d : {64, 96, 128, 192, 256}) {
    for (const std::int64_t group : {1, 3, 4, 8, 16, 20, 64, 150}) {
      AttentionCase c = case_of<TestType>(d);
      if (d == 192) c.dv = 128;
      c.group = group;
      c.kv_heads = group > 16 ? 1 : 2;
      CAPTURE(d, group);
      const auto check = [&](DType kv_dtype, std::int64_t rows) {
        const std::int64_t queries = (rows + group - 1) / group;
        c.sequences = {{queries, queries}, {200 + queries, queries}, {128, 1}};
        c.kv_dtype = kv_dtype;
        CAPTURE(queries, to_string(kv_dtype));
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      };
      for (const std::int64_t rows : {33, 63, 64, 65, 127, 128, 129, 260}) check(kDTypeOf<TestType>, rows);
      for (const std::int64_t rows : {64, 127, 260}) check(DType::fp8_e4m3, rows);
    }
  }
}

TEMPLATE_TEST_CASE(
    "attention on a GPU of many rows: shards combine to the whole for any chunk, page and pool", "", f16,
    bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  // Page sizes that allow boxes of 8 to 128 tokens, and some that allow none.
  constexpr std::int64_t kPages[] = {1, 8, 16, 17, 24, 48, 64, 100, 128, 256};
  constexpr std::int64_t kDims[] = {64, 128, 192, 256, 96};
  const auto pools = kv_pool_makers();
  std::size_t turn = 0;
  for (const std::int64_t kvp : {1, 2, 4}) {
    for (const std::int64_t chunk : {1, 3, 16, 64}) {
      for (int i = 0; i < 3; ++i, ++turn) {
        AttentionCase c = case_of<TestType>(kDims[turn % 5]);
        if (c.d == 192) c.dv = 128;
        c.page_tokens = kPages[turn % 10];
        c.pool = pools[turn % pools.size()];
        c.is_csr = turn % 4 == 1;
        c.kvp = kvp;
        c.chunk = chunk;
        c.sequences = kChunks;
        for (const DType kv_dtype : kKvTypes<TestType>) {
          c.kv_dtype = kv_dtype;
          CAPTURE(kvp, chunk, c.page_tokens, c.d, turn % pools.size(), to_string(kv_dtype));
          CHECK(AttentionWorld<TestType>(c).check(operators) == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE(
    "attention on a GPU of many rows honours windows and soft caps, and reads nothing before them", "", f16,
    bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t window : {0, 1, 5, 100, 1000}) {
    for (const float soft_cap : {0.0f, 0.5f, 30.0f, 1e6f}) {
      for (const std::int64_t kvp : {1, 3}) {
        AttentionCase c = case_of<TestType>(window == 5 ? 64 : window == 1 ? 256 : 128);
        c.window = window;
        c.soft_cap = soft_cap;
        c.kvp = kvp;
        c.chunk = 3;
        c.forgets = window > 0;
        c.sequences = kChunks;
        for (const DType kv_dtype : kKvTypes<TestType>) {
          c.kv_dtype = kv_dtype;
          CAPTURE(window, soft_cap, kvp, to_string(kv_dtype));
          CHECK(AttentionWorld<TestType>(c).check(operators) == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE(
    "attention on a GPU of many rows gives padding and empty shards an output of 0 and an lse of -inf", "",
    f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const DType kv_dtype : kKvTypes<TestType>) {
    AttentionCase c = case_of<TestType>(128);
    c.kv_dtype = kv_dtype;
    CAPTURE(to_string(kv_dtype));
    c.group = 8;
    c.kvp = 4;
    c.sequences = {{7, 7}, {20, 15}, {1, 1}, {40, 33}};
    CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    c.kvp = 2;
    c.sequences = {{100, 100}, {60, 20}};
    c.padding = {0, 4, 9, 10, 11, 12, 30, 61, 119};
    for (std::int64_t token = 64; token < 100; ++token) c.padding.push_back(token);  // whole query tiles
    CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    c.padding.clear();
    for (std::int64_t token = 0; token < 120; ++token) c.padding.push_back(token);
    CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    c.padding.clear();  // ranks without any page
    c.kvp = 4;
    c.chunk = 128;
    c.sequences = {{128, 128}, {60, 20}};
    for (const std::int64_t page_tokens : {16, 1}) {
      c.page_tokens = page_tokens;
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of many rows deals out query tiles of any lengths", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  AttentionCase c = case_of<TestType>(64);
  const auto check = [&](std::int64_t kv_heads, std::int64_t group, const std::vector<Sequence>& sequences) {
    c.kv_heads = kv_heads;
    c.group = group;
    c.sequences = sequences;
    for (const DType kv_dtype : kKvTypes<TestType>) {
      c.kv_dtype = kv_dtype;
      CAPTURE(kv_heads, group, sequences.size(), to_string(kv_dtype));
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  };
  check(1, 8, {{20000, 5}});             // split over the whole GPU
  check(2, 16, {{9000, 8}, {300, 8}});   // one long and one short sequence
  check(9, 4, {{1500, 490}});            // one wave, and a few query tiles shared by all blocks
  check(1, 64, {{900, 300}});            // more than a wave of one head
  check(2, 40, {{40, 1}, {1100, 400}});  // more query tiles than a wave
  check(1, 150, {{470, 460}, {33, 1}});  // more query tiles than one launch takes
  check(33, 4, {{64, 64}, {640, 16}});   // many heads
  // Sequences of many rows and of few in turn, four times and more often: few rows may be launched apart.
  check(2, 4, {{300, 1}, {500, 40}, {9, 1}, {64, 64}});
  check(2, 4, {{64, 64}, {300, 1}, {500, 40}, {9, 1}, {5, 0}, {80, 20}, {70, 1}});
  check(6, 8, {{20000, 40}});  // more keys than the L2 cache holds: 3 heads at a time
}

TEMPLATE_TEST_CASE(
    "attention on a GPU of many rows gives the same result on few blocks, and the same bits twice", "", f16,
    bf16) {
  HELIX_REQUIRE_GPUS(1);
  auto operators = attention_operators<TestType>();
  std::vector<AttentionWorld<TestType>> worlds;
  for (const std::int64_t d : {64, 128, 256}) {
    for (const DType kv_dtype : kKvTypes<TestType>) {
      AttentionCase c = case_of<TestType>(d);
      c.kv_dtype = kv_dtype;
      c.sequences = kChunks;
      worlds.emplace_back(c);
    }
  }
  AttentionCase draft = case_of<TestType>(128);
  draft.group = 8;
  draft.sequences = {{5000, 9}, {40, 9}};
  worlds.emplace_back(draft, 7);
  draft.kv_dtype = DType::fp8_e4m3;
  worlds.emplace_back(draft, 7);
  AttentionCase passes = case_of<TestType>(64);
  passes.kv_heads = 6;
  passes.group = 8;
  passes.sequences = {{20000, 40}, {15000, 20}};
  worlds.emplace_back(passes);
  for (const int blocks : {1, 7, 0}) {
    operators.set_attention_blocks(blocks);
    CAPTURE(blocks);
    std::vector<typename AttentionWorld<TestType>::Result> results;
    for (const auto& world : worlds) {
      results.push_back(world.run(operators));
      CHECK(world.problem({results.back()}) == "");
    }
    for (std::size_t i = 0; i < worlds.size(); ++i) CHECK(worlds[i].run(operators) == results[i]);
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of many rows takes strided queries and outputs, aligned or not", "",
                   f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t d : {64, 128, 256}) {
    for (const std::int64_t q_pad : {0, 8}) {
      for (const std::int64_t out_pad : {0, 8, 1}) {
        AttentionCase c = case_of<TestType>(d);
        c.q_pad = q_pad;
        c.out_pad = out_pad;
        c.sequences = {{300, 1}, {70, 35}, {33, 33}};
        for (const DType kv_dtype : kKvTypes<TestType>) {
          c.kv_dtype = kv_dtype;
          CAPTURE(d, q_pad, out_pad, to_string(kv_dtype));
          CHECK(AttentionWorld<TestType>(c).check(operators) == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of many rows takes queries whose last token lies first", "", f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t d : {64, 128, 256}) {
    AttentionCase c = case_of<TestType>(d);
    c.is_q_reversed = true;
    c.sequences = {{300, 1}, {70, 35}, {33, 33}};
    for (const DType kv_dtype : kKvTypes<TestType>) {
      c.kv_dtype = kv_dtype;
      CAPTURE(d, to_string(kv_dtype));
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of many rows of a slice of the batch writes that slice's rows only",
                   "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  AttentionCase c = case_of<TestType>(128);
  c.kvp = 2;
  c.sequences = kChunks;
  const AttentionWorld<TestType> world(c);
  for (const std::int64_t first : {0, 2, 4}) {
    CAPTURE(first);
    CHECK(world.problem({world.run(operators, 1, first, 2)}, 1, first, 2) == "");
  }
}

}  // namespace helix::test
