// SPDX-License-Identifier: Apache-2.0
// Sequences with more local tokens than an int holds are refused before a kernel truncates their number.
// Needs no GPU.
#include "cuda/attention/local_tokens.hpp"

#include <cstdint>
#include <limits>
#include <vector>

#include <helix/backend/batch.hpp>
#include <helix/kv_format.hpp>

#include "support/failure.hpp"

namespace helix::test {
namespace {

KvView view_of(std::int64_t max_pages, std::int64_t page_tokens) {
  KvView kv;
  kv.format.page_tokens = page_tokens;
  kv.num_pages = 100;
  kv.max_pages = max_pages;
  return kv.whole();
}

void check(const Batch& batch, const KvView& kv) {
  cuda::check_local_tokens(cuda::most_local_tokens(batch, kv), kv);
}

}  // namespace

TEST_CASE("attention on a GPU takes as many local tokens as an int counts, and refuses more") {
  constexpr std::int64_t kMax = cuda::kMaxLocalTokens;
  CHECK(failure_of([] { check({}, view_of(kMax, 1)); }) == std::nullopt);
  CHECK(failure_of([] { check({}, view_of(kMax / 64, 64)); }) == std::nullopt);
  const auto failure = failure_of([] { check({}, view_of(std::int64_t{1} << 25, 64)); });
  REQUIRE(failure.has_value());
  CHECK(failure->code == ErrorCode::unsupported);
  CHECK(failure->says("2147483648 tokens on KVP rank 0 (33554432 pages of 64)"));
  CHECK(failure->says("lengths_host"));
  CHECK(failure_of([] { check({}, view_of(kMax + 1, 1)); }).has_value());
  CHECK(failure_of([] { check({}, view_of(std::int64_t{1} << 31, std::int64_t{1} << 24)); }).has_value());
}

TEST_CASE("attention on a GPU believes the lengths of a batch rather than the rows of its page table") {
  KvView kv = view_of(std::int64_t{1} << 31, std::int64_t{1} << 24);
  kv.layout = KvLayout(2, 16);
  kv.kvp_rank = 1;
  const auto failure_with = [&](std::int64_t longest) {
    const std::vector<std::int64_t> lengths{5, longest, 70};
    Batch batch;
    batch.lengths_host = lengths;
    return failure_of([&] { check(batch, kv); });
  };
  CHECK(failure_with(1000) == std::nullopt);
  CHECK(failure_with(2 * (cuda::kMaxLocalTokens / 16 * 16)) == std::nullopt);
  const auto failure = failure_with(std::int64_t{1} << 32);
  REQUIRE(failure.has_value());
  CHECK(failure->code == ErrorCode::unsupported);
  CHECK(failure->says("2147483648 tokens on KVP rank 1"));
}

TEST_CASE("attention on a GPU bounds the sequences of a CSR list by the pages of the pool") {
  const std::int32_t begins[2] = {0, 1};
  KvView kv = view_of(0, 64);
  kv.page_begins = begins;
  CHECK(failure_of([&] { check({}, kv); }) == std::nullopt);
  kv.num_pages = std::int64_t{1} << 25;
  CHECK(failure_of([&] { check({}, kv); }).has_value());
}

TEST_CASE("a launch of attention on a GPU has no more KV tiles than an int counts") {
  constexpr std::int64_t kMax = cuda::kMaxLocalTokens;
  for (const std::int64_t heads : {1, 8, 32, 128}) {
    for (const std::int64_t tokens : {std::int64_t{0}, std::int64_t{131072}, std::int64_t{1} << 24, kMax}) {
      const std::int64_t tiles = tokens / cuda::kMinKvTileTokens + 2 + cuda::kMaxPaddingTiles;
      const std::int64_t most = cuda::most_counted_query_tiles(tokens, heads);
      CHECK(most * tiles * heads <= std::numeric_limits<int>::max());
      CHECK((most + 1) * tiles * heads > std::numeric_limits<int>::max());
    }
  }
  CHECK(cuda::most_counted_query_tiles(std::int64_t{1} << 20, 8) > 512);
  CHECK(cuda::most_counted_query_tiles(kMax, 8) > 0);
  CHECK(cuda::most_counted_query_tiles(kMax, 32) == 0);
}

}  // namespace helix::test
