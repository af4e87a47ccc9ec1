// SPDX-License-Identifier: Apache-2.0
// Cases of attention of the benchmarks: their names, and the pools that they describe.
#include "attention_case.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/failure.hpp"

using helix::bench::AttentionCase;
using helix::bench::AttentionLayout;

TEST_CASE("a case of attention is read from its name") {
  const std::string name =
      "partial_attention/heads:6:2/batch:3/tokens:777/page:16/queries:5/prompt:70/dim:96/value_dim:80/"
      "kv:fp8_e4m3/ragged/layout:token_major/portable";
  const AttentionCase c = AttentionCase::parse(name);
  CHECK(c.query_heads == 6);
  CHECK(c.kv_heads == 2);
  CHECK(c.batch == 3);
  CHECK(c.tokens == 777);
  CHECK(c.page_tokens == 16);
  CHECK(c.queries == 5);
  CHECK(c.prompt == 70);
  CHECK(c.head_dim == 96);
  CHECK(c.value_dim == 80);
  CHECK(c.kv_dtype == helix::DType::fp8_e4m3);
  CHECK(c.is_ragged);
  CHECK(c.layout == AttentionLayout::token_major);
  CHECK(c.is_portable);
  CHECK(c.name() == name);
}

TEST_CASE("what a case's name leaves out has its default, and values are as wide as keys") {
  CHECK(AttentionCase::parse("tokens:9").name() ==
        "partial_attention/heads:64:8/batch:1/tokens:9/page:64/queries:1");
  const AttentionCase narrow = AttentionCase::parse("dim:64/tokens:9");
  CHECK(narrow.value_dim == 64);
  CHECK(narrow.name() == "partial_attention/heads:64:8/batch:1/tokens:9/page:64/queries:1/dim:64");
}

TEST_CASE("a name that is no case's is refused with the part that is wrong") {
  const std::pair<std::string, std::string> refused[] = {
      {"", "has no tokens"},
      {"heads:8:8", "has no tokens"},
      {"tokens:0", "'tokens:0' has no number from 1"},
      {"tokens:9x", "'tokens:9x' has no number from 1"},
      {"tokens:99999999999999999999", "has no number from 1"},
      {"tokens:9/heads:8", "'heads:8' has no number from 1"},
      {"tokens:9/heads:9:2", "KV heads do not divide"},
      {"tokens:9/queries:10", "more query tokens than tokens"},
      {"tokens:9/prompt:10", "more query tokens than tokens"},
      {"tokens:9/prompt:0", "'prompt:0' has no number from 1"},
      {"tokens:9/kv:int3", "'kv:int3' names no type"},
      {"tokens:9/colour:red", "'colour:red' is no part of a case"},
      {"tokens:9/ragged:1", "'ragged:1' is no part of a case"},
      {"tokens:9/kv:fp8_ds_mla", "for latents alone"},
      {"tokens:9/layout:latent", "needs one KV head"},
      {"tokens:9/heads:8:1/layout:latent/value_dim:256", "needs one KV head"},
      {"tokens:1099511627776/batch:1048576", "larger than any machine"},
      {"tokens:4096/queries:4096/batch:512", "larger than any machine"},
  };
  for (const auto& [name, why] : refused) {
    INFO(name);
    CHECK(helix::test::failure_message([&] { (void)AttentionCase::parse(name); }).find(why) !=
          std::string::npos);
  }
}

TEST_CASE("a case's last sequence may have a prompt's query tokens beside others that decode") {
  std::mt19937 random(1);
  const helix::bench::AttentionBatch batch =
      AttentionCase::parse("heads:8:2/batch:3/tokens:50/queries:2/prompt:5").draw(random);
  CHECK(batch.query_offsets == std::vector<std::int32_t>{0, 2, 4, 9});
  CHECK(batch.positions == std::vector<std::int64_t>{48, 49, 48, 49, 45, 46, 47, 48, 49});
  constexpr double kPairs = 2.0 * (49 + 50) + (46 + 47 + 48 + 49 + 50);
  CHECK(batch.flops == 2.0 * kPairs * 8 * (128 + 128));
}

TEST_CASE("a case's short sequences have no more query tokens than tokens") {
  std::mt19937 random(1);
  const helix::bench::AttentionBatch batch =
      AttentionCase::parse("heads:8:2/batch:40/tokens:20/queries:10/ragged").draw(random);
  CHECK(*std::min_element(batch.lengths.begin(), batch.lengths.end()) < 10);
  for (std::size_t b = 0; b < batch.lengths.size(); ++b) {
    const auto begin = static_cast<std::size_t>(batch.query_offsets[b]);
    const auto end = static_cast<std::size_t>(batch.query_offsets[b + 1]);
    CHECK(static_cast<std::int64_t>(end - begin) == std::min<std::int64_t>(10, batch.lengths[b]));
    for (std::size_t i = begin; i < end; ++i)
      CHECK(batch.positions[i] == batch.lengths[b] - static_cast<std::int64_t>(end - i));
  }
}

TEST_CASE("a case's rows lie in its pool, and a table names every page once") {
  for (const char* name :
       {"heads:8:2/batch:3/tokens:50/page:8/ragged", "heads:8:2/batch:2/tokens:33/page:8/dim:80/value_dim:64",
        "heads:8:2/batch:2/tokens:33/page:8/dim:64/value_dim:80/layout:token_major",
        "heads:8:1/batch:2/tokens:33/page:8/dim:576/value_dim:512/kv:fp8_ds_mla/layout:latent"}) {
    INFO(name);
    const AttentionCase c = AttentionCase::parse(name);
    std::mt19937 random(1);
    const helix::bench::AttentionBatch batch = c.draw(random);
    constexpr std::int64_t kTurns = 2;
    std::vector<std::int32_t> pages;
    const std::vector<std::int32_t> table = c.page_tables(batch, kTurns, random);
    auto row = table.begin();
    for (std::int64_t turn = 0; turn < kTurns; ++turn) {
      for (const std::int64_t length : batch.lengths) {
        CHECK(length <= c.tokens);
        pages.insert(pages.end(), row, row + c.pages_of(length));
        row += c.max_pages();
      }
    }
    CHECK(row == table.end());
    CHECK(std::ssize(pages) == kTurns * batch.num_pages);
    std::sort(pages.begin(), pages.end());
    for (std::size_t i = 0; i < pages.size(); ++i) CHECK(pages[i] == static_cast<std::int32_t>(i));

    const auto num_pages = std::ssize(pages);
    std::vector<std::byte> pool(static_cast<std::size_t>(num_pages * c.page_bytes()));
    const helix::KvView kv = c.view(pool.data(), num_pages);
    const auto check_last = [&](const void* rows, const helix::KvStrides& strides, std::int64_t extent) {
      const std::int64_t last = (num_pages - 1) * strides.page + (c.kv_heads - 1) * strides.head +
                                (c.page_tokens - 1) * strides.token + extent;
      const auto* end = static_cast<const std::byte*>(rows) + last * kv.format.element_bytes();
      CHECK(end <= pool.data() + pool.size());
    };
    check_last(kv.k, kv.format.k, kv.format.k_extent());
    if (kv.format.is_latent) {
      check_last(kv.rope, kv.format.rope, kv.format.rope_extent());
    } else {
      check_last(kv.v, kv.format.v, c.value_dim);
    }
  }
}
