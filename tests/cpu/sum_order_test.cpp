// SPDX-License-Identifier: Apache-2.0
// Attention of few rows in both orders of sums, of which a CPU otherwise has one: each is exact, and no
// variant changes its bits.
#include "cpu/attention/sum_order.hpp"

#include <cstdint>
#include <string>

#include <helix/cpu/tuning.hpp>

#include "cpu/attention_world.hpp"
#include "support/catch.hpp"
#include "support/equal_bits.hpp"

namespace {

using helix::DType;
using helix::cpu::SumOrder;
using helix::test::attention::World;

/// The sum order, and the variant of attention, of a test case.
class Scope {
 public:
  explicit Scope(SumOrder order) { helix::cpu::set_sum_order(order); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope() {
    helix::cpu::fix_tuning("attention.*=auto");
    helix::cpu::set_sum_order(before_);
  }

 private:
  SumOrder before_ = helix::cpu::sum_order();
};

World world_of(std::int64_t group, DType dtype) {
  return World({.query_heads = 5 * group,
                .kv_heads = 5,
                .d = 128,
                .dv = 128,
                .dtype = dtype,
                .page_tokens = 64,
                .sequences = {{1100, 1}, {513, 1}, {256, 1}, {300, 1}, {70, 1}}});
}

}  // namespace

TEST_CASE("either order of attention's sums is exact and has the same bits in every variant") {
  const SumOrder order = GENERATE(SumOrder::interleaved, SumOrder::in_order);
  const Scope scope(order);
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const std::int64_t group : {1, 4, 8}) {
      CAPTURE(static_cast<int>(order), helix::to_string(dtype), group);
      const World world = world_of(group, dtype);
      helix::cpu::fix_tuning("attention.*=heads1");
      const World::Result first = world.run(0);
      const auto check = [&](const char* kernels, const char* variant) {
        CAPTURE(variant);
        helix::cpu::fix_tuning(std::string(kernels) + "=" + variant);
        const World::Result result = world.run(0);
        REQUIRE(helix::test::have_equal_bits(first.out, result.out));
        REQUIRE(helix::test::have_equal_bits(first.lse, result.lse));
      };
      for (const char* variant :
           {"plain", "heads8", "heads8.as_stored", "heads8.straight", "heads8.along", "heads4.short",
            "heads8.straight.short", "heads8.as_stored.straight_l1", "heads8.as_stored.linear"}) {
        check("attention.*", variant);
      }
      if (dtype == DType::bf16 && group == 8) {
        for (const char* variant : {"heads4.narrow", "heads8.straight.narrow"})
          check("attention.bf16.rows8", variant);
      }
      world.check();
    }
  }
}

TEST_CASE("the two orders of attention's sums round differently") {
  const World world = world_of(4, DType::bf16);
  const auto run = [&](SumOrder order) {
    const Scope scope(order);
    return world.run(0);
  };
  CHECK_FALSE(helix::test::have_equal_bits(run(SumOrder::interleaved).out, run(SumOrder::in_order).out));
}
