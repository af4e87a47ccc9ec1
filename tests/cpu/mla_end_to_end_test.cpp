// SPDX-License-Identifier: Apache-2.0
// Latent attention over KVP shards, from the cache through the exchange to the combined output, compared with
// unsharded attention in double precision.
#include <cstdint>

#include <helix/cpu/backend.hpp>

#include "support/catch.hpp"
#include "support/mla_fixture.hpp"

namespace helix::test {
namespace {

using CpuBackend = cpu::Backend<cpu::LocalComm>;
using World = MlaWorld<float>;

constexpr double kTolerance = 1e-5;  // f32; KV of 16 bits is compared as stored

MlaOutput<float> run(const World& world, const MlaSharding& sharding) {
  return run_mla<CpuBackend, cpu::LocalComm>(world, sharding);
}

/// Checks one world on 1, 2, 4 and 8 KVP ranks, in chunks of 1, 16 and 64 tokens.
void check_all_shardings(MlaSpec spec) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    spec.kv_dtype = dtype;
    const World world(spec);
    const MlaOutput<double> expected = world.reference();
    for (const int kvp : {1, 2, 4, 8}) {
      for (const std::int64_t chunk : {1, 16, 64}) {
        // Pages smaller than a chunk, larger than a chunk, and of a size that no chunk divides evenly.
        const std::int64_t page_tokens = chunk == 64 ? 16 : chunk == 16 ? 64 : 48;
        CAPTURE(to_string(dtype), kvp, chunk, page_tokens, spec.sequences.size());
        const MlaOutput<float> got = run(world, {kvp, chunk, page_tokens});
        CHECK(world.problem(got, expected, kTolerance, kTolerance) == "");
      }
    }
  }
}

TEST_CASE("latent attention over shards of short contexts equals unsharded attention", "[quick]") {
  check_all_shardings({.sequences = {{64}}});
  check_all_shardings({.sequences = {{130, 4}, {1}, {17, 2}}});
  check_all_shardings({.heads = 16,
                       .sequences = {{1}, {8}, {9, 3}, {300}, {2, 2}, {64}, {65, 8}, {40}},
                       .padding = {1, 4, 9}});
}

TEST_CASE("latent attention over shards of up to 16K tokens equals unsharded attention") {
  const std::int64_t sequences = GENERATE(1, 3, 8);
  check_all_shardings({.sequences = unequal_sequences(sequences, sequences == 8 ? 5000 : 16384)});
}

TEST_CASE("latent attention of draft tokens behind 16K tokens equals unsharded attention") {
  const World world({.sequences = {{16384, 4}, {16000, 3}, {3, 3}}});
  CHECK(world.problem(run(world, {8, 16, 64}), world.reference(), kTolerance, kTolerance) == "");
}

// Negative control: the tolerance detects one missing token of 16K, at the edge of a shard or elsewhere.
TEST_CASE("one token left out of latent attention shows") {
  const World world({.sequences = {{16384}}});
  const MlaOutput<float> got = run(world, {4, 16, 64});
  for (const std::int64_t position : {0, 7000, 16383}) {
    CAPTURE(position);
    CHECK(world.problem(got, world.reference(position), kTolerance, kTolerance) != "");
  }
}

TEST_CASE("latent attention of 1M tokens over 8 KVP ranks equals unsharded attention", "[.full]") {
  // One head per rank, the minimum that the exchange can split.
  const World world({.kv_dtype = DType::bf16, .sequences = {{1 << 20}}});
  const MlaOutput<float> got = run(world, {8, 16, 64});
  CHECK(world.problem(got, world.reference(), kTolerance, kTolerance) == "");
  CHECK(world.problem(got, world.reference((1 << 20) - 1), kTolerance, kTolerance) != "");
}

}  // namespace
}  // namespace helix::test
