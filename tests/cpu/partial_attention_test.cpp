// SPDX-License-Identifier: Apache-2.0
// Properties of cpu partial attention, compared with a naive double-precision reference. Everything that must
// not be read is poisoned.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <hwy/targets.h>

#include <helix/cpu/backend.hpp>
#include <helix/integers.hpp>
#include <helix/limits.hpp>

#include "cpu/attention_world.hpp"
#include "support/catch.hpp"

using helix::DType;
using helix::test::attention::World;

TEST_CASE(
    "partial attention agrees with the reference for every grouping of heads and number of query tokens") {
  const std::int64_t groups[][2] = {{2, 2}, {4, 2}, {6, 2}, {8, 1}, {16, 2}, {5, 1}, {20, 1}, {1, 1}};
  for (const auto& [query_heads, kv_heads] : groups) {
    for (std::int64_t queries : {1, 2, 3, 4, 5, 6, 7, 8, 33}) {
      CAPTURE(query_heads, kv_heads, queries);
      World({.query_heads = query_heads, .kv_heads = kv_heads, .sequences = {{queries + 37, queries}}})
          .check();
    }
  }
}

TEST_CASE("partial attention shards combine to whole attention for any chunk and page size") {
  for (std::int64_t kvp : {1, 2, 4}) {
    for (std::int64_t chunk : {1, 3, 16}) {
      for (std::int64_t page_tokens : {1, 16, 64}) {
        for (std::int64_t queries : {1, 4, 33}) {
          CAPTURE(kvp, chunk, page_tokens, queries);
          World({.page_tokens = page_tokens,
                 .kvp = kvp,
                 .chunk = chunk,
                 .sequences = {{70, queries}, {33, queries}}})
              .check();
        }
      }
    }
  }
}

TEST_CASE("partial attention gives empty shards an output of 0 and an lse of -inf") {
  for (std::int64_t queries : {1, 3}) {
    const World world({.kvp = 4, .chunk = 16, .sequences = {{7, queries}, {20, queries}}});
    world.check();
    const World::Result empty = world.run(3);
    for (float x : empty.out) REQUIRE(x == 0.0f);
    for (float x : empty.lse) REQUIRE(x == -std::numeric_limits<float>::infinity());
  }
}

TEST_CASE("partial attention serves ragged batches with padding") {
  World world({.query_heads = 8,
               .kvp = 2,
               .chunk = 3,
               .sequences = {{5, 1}, {300, 8}, {1, 1}, {64, 2}, {17, 17}, {90, 33}}});
  world.check();
  for (std::size_t token : {0u, 4u, 9u, 30u, 61u}) world.positions()[token] = -1;
  world.check();
}

TEST_CASE("partial attention honours the window") {
  for (std::int64_t window : {1, 2, 5, 16, 100}) {
    for (std::int64_t queries : {1, 4, 33}) {
      for (std::int64_t kvp : {1, 2}) {
        CAPTURE(window, queries, kvp);
        World({.kvp = kvp, .chunk = 3, .window = window, .sequences = {{70, queries}, {34, queries}}})
            .check();
      }
    }
  }
}

TEST_CASE("partial attention caps scores softly") {
  for (float cap : {0.25f, 1.0f, 30.0f, 1e6f, 3e38f}) {
    World({.query_heads = 6, .soft_cap = cap, .sequences = {{70, 1}, {41, 4}, {50, 33}}}).check();
  }
}

TEST_CASE("partial attention reads every storage type as the values it holds") {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
    for (std::int64_t query_heads : {2, 4, 8, 16, 40}) {
      CAPTURE(helix::to_string(dtype), query_heads);
      World({.query_heads = query_heads,
             .d = 64,
             .dv = 64,
             .dtype = dtype,
             .kvp = 2,
             .chunk = 16,
             .sequences = {{70, 1}, {41, 4}}})
          .check();
    }
  }
}

TEST_CASE("partial attention serves MLA rows, whose values are the first elements of the keys") {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
    for (std::int64_t query_heads : {1, 8, 16, 128}) {
      CAPTURE(helix::to_string(dtype), query_heads);
      World({.query_heads = query_heads,
             .kv_heads = 1,
             .d = 576,
             .dv = 512,
             .is_mla = true,
             .dtype = dtype,
             .page_tokens = 64,
             .kvp = 2,
             .chunk = 16,
             .sequences = {{150, 1}, {20, 2}}})
          .check();
    }
  }
  World(
      {.query_heads = 128, .kv_heads = 1, .d = 40, .dv = 24, .is_mla = true, .sequences = {{90, 8}, {20, 9}}})
      .check();
}

TEST_CASE("partial attention takes any head size") {
  const std::int64_t sizes[][2] = {{1, 1},   {7, 5},   {16, 16}, {31, 31},  {33, 33},
                                   {48, 16}, {80, 80}, {96, 64}, {256, 256}};
  for (const auto& [d, dv] : sizes) {
    for (DType dtype : {DType::f32, DType::bf16, DType::fp8_e4m3}) {
      CAPTURE(d, dv, helix::to_string(dtype));
      World({.d = d, .dv = dv, .dtype = dtype, .sequences = {{70, 1}, {41, 5}}}).check();
    }
  }
}

TEST_CASE(
    "partial attention over rows of half a pair of the widest vectors serves any number of query rows") {
  const std::int64_t sizes[][2] = {{80, 80}, {112, 112}, {48, 16}, {96, 80}};
  for (const auto& [d, dv] : sizes) {
    for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
      for (std::int64_t group : {1, 3, 4, 8, 16, 17}) {
        CAPTURE(d, dv, helix::to_string(dtype), group);
        World({.query_heads = 2 * group,
               .kv_heads = 2,
               .d = d,
               .dv = dv,
               .dtype = dtype,
               .sequences = {{300, 1}, {70, 2}, {41, 5}}})
            .check();
      }
    }
  }
}

TEST_CASE("partial attention splits long ranges exactly, at every edge of its tiles") {
  for (std::int64_t length : {255, 256, 257, 1023, 1024, 1025, 2049, 5000}) {
    for (std::int64_t queries : {1, 3}) {
      CAPTURE(length, queries);
      World({.query_heads = 2, .kv_heads = 1, .d = 16, .dv = 16, .kvp = 1, .sequences = {{length, queries}}})
          .check();
    }
  }
  World({.query_heads = 4, .kv_heads = 1, .window = 2500, .sequences = {{5000, 8}}}).check();
}

TEST_CASE("partial attention lets no token reach a query that may not see it") {
  for (std::int64_t window : {0, 6}) {
    for (std::int64_t query_heads : {2, 8, 24}) {
      for (DType dtype : {DType::f32, DType::bf16, DType::fp8_e4m3}) {
        CAPTURE(window, query_heads, helix::to_string(dtype));
        World world({.query_heads = query_heads, .dtype = dtype, .window = window, .sequences = {{60, 4}}});
        world.poison(0, 58);                  // the third of four query tokens
        if (window > 0) world.poison(0, 51);  // only the first query token sees it
        const World::Result result = world.run(0);
        std::vector<double> expected;
        double lse = 0.0;
        for (std::int64_t head = 0; head < query_heads; ++head) {
          for (std::int64_t t : window > 0 ? std::vector<std::int64_t>{1} : std::vector<std::int64_t>{0, 1}) {
            world.reference(t, head, -1, expected, lse);
            World::compare(result.out.data() + (t * query_heads + head) * 32,
                           result.lse[World::at(t * query_heads + head)], expected, lse);
          }
          REQUIRE(std::isnan(result.out[World::at((2 * query_heads + head) * 32)]));  // the poison works
        }
      }
    }
  }
}

TEST_CASE("a query of NaN does not pass for one that sees nothing") {
  for (std::int64_t query_heads : {2, 8, 24}) {  // one kernel each
    for (DType dtype : {DType::f32, DType::bf16}) {
      for (std::int64_t length : {60, 5000}) {  // unsplit, and in splits
        CAPTURE(query_heads, helix::to_string(dtype), length);
        World world({.query_heads = query_heads, .dtype = dtype, .sequences = {{length, 2}}});
        world.poison_query(1);
        const World::Result result = world.run(0);
        for (std::int64_t head = 0; head < query_heads; ++head) {
          CHECK_FALSE(std::isnan(result.lse[World::at(head)]));
          CHECK(std::isnan(result.lse[World::at(query_heads + head)]));
          CHECK(std::isnan(result.out[World::at((query_heads + head) * 32)]));
        }
      }
    }
  }
}

TEST_CASE("a query whose scores are all -inf gets zeros and an lse of -inf, however many tokens it sees") {
  for (const std::int64_t heads : {1, 8, 24}) {         // one kernel each
    for (const std::int64_t length : {8, 300, 5000}) {  // unsplit, and in splits
      CAPTURE(heads, length);
      std::vector<float> pages(World::at(2 * length * 16), 1.0f);
      const std::vector<float> q(World::at(heads * 16), -3e38f);
      std::vector<float> out(World::at(heads * 16), -1.0f);
      std::vector<float> lse(World::at(heads), -1.0f);
      const std::vector<std::int32_t> offsets{0, 1};
      const std::int64_t position = length - 1;
      const std::int32_t zero = 0;
      helix::cpu::Operators operators(2);
      helix::cpu::Stream stream = operators.create_stream();
      std::vector<std::byte> workspace(operators.partial_attention_workspace_bytes(1, heads, 16, 16));
      helix::PartialAttentionArgs<float> args;
      args.q = {q.data(), {1, heads, 16}};
      args.batch = {offsets, offsets.data(), &position, &zero};
      args.kv =
          helix::KvView::of_pool(pages.data(), helix::KvFormat::head_major(DType::f32, 1, 16, 16, length), 1)
              .whole();
      args.kv.max_pages = 1;
      args.kv.page_table = &zero;
      args.target.out = {out.data(), {1, heads, 16}};
      args.target.lse = {lse.data(), {1, heads}};
      args.scale = 1.0f;
      args.workspace = workspace;
      operators.partial_attention(args, stream);
      operators.synchronize(stream);
      CHECK(out == std::vector<float>(out.size(), 0.0f));
      CHECK(lse == std::vector<float>(lse.size(), -INFINITY));
    }
  }
}

TEST_CASE("the workspace of absurd sizes is absurd and not small") {
  using namespace helix;
  const cpu::Operators operators;
  const auto bytes = [&](std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
    return operators.partial_attention_workspace_bytes(tokens, heads, dim, dim);
  };
  // From some number on, tokens share the workspace.
  CHECK(bytes(kSaturated, 8, 64) == bytes(kMaxStepTokens, 8, 64));
  CHECK(bytes(1, kSaturated, 64) == static_cast<std::size_t>(kSaturated));
  CHECK(bytes(1, 8, kSaturated) == static_cast<std::size_t>(kSaturated));
  CHECK(bytes(kSaturated, kMaxCount, kMaxRowElements) >= std::size_t{1} << 60);
}

TEST_CASE("partial attention of more sequences than one pass holds") {
  // All sequences read the same pages.
  const std::int64_t lengths[] = {70000, 3};
  const std::int64_t counts[] = {5, 300};
  for (int i = 0; i < 2; ++i) {
    const std::int64_t length = lengths[i];
    const std::int64_t count = counts[i];
    std::vector<float> pages(World::at(length * 2 * 16));
    std::mt19937 random(3);
    for (float& x : pages) x = std::uniform_real_distribution<float>(-1.0f, 1.0f)(random);
    const std::vector<std::int32_t> table(World::at(count), 0);
    std::vector<std::int32_t> offsets(World::at(count + 1));
    std::vector<std::int32_t> slots(World::at(count));
    std::iota(offsets.begin(), offsets.end(), 0);
    std::iota(slots.begin(), slots.end(), 0);
    const std::vector<std::int64_t> positions(World::at(count), length - 1);
    const std::vector<float> q(World::at(count * 16), 0.25f);
    std::vector<float> out(World::at(count * 16));
    std::vector<float> lse(World::at(count));
    helix::cpu::Operators operators(2);
    helix::cpu::Stream stream = operators.create_stream();
    std::vector<std::byte> workspace(operators.partial_attention_workspace_bytes(count, 1, 16, 16));
    helix::PartialAttentionArgs<float> args;
    args.q = {q.data(), {count, 1, 16}};
    args.batch = {offsets, offsets.data(), positions.data(), slots.data()};
    args.kv =
        helix::KvView::of_pool(pages.data(), helix::KvFormat::head_major(DType::f32, 1, 16, 16, length), 1)
            .whole();
    args.kv.max_pages = 1;
    args.kv.page_table = table.data();
    args.target.out = {out.data(), {count, 1, 16}};
    args.target.lse = {lse.data(), {count, 1}};
    args.scale = 1.0f;
    args.workspace = workspace;
    operators.partial_attention(args, stream);
    operators.synchronize(stream);

    double total = 0.0;
    double first = 0.0;
    for (std::int64_t token = 0; token < length; ++token) {
      double score = 0.0;
      for (std::int64_t d = 0; d < 16; ++d)
        score += 0.25 * static_cast<double>(pages[World::at(token * 16 + d)]);
      total += std::exp(score);
      first += std::exp(score) * static_cast<double>(pages[World::at((length + token) * 16)]);
    }
    for (std::int64_t b = 0; b < count; ++b) {
      REQUIRE(std::abs(static_cast<double>(lse[World::at(b)]) - std::log(total)) <= 1e-5 * std::log(total));
      REQUIRE(std::abs(static_cast<double>(out[World::at(b * 16)]) - first / total) <= 1e-5);
    }
  }
}

TEST_CASE("partial attention agrees with the reference on every instruction set of this machine") {
  const auto restore = [] {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  };
  const std::int64_t all = hwy::SupportedTargets();
  for (std::int64_t rest = all; rest != 0; rest &= rest - 1) {
    const std::int64_t target = rest & -rest;
    CAPTURE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
      for (std::int64_t query_heads : {2, 4, 8, 16, 40}) {
        CAPTURE(helix::to_string(dtype), query_heads);
        World(
            {.query_heads = query_heads, .d = 64, .dv = 64, .dtype = dtype, .sequences = {{70, 1}, {41, 4}}})
            .check();
        World({.query_heads = query_heads, .d = 21, .dv = 21, .dtype = dtype, .sequences = {{30, 3}}})
            .check();
      }
    }
  }
  restore();
}
