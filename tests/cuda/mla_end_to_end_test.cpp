// SPDX-License-Identifier: Apache-2.0
// Latent attention over KVP shards of ranks that share a GPU, from the cache through the exchange to the
// combined output, compared with unsharded attention in double precision.
#include <cstdint>
#include <type_traits>
#include <vector>

#include <helix/cuda/backend.hpp>

#include "cuda/gpu.hpp"
#include "support/catch.hpp"
#include "support/mla_fixture.hpp"

namespace helix::test {
namespace {

template <class T>
using CudaBackend = cuda::Backend<cuda::LocalComm, T>;

// bf16 keeps 8 bits of the weights and of the outputs that are exchanged; sums are f32.
template <class T>
constexpr double kOutTolerance = std::is_same_v<T, float> ? 1e-5 : 1e-2;
template <class T>
constexpr double kLseTolerance = std::is_same_v<T, float> ? 1e-5 : 1e-3;

template <class T>
void check(const MlaWorld<T>& world, const MlaOutput<double>& expected, const MlaSharding& sharding) {
  CAPTURE(sharding.kvp, sharding.chunk, sharding.page_tokens, to_string(world.spec().kv_dtype));
  const MlaOutput<float> got = run_mla<CudaBackend<T>, cuda::LocalComm>(world, sharding);
  CHECK(world.problem(got, expected, kOutTolerance<T>, kLseTolerance<T>) == "");
}

/// KV as bf16, and for f32 activations also as f32.
template <class T>
std::vector<DType> kv_types() {
  if constexpr (std::is_same_v<T, float>) return {DType::f32, DType::bf16};
  return {kDTypeOf<T>};
}

/// Calls use(world, reference) for each KV type.
template <class T, class Use>
void for_each_world(MlaSpec spec, Use use) {
  for (const DType dtype : kv_types<T>()) {
    spec.kv_dtype = dtype;
    const MlaWorld<T> world(spec);
    use(world, world.reference());
  }
}

TEMPLATE_TEST_CASE("latent attention on a GPU over shards of short contexts equals unsharded attention", "",
                   float, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const std::vector<MlaSpec> specs{{.sequences = {{64}}},
                                   {.sequences = {{130, 4}, {1}, {17, 2}}},
                                   {.heads = 16,
                                    .sequences = {{1}, {8}, {9, 3}, {300}, {2, 2}, {64}, {65, 8}, {40}},
                                    .padding = {1, 4, 9}},
                                   {.heads = 128, .sequences = {{1000}, {3}, {333, 2}}}};
  for (const MlaSpec& spec : specs) {
    for_each_world<TestType>(spec, [](const auto& world, const auto& expected) {
      for (const int kvp : {1, 2, 4, 8})
        for (const std::int64_t chunk : {1, 16, 64})
          check(world, expected, {.kvp = kvp, .chunk = chunk, .page_tokens = chunk == 1 ? 48 : 64});
    });
  }
}

TEMPLATE_TEST_CASE("latent attention on a GPU of batches of unequal contexts equals unsharded attention", "",
                   float, bf16) {
  HELIX_REQUIRE_GPUS(1);
  constexpr MlaSharding kShardings[] = {{2, 16, 64}, {8, 1, 64}, {4, 64, 32}, {1, 16, 64}, {8, 16, 64}};
  std::size_t turn = 0;
  for (const std::int64_t context : {64, 1000, 4096, 32768}) {
    for (const std::int64_t sequences : {1, 8, 16}) {
      CAPTURE(context, sequences);
      for_each_world<TestType>(
          {.heads = 16, .sequences = unequal_sequences(sequences, context)},
          [&](const auto& world, const auto& expected) { check(world, expected, kShardings[turn++ % 5]); });
    }
  }
}

TEMPLATE_TEST_CASE("latent attention on a GPU of draft tokens behind 128K tokens equals unsharded attention",
                   "", float, bf16) {
  HELIX_REQUIRE_GPUS(1);
  for_each_world<TestType>({.sequences = {{131072, 4}, {5, 5}, {1000, 2}}},
                           [](const auto& world, const auto& expected) {
                             check(world, expected, {.kvp = 8, .chunk = 16, .page_tokens = 64});
                           });
}

TEMPLATE_TEST_CASE("latent attention on a GPU of 1M tokens equals unsharded attention", "", float, bf16) {
  HELIX_REQUIRE_GPUS(1);
  for_each_world<TestType>({.sequences = {{1 << 20}}}, [](const auto& world, const auto& expected) {
    // f32 rows have twice the bytes to upload, once for each rank.
    const int kvp = std::is_same_v<TestType, float> ? 4 : 8;
    check(world, expected, {.kvp = kvp, .chunk = 16, .page_tokens = 64});
  });
}

// Negative control: the f32 tolerance detects one missing token of 4K, at the edge of a shard or elsewhere.
TEST_CASE("one token left out of latent attention on a GPU shows") {
  HELIX_REQUIRE_GPUS(1);
  const MlaWorld<float> world({.sequences = {{4096}}});
  const auto got = run_mla<CudaBackend<float>, cuda::LocalComm>(world, {.kvp = 4});
  for (const std::int64_t position : {0, 2000, 4095}) {
    CAPTURE(position);
    CHECK(world.problem(got, world.reference(position), kOutTolerance<float>, kLseTolerance<float>) != "");
  }
}

}  // namespace
}  // namespace helix::test
