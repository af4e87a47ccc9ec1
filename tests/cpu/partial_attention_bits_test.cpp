// SPDX-License-Identifier: Apache-2.0
// What must not change any bit of cpu partial attention: the number of threads, variants of the kernels,
// slices of the batch and the placement of pages.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <helix/cpu/tuning.hpp>

#include "cpu/attention_world.hpp"
#include "support/catch.hpp"
#include "support/equal_bits.hpp"

namespace {

using helix::DType;
using helix::test::attention::Sequence;
using helix::test::attention::World;

bool have_equal_bits(const World::Result& a, const World::Result& b) {
  return helix::test::have_equal_bits(a.out, b.out) && helix::test::have_equal_bits(a.lse, b.lse);
}

}  // namespace

TEST_CASE("partial attention gives the same bits for any number of threads") {
  const World world({.query_heads = 8,
                     .d = 64,
                     .dv = 64,
                     .dtype = DType::bf16,
                     .page_tokens = 64,
                     .sequences = {{5000, 1}, {3000, 4}, {200, 40}}});
  const World::Result one = world.run(0, 1);
  for (int threads : {2, 3, 5}) REQUIRE(have_equal_bits(one, world.run(0, threads)));
  REQUIRE_FALSE(have_equal_bits(one, World({.query_heads = 8,
                                            .d = 64,
                                            .dv = 64,
                                            .dtype = DType::bf16,
                                            .page_tokens = 64,
                                            .sequences = {{5000, 1}, {3000, 4}, {200, 40}}},
                                           2)
                                         .run(0, 1)));
}

TEST_CASE("partial attention gives the same bits in every variant") {
  const std::vector<const char*> variants = {"heads1",
                                             "plain",
                                             "heads2",
                                             "heads4",
                                             "heads8",
                                             "heads8.as_stored",
                                             "heads2.straight",
                                             "heads4.straight",
                                             "heads8.straight",
                                             "heads4.along",
                                             "heads8.along",
                                             "heads1.short",
                                             "heads4.short",
                                             "heads8.straight.short",
                                             "heads8.as_stored.straight_l1",
                                             "heads8.as_stored.linear"};
  const std::vector<const char*> narrow = {"heads1.narrow", "heads4.narrow", "heads8.narrow",
                                           "heads4.straight.narrow", "heads8.straight.narrow"};
  // Four work units of one split each, so that each thread has enough tasks for heads to share them.
  const std::vector<Sequence> sequences = {{513, 1}, {256, 1}, {300, 1}, {70, 1}};
  const std::vector<std::int64_t> groups = {1, 8, 4, 16, 2, 5, 8, 3, 12};
  std::size_t pick = 0;
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
    for (std::int64_t d : {64, 80, 96, 128, 192, 256}) {
      for (std::int64_t page_tokens : {1, 16, 64}) {
        const std::int64_t group = groups[pick++ % groups.size()];
        const std::int64_t kv_heads = d > 128 ? 2 : d == 128 ? 5 : 9;
        CAPTURE(helix::to_string(dtype), d, page_tokens, group);
        const World world({.query_heads = group * kv_heads,
                           .kv_heads = kv_heads,
                           .d = d,
                           .dv = d,
                           .dtype = dtype,
                           .page_tokens = page_tokens,
                           .sequences = sequences});
        helix::cpu::fix_tuning("attention.*=heads1");
        const World::Result first = world.run(0);
        const auto check = [&](const char* kernels, const char* variant) {
          CAPTURE(variant);
          helix::cpu::fix_tuning(std::string(kernels) + "=" + variant);
          REQUIRE(have_equal_bits(first, world.run(0)));
        };
        for (const char* variant : variants) check("attention.*", variant);
        if (dtype == DType::bf16 && group > 4) {
          for (const char* variant : narrow) check("attention.bf16.rows8", variant);
        }
      }
    }
  }
  for (const char* variant : {"heads8.as_stored", "heads8.straight", "heads8.along", "heads4.short"}) {
    helix::cpu::fix_tuning(std::string("attention.*=") + variant);
    World({.query_heads = 24, .kv_heads = 3, .d = 64, .dv = 64, .sequences = sequences}).check();
    World({.query_heads = 8, .kv_heads = 1, .d = 64, .dv = 64, .sequences = {{5000, 1}, {3000, 4}}}).check();
  }
  helix::cpu::fix_tuning("attention.*=heads1");
}

TEST_CASE("partial attention gives a slice of the batch, and any placement of pages, the same bits") {
  const World world({.query_heads = 8,
                     .d = 64,
                     .dv = 64,
                     .sequences = {{3000, 1}, {1500, 4}, {200, 40}, {2500, 2}, {9, 1}}});
  const World::Result whole = world.run(0, 2);
  for (std::int64_t slice : {1, 2, 3}) REQUIRE(have_equal_bits(whole, world.run(0, 2, slice)));
  REQUIRE(have_equal_bits(whole, world.run(0, 2, 0, 77)));
}
