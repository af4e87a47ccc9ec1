// SPDX-License-Identifier: Apache-2.0
// Properties of partial attention on a GPU, with and without tensor cores, compared with a naive reference.
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

std::vector<Sequence> uniform(std::int64_t count, Sequence sequence) {
  return std::vector<Sequence>(at(count), sequence);
}

// 1 to 8 draft tokens, prefills that fill query tiles with a remainder, and one sequence without query
// tokens.
const std::vector<Sequence> kRagged = {{40, 1}, {41, 2}, {5, 3}, {70, 4},  {31, 5}, {32, 6},
                                       {33, 7}, {9, 0},  {8, 8}, {90, 17}, {96, 70}};

}  // namespace

TEMPLATE_TEST_CASE("attention on a GPU serves every grouping of heads and number of query tokens", "", float,
                   f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t d : {64, 128, 256}) {
    for (const std::int64_t group : {1, 2, 4, 5, 8, 16, 20}) {
      AttentionCase c = case_of<TestType>(d);
      c.group = group;
      CAPTURE(d, group);
      for (const std::int64_t queries : {1, 2, 3, 8}) {
        CAPTURE(queries);
        c.sequences = {{37 + queries, queries}, {queries, queries}};
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      }
      c.sequences = kRagged;
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU: shards combine to the whole for any chunk and page size", "", float,
                   f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  constexpr std::int64_t kPages[] = {16, 17, 32, 48, 64, 256};
  constexpr std::int64_t kDims[] = {64, 128, 256};
  std::size_t turn = 0;
  for (const std::int64_t kvp : {1, 2, 4, 8}) {
    for (const std::int64_t chunk : {1, 3, 16, 64}) {
      for (int i = 0; i < 3; ++i, ++turn) {
        AttentionCase c = case_of<TestType>(kDims[turn % 3]);
        c.page_tokens = kPages[(turn + turn / 6) % 6];
        c.kvp = kvp;
        c.chunk = chunk;
        c.sequences = {{70, 1}, {333, 4}, {20, 8}, {5, 5}, {700, 2}};
        CAPTURE(kvp, chunk, c.page_tokens, c.d);
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU splits ranges exactly at every edge of its tiles", "", float, f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  const std::int64_t lengths[] = {1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 5000};
  for (const std::int64_t d : {64, 128, 256}) {
    AttentionCase c = case_of<TestType>(d);
    c.kv_heads = 1;
    c.group = 8;
    c.sequences.clear();
    for (const std::int64_t length : lengths) c.sequences.push_back({length, 1});
    CAPTURE(d);
    CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    c.kv_heads = 2;
    c.page_tokens = 17;
    for (const std::int64_t length : lengths) {  // a single sequence, whose tiles the whole GPU shares
      CAPTURE(length);
      c.sequences = {{length, 1}};
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
    c.sequences = {{5000, 7}, {1, 1}, {4999, 5}};
    CHECK(AttentionWorld<TestType>(c).check(operators) == "");
  }
}

TEMPLATE_TEST_CASE("attention on a GPU shares blocks out among sequences of any lengths", "", float, f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  cuda::Operators<TestType> beside_others;
  beside_others.set_shares_device(true);  // no clusters except pairs
  AttentionCase c = case_of<TestType>(128);
  const auto check = [&](std::int64_t kv_heads, const std::vector<Sequence>& sequences) {
    c.kv_heads = kv_heads;
    c.sequences = sequences;
    CAPTURE(kv_heads, sequences.size());
    const AttentionWorld<TestType> world(c);
    CHECK(world.check(operators) == "");
    CHECK(world.check(beside_others) == "");
  };
  check(1, {{20000, 1}});  // more KV splits than a warp has lanes
  check(8, {{3000, 1}});
  check(2, {{5000, 1}, {4000, 1}, {300, 1}});  // each has blocks of its own, in proportion to its length
  check(2, {{8000, 1}, {31, 1}, {1, 1}, {1, 1}});
  check(3, {{2000, 8}, {1999, 8}, {2000, 1}});  // query tiles of several tokens
  check(1, {{900, 0}, {40, 0}, {700, 17}});     // as many query tiles as sequences, but not one for each
  // As many KV splits as a cluster has blocks. They form a cluster unless sequences with other numbers of
  // splits come before them.
  for (const std::int64_t kv_heads : {1, 2, 3, 8}) check(kv_heads, {{385, 1}, {641, 3}, {30, 1}, {640, 2}});
  for (const std::int64_t length : {385, 400, 513, 640}) check(8, {{length, 1}});
  for (const std::int64_t length : {257, 700, 1280, 1281, 2000, 2560, 2561}) check(8, {{length, 1}});
  for (const std::int64_t kv_heads : {1, 3, 4}) check(kv_heads, {{2500, 1}, {200, 1}, {700, 2}, {2, 1}});
  check(4, {{600, 7}});
  check(2, {{1900, 5}, {1800, 6}});
  // Too few blocks for one each, so work items span query tiles.
  std::vector<Sequence> few_long = uniform(110, {33, 1});
  for (int i = 0; i < 10; ++i) few_long.insert(few_long.begin() + i * 11, {2500, 1});
  check(2, few_long);
}

TEMPLATE_TEST_CASE("attention on a GPU that reads ahead gives the same bits", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t d : {64, 128, 256}) {
    for (const std::int64_t kvp : {1, 2}) {
      for (const std::int64_t window : {0, 100}) {
        AttentionCase c = case_of<TestType>(d);
        c.kvp = kvp;
        c.window = window;
        c.kv_heads = kvp;
        const auto check = [&](const std::vector<Sequence>& sequences) {
          c.sequences = sequences;
          CAPTURE(d, kvp, window, sequences.size());
          check_reading_ahead(c, operators);
        };
        for (const std::int64_t length : {1, 32, 33, 300, 513, 2000}) check({{length, 1}});
        check({{513, 2}, {1, 1}, {40, 4}, {999, 1}});
        check(uniform(40, {129, 2}));
        check({{513, 16}, {300, 32}, {40, 21}});  // one query tile each for the kernel for many rows
        check({{700, 300}, {64, 1}});             // more than one query tile: nothing is prefetched
        if (sizeof(TestType) != 2) continue;
        c.kv_dtype = DType::fp8_e4m3;  // sequences of few rows may be launched apart
        check({{700, 300}, {64, 1}, {513, 2}, {64, 64}, {999, 1}});
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU honours windows and soft caps", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t window : {0, 1, 5, 100}) {
    for (const float soft_cap : {0.0f, 0.5f, 30.0f, 1e6f}) {
      for (const std::int64_t kvp : {1, 3}) {
        AttentionCase c = case_of<TestType>(window == 5 ? 64 : window == 1 ? 256 : 128);
        c.window = window;
        c.soft_cap = soft_cap;
        c.kvp = kvp;
        c.chunk = 3;
        c.sequences = kRagged;
        c.sequences.push_back({1234, 3});
        CAPTURE(window, soft_cap, kvp);
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of sequences that have fewer KV tiles than a cluster has blocks", "",
                   f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const DType kv : {kDTypeOf<TestType>, DType::fp8_e4m3}) {
    for (const std::int64_t d : {64, 96, 112, 128}) {
      for (const std::int64_t length : {200, 257, 300, 330, 400, 448, 449, 520}) {
        for (const std::int64_t queries : {1, 2, 5}) {
          AttentionCase c = case_of<TestType>(d);
          c.kv_dtype = kv;
          c.kv_heads = 1;
          c.group = 16;
          c.sequences = {{length, queries}};
          CAPTURE(to_string(kv), d, length, queries);
          CHECK(AttentionWorld<TestType>(c).check(operators) == "");
        }
      }
    }
  }
}

/// In f32, exponents are multiples of 16, which exceeds the range that f16 weights have.
TEMPLATE_TEST_CASE("attention on a GPU of scores of 1e8 gives no weights that are infinite", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const float root : {33000.0f, 36500.0f, 40000.0f, 43500.0f}) {
    for (const std::int64_t queries : {1, 40}) {
      AttentionCase c = case_of<TestType>(128);
      c.root_score = root;
      c.sequences = {{300, queries}, {70, 1}};
      CAPTURE(root, queries);
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU reads nothing that lies before all windows", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t window : {1, 5, 100}) {
    for (const std::int64_t kvp : {1, 2}) {
      AttentionCase c = case_of<TestType>(128);
      c.window = window;
      c.kvp = kvp;
      c.forgets = true;
      c.sequences = {{1234, 3}, {250, 1}, {97, 4}, {640, 8}};
      CAPTURE(window, kvp);
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU gives padding and empty shards an output of 0 and an lse of -inf", "",
                   float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  AttentionCase c = case_of<TestType>(128);
  c.kvp = 4;
  c.sequences = {{7, 1}, {20, 3}, {1, 1}, {40, 17}};
  CHECK(AttentionWorld<TestType>(c).check(operators) == "");
  c.sequences = kRagged;
  c.kvp = 2;
  c.padding = {0, 4, 9, 10, 11, 12, 30, 61};
  for (std::int64_t token = 70; token < 100; ++token) c.padding.push_back(token);  // whole query tiles
  CHECK(AttentionWorld<TestType>(c).check(operators) == "");
  c.padding.clear();
  for (std::int64_t token = 0; token < 123; ++token) c.padding.push_back(token);
  CHECK(AttentionWorld<TestType>(c).check(operators) == "");
  c.sequences = uniform(3, {9, 0});
  c.padding.clear();
  CHECK(AttentionWorld<TestType>(c).check(operators) == "");
  c.kvp = 4;  // ranks without any page
  c.sequences = {{2, 1}, {1, 1}, {c.chunk, 2}};
  for (const bool is_csr : {false, true}) {
    c.is_csr = is_csr;
    CHECK(AttentionWorld<TestType>(c).check(operators) == "");
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of more sequences and rows than one launch holds", "", float, f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t sequences : {1, 3, 70, 256, 257, 600}) {
    AttentionCase c = case_of<TestType>(64);
    c.page_tokens = 16;
    c.kvp = sequences == 600 ? 2 : 1;
    c.sequences.clear();
    for (std::int64_t b = 0; b < sequences; ++b) c.sequences.push_back({b * 37 % 90 + 2, b % 5 == 3 ? 0 : 1});
    CAPTURE(sequences);
    CHECK(AttentionWorld<TestType>(c).check(operators) == "");
  }
  // A prefill of several launches, between and next to other sequences.
  AttentionCase c = case_of<TestType>(64);
  c.kv_heads = 1;
  c.group = 20;
  c.window = 100;
  c.sequences = uniform(40, {33, 1});
  c.sequences.push_back({900, 700});
  c.sequences.push_back({50, 3});
  c.sequences.push_back({460, 450});
  for (int i = 0; i < 300; ++i) c.sequences.push_back({i % 40 + 1, 1});
  CHECK(AttentionWorld<TestType>(c).check(operators) == "");
}

TEST_CASE("attention on a GPU of so many heads that they limit the query tiles of a launch") {
  HELIX_REQUIRE_GPUS(1);
  AttentionCase c = case_of<float>(16);
  c.kv_heads = 300;
  c.group = 1;
  c.window = 5;
  c.sequences = {{20, 1}, {1800, 1795}, {3, 3}};
  CHECK(AttentionWorld<float>(c).check(cuda::Operators<float>()) == "");
}

TEMPLATE_TEST_CASE("attention on a GPU gives the same result on few blocks, and the same bits twice", "",
                   float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  auto operators = attention_operators<TestType>();
  std::vector<AttentionWorld<TestType>> worlds;
  for (const std::int64_t d : {64, 128, 256}) {
    AttentionCase c = case_of<TestType>(d);
    c.sequences = kRagged;
    c.sequences.push_back({1500, 3});
    worlds.emplace_back(c);
  }
  AttentionCase prefill = case_of<TestType>(128);
  prefill.sequences = {{300, 300}, {40, 1}};
  worlds.emplace_back(prefill, 7);
  for (const int blocks : {1, 7, 0}) {
    operators.set_attention_blocks(blocks);
    CAPTURE(blocks);
    std::vector<typename AttentionWorld<TestType>::Result> results;
    for (const auto& world : worlds) {
      results.push_back(world.run(operators));
      CHECK(world.problem({results.back()}) == "");
    }
    // Calls of other shapes came in between: each call must leave the shared counters at zero.
    for (std::size_t i = 0; i < worlds.size(); ++i) CHECK(worlds[i].run(operators) == results[i]);
  }
}

TEMPLATE_TEST_CASE("attention on a GPU of a slice of the batch writes that slice's rows only", "", float, f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  AttentionCase c = case_of<TestType>(128);
  c.kvp = 2;
  c.sequences = kRagged;
  const AttentionWorld<TestType> world(c);
  for (const std::int64_t first : {0, 3, 7, 10}) {
    for (const std::int64_t count : {0, 1}) {
      CAPTURE(first, count);
      CHECK(world.problem({world.run(operators, 1, first, count)}, 1, first, count) == "");
    }
  }
  CHECK(world.problem({world.run(operators, 0, 2, 6)}, 0, 2, 6) == "");
}

TEMPLATE_TEST_CASE("attention on a GPU takes strided queries and outputs, aligned or not", "", float, f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const std::int64_t d : {64, 128, 256}) {
    for (const std::int64_t q_pad : {0, 8, 3}) {
      for (const std::int64_t out_pad : {0, 8, 1}) {
        AttentionCase c = case_of<TestType>(d);
        c.q_pad = q_pad;
        c.out_pad = out_pad;
        c.sequences = {{300, 1}, {70, 5}, {33, 33}};
        CAPTURE(d, q_pad, out_pad);
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      }
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU reads every storage type and head size", "", float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  const std::int64_t dims[][2] = {{1, 1},   {7, 5},    {48, 16},   {64, 64},   {80, 80},
                                  {96, 64}, {128, 64}, {128, 128}, {192, 128}, {256, 256}};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
    for (const auto& [d, dv] : dims) {
      // One or a few elements may cancel when ranks merge, so their norm is no scale for 16-bit rounding.
      if (!std::is_same_v<TestType, float> && dv < 16) continue;
      AttentionCase c = case_of<TestType>(d);
      c.kv_dtype = dtype;
      c.dv = dv;
      c.kvp = 2;
      c.group = 5;
      c.sequences = {{150, 1}, {41, 4}};
      CAPTURE(to_string(dtype), d, dv);
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("attention on a GPU serves MLA rows, whose values are the first elements of the keys", "",
                   float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = attention_operators<TestType>();
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
    for (const std::int64_t heads : {1, 8, 16, 128}) {
      AttentionCase c = case_of<TestType>(576);
      c.kv_dtype = dtype;
      c.dv = 512;
      c.pool = latent_pool;
      c.kv_heads = 1;
      c.group = heads;
      c.kvp = 2;
      c.sequences = {{150, 1}, {20, 2}};
      CAPTURE(to_string(dtype), heads);
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
}

}  // namespace helix::test
