// SPDX-License-Identifier: Apache-2.0
// partial_attention over latents of 512 columns and 64 rope columns (MLA) on a GPU, compared with double
// precision. q has 16 bits, and KV is of the same type, e4m3 or fp8_ds_mla. Covers rows of one and two
// blocks, tiles and splits of any length, and pages of any size; everything that must not be read is
// poisoned.
#include <cstddef>
#include <cstdint>
#include <vector>

#include <helix/cuda/backend.hpp>

#include "cuda/attention_world.hpp"
#include "cuda/gpu.hpp"
#include "support/catch.hpp"

namespace helix::test {

template <class T>
AttentionCase latent_case(std::int64_t heads) {
  AttentionCase c;
  c.kv_dtype = kDTypeOf<T>;
  c.d = 576;
  c.dv = 512;
  c.pool = latent_pool;
  c.kv_heads = 1;
  c.group = heads;
  return c;
}

TEMPLATE_TEST_CASE("latents on a GPU: any number of heads and of query tokens", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = latent_attention_operators<TestType>();
  for (const std::int64_t heads : {1, 5, 16, 63, 64, 65, 100, 128, 130}) {
    for (const std::int64_t queries : {1, 2, 3}) {
      AttentionCase c = latent_case<TestType>(heads);
      c.sequences = {{331, queries}};
      CAPTURE(heads, queries);
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("latents on a GPU: every edge of tiles and splits", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = latent_attention_operators<TestType>();
  for (const std::int64_t heads : {16, 128}) {
    for (const std::int64_t length :
         {1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 640, 1000, 3001}) {
      for (const std::int64_t page : {64, 1}) {
        AttentionCase c = latent_case<TestType>(heads);
        c.page_tokens = page;
        c.sequences = {{length, 1}};
        CAPTURE(heads, length, page);
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      }
    }
  }
}

TEMPLATE_TEST_CASE("latents on a GPU: any page, chunk, shard, window and cap", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = latent_attention_operators<TestType>();
  for (const std::int64_t heads : {8, 16, 128}) {
    for (const std::int64_t page : {1, 3, 8, 16, 48, 64, 128, 256}) {
      for (const std::int64_t kvp : {1, 3}) {
        AttentionCase c = latent_case<TestType>(heads);
        c.page_tokens = page;
        c.kvp = kvp;
        c.chunk = page == 3 ? 5 : 16;
        c.pool = page == 16 ? split_latent_pools : latent_pool;
        c.is_csr = page == 64;
        c.window = page == 8 ? 70 : 0;
        c.forgets = c.window > 0;
        c.soft_cap = page == 128 ? 3.0f : page == 64 ? 1e6f : 0.0f;
        c.sequences = {{150, 1}, {400, 2}, {1, 1}};
        CAPTURE(heads, page, kvp);
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      }
    }
  }
}

/// TMA copies from pages of a multiple of 8 tokens, load units from others.
TEMPLATE_TEST_CASE("latents on a GPU: small pages under any heads, windows and shards", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  for (const std::int64_t heads : {5, 16, 17, 64, 65, 100, 128}) {
    for (const std::int64_t page : {1, 2, 4, 12}) {
      for (const std::int64_t window : {0, 70}) {
        for (const std::int64_t kvp : {1, 3}) {
          AttentionCase c = latent_case<TestType>(heads);
          c.page_tokens = page;
          c.window = window;
          c.forgets = window > 0;
          c.kvp = kvp;
          c.chunk = page == 4 ? 5 : 16;
          c.pool = window > 0 ? split_latent_pools : latent_pool;
          c.is_csr = page == 2;
          c.padding = {1};
          CAPTURE(heads, page, window, kvp);
          c.sequences = {{150, 1}, {9, 1}, {1, 1}, {1000, 1}, {33, 1}, {90, 0}};
          CHECK(AttentionWorld<TestType>(c).check(operators) == "");
          c.sequences = {{400, 2}, {1, 1}, {64, 5}, {65, 1}, {700, 3}, {90, 0}};
          CHECK(AttentionWorld<TestType>(c).check(operators) == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("latents on a GPU: ragged batches, padding and empty shards", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = latent_attention_operators<TestType>();
  for (const std::int64_t heads : {16, 64, 128}) {
    for (const std::int64_t page : {64, 1}) {
      AttentionCase c = latent_case<TestType>(heads);
      c.page_tokens = page;
      c.sequences.clear();
      for (std::int64_t b = 0; b < 37; ++b) c.sequences.push_back({1 + b * b % 190, b % 7 == 3 ? 0 : 1});
      c.sequences.push_back({900, 1});
      c.padding = {2, 5};
      c.kvp = 2;
      CAPTURE(heads, page);
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      c.padding.clear();
      c.sequences = {{1, 1}, {c.chunk, 1}};  // a rank without any page
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
  AttentionCase many = latent_case<TestType>(3);
  many.sequences.clear();
  for (std::int64_t b = 0; b < 300; ++b) many.sequences.push_back({1 + b % 80, 1});
  CHECK(AttentionWorld<TestType>(many).check(operators) == "");
  AttentionCase rows = latent_case<TestType>(128);
  rows.sequences = {{300, 290}};
  CHECK(AttentionWorld<TestType>(rows).check(operators) == "");
}

TEMPLATE_TEST_CASE("latents on a GPU: reading ahead gives the same bits", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = latent_attention_operators<TestType>();
  for (const std::int64_t heads : {4, 16, 128}) {
    for (const std::int64_t page : {64, 16, 2}) {  // whole tiles of a page, boxes, and rows
      AttentionCase c = latent_case<TestType>(heads);
      c.kvp = page == 64 ? 1 : 2;
      c.page_tokens = page;
      const auto check = [&](const std::vector<Sequence>& sequences) {
        c.sequences = sequences;
        CAPTURE(heads, page, sequences.size());
        check_reading_ahead(c, operators);
      };
      for (const std::int64_t length : {1, 65, 300, 2000}) check({{length, 1}});
      check({{513, 2}, {1, 1}, {40, 4}, {999, 1}});
      check({{70, 67}, {64, 1}});  // more than one query tile: nothing is prefetched
    }
  }
}

TEMPLATE_TEST_CASE("latents on a GPU: reading ahead gives the same bits over rows of 8 bits", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  for (const DType kv_dtype : {DType::fp8_e4m3, DType::fp8_ds_mla}) {
    for (const std::int64_t heads : {16, 128}) {
      AttentionCase c = latent_case<TestType>(heads);
      c.kv_dtype = kv_dtype;
      if (c.is_mixed()) c.pool = mixed_latent_pool;
      c.sequences = {{513, 2}, {1, 1}, {40, 4}, {999, 1}};
      CAPTURE(to_string(kv_dtype), heads);
      check_reading_ahead(c, operators);
    }
  }
}

TEMPLATE_TEST_CASE("latents on a GPU: the same on few blocks, and the same bits twice", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  auto operators = latent_attention_operators<TestType>();
  for (const int blocks : {1, 2, 3, 10, 131, 0}) {
    operators.set_attention_blocks(blocks);
    for (const std::int64_t heads : {8, 16, 128}) {
      for (const std::int64_t page : {64, 1}) {
        AttentionCase c = latent_case<TestType>(heads);
        c.page_tokens = page;
        c.sequences = {{700, 1}, {90, 1}, {1500, 2}};
        CAPTURE(blocks, heads, page);
        const AttentionWorld<TestType> world(c);
        CHECK(world.check(operators) == "");
        CHECK(world.run(operators) == world.run(operators));
      }
    }
  }
}

TEMPLATE_TEST_CASE("latents on a GPU: few rows of any number of sequences, short beside long", "", f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  cuda::Operators<TestType> beside_others;
  beside_others.set_shares_device(true);  // no clusters
  // The kernel for few rows uses clusters of eight or four blocks, or single blocks; with few pages it uses
  // at most as many clusters as sequences. Many or long sequences use the other kernel.
  for (const std::int64_t sequences : {1, 3, 15, 16, 31, 66, 67, 133}) {
    for (const std::int64_t longest : {40, 767, 2000}) {
      for (const std::int64_t page : {64, 1}) {
        AttentionCase c = latent_case<TestType>(sequences % 2 == 0 ? 16 : 5);
        c.page_tokens = page;
        c.sequences.clear();
        for (std::int64_t b = 0; b < sequences; ++b)
          c.sequences.push_back({b % 20 == 0 ? longest : 1 + b * 37 % 90, 1});
        CAPTURE(sequences, longest, page);
        const AttentionWorld<TestType> world(c);
        CHECK(world.check(operators) == "");
        CHECK(world.run(operators) == world.run(operators));
        CHECK(world.check(beside_others) == "");
      }
    }
  }
}

TEMPLATE_TEST_CASE("latents on a GPU: e4m3 under any heads, edges, pages, windows and shards", "", f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = latent_attention_operators<TestType>();
  for (const std::int64_t heads : {5, 16, 64, 100, 128}) {
    for (const std::int64_t page : {1, 3, 16, 64, 128}) {
      AttentionCase c = latent_case<TestType>(heads);
      c.kv_dtype = DType::fp8_e4m3;
      c.page_tokens = page;
      c.kvp = page == 16 ? 3 : 1;
      c.chunk = page == 3 ? 5 : 16;
      c.pool = page == 16 ? split_latent_pools : latent_pool;
      c.is_csr = page == 64;
      c.window = page == 3 ? 70 : 0;
      c.forgets = c.window > 0;
      c.soft_cap = page == 128 ? 3.0f : page == 64 ? 1e6f : 0.0f;
      c.is_scaled = page != 64;
      c.sequences = {{150, 1}, {400, 2}, {1, 1}, {63, 1}, {64, 1}, {65, 1}, {1000, 3}, {3001, 1}, {90, 0}};
      c.padding = {2};
      CAPTURE(heads, page);
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("latents on a GPU: rows of fp8_ds_mla under any heads, edges, pages, windows and shards",
                   "", f16, bf16, float) {
  HELIX_REQUIRE_GPUS(1);
  const cuda::Operators<TestType> operators;
  for (const std::int64_t heads : {5, 16, 32, 64, 128}) {
    for (const std::int64_t page : {1, 3, 64, 128}) {
      AttentionCase c = latent_case<TestType>(heads);
      c.kv_dtype = DType::fp8_ds_mla;
      c.pool = mixed_latent_pool;
      c.page_tokens = page;
      c.kvp = page == 64 ? 3 : 1;
      c.chunk = page == 3 ? 5 : 16;
      c.window = page == 3 ? 70 : 0;
      c.forgets = c.window > 0;
      c.soft_cap = page == 128 ? 3.0f : page == 64 ? 1e6f : 0.0f;
      c.sequences = {{150, 1}, {400, 2}, {1, 1}, {63, 1}, {64, 1}, {65, 1}, {1000, 3}, {3001, 1}, {90, 0}};
      c.padding = {2};
      CAPTURE(heads, page);
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
  }
}

TEMPLATE_TEST_CASE("latents on a GPU: equally long sequences, and outputs of any stride", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  auto operators = latent_attention_operators<TestType>();
  operators.set_attention_blocks(12);  // 6 blocks, or 3 pairs
  for (const DType kv_dtype : {kDTypeOf<TestType>, DType::fp8_e4m3}) {
    for (const std::int64_t heads : {20, 128}) {
      for (const std::int64_t sequences : {6, 7, 9, 12, 36}) {  // 7 do not go into whole query tiles each
        for (const std::int64_t out_pad : {0, 4, 1}) {
          AttentionCase c = latent_case<TestType>(heads);
          c.kv_dtype = kv_dtype;
          c.out_pad = out_pad;
          c.sequences.assign(static_cast<std::size_t>(sequences), {sequences == 36 ? 40 : 300, 1});
          CAPTURE(to_string(kv_dtype), heads, sequences, out_pad);
          const AttentionWorld<TestType> world(c);
          CHECK(world.check(operators) == "");
          CHECK(world.run(operators) == world.run(operators));
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("latents on a GPU: more query tiles than blocks, of any lengths", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  auto operators = latent_attention_operators<TestType>();
  std::vector<Sequence> rising;
  for (std::int64_t b = 0; b < 30; ++b) rising.push_back({1 + 37 * b % 200, b % 9 == 4 ? 0 : 1});
  std::vector<Sequence> one_long(14, {30, 1});
  one_long[4].length = 2700;  // its block would be late
  std::vector<Sequence> three_long(25, {30, 1});
  three_long[1].length = three_long[2].length = three_long[18].length = 400;
  std::vector<Sequence> prompts = {{60, 12}, {90, 1}, {40, 40}, {64, 1}, {100, 5}};
  const auto check = [&](int blocks, const std::vector<Sequence>& sequences, std::int64_t kvp) {
    operators.set_attention_blocks(blocks);
    for (const DType kv_dtype : {kDTypeOf<TestType>, DType::fp8_e4m3}) {
      for (const std::int64_t heads : {20, 64, 128}) {
        AttentionCase c = latent_case<TestType>(heads);
        c.kv_dtype = kv_dtype;
        c.sequences = sequences;
        c.kvp = kvp;
        CAPTURE(blocks, to_string(kv_dtype), heads, sequences.size(), sequences.front().length);
        const AttentionWorld<TestType> world(c);
        CHECK(world.check(operators) == "");
        CHECK(world.run(operators) == world.run(operators));
      }
    }
  };
  check(2, rising, 2);   // one block
  check(24, rising, 2);  // 12 blocks, or 6 pairs
  check(24, one_long, 1);
  check(24, three_long, 1);
  check(12, prompts, 1);
}

TEMPLATE_TEST_CASE("latents on a GPU: queries of any stride", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = latent_attention_operators<TestType>();
  for (const std::int64_t heads : {1, 5, 24, 64, 128}) {
    for (const std::int64_t page : {64, 1}) {
      AttentionCase c = latent_case<TestType>(heads);
      c.page_tokens = page;
      c.sequences = {{300, 1}, {70, 35}, {90, 0}, {33, 33}, {200, 7}};
      const auto check = [&] {
        CAPTURE(heads, page, c.q_pad, c.q_token_pad, c.is_q_reversed);
        CHECK(AttentionWorld<TestType>(c).check(operators) == "");
      };
      c.q_pad = 8;
      check();
      c.q_token_pad = 16;
      check();
      c.q_pad = 0;
      check();
      c.is_q_reversed = true;
      check();
    }
  }
}

TEMPLATE_TEST_CASE("latents on a GPU: maxima that rise and fall from tile to tile", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = latent_attention_operators<TestType>();
  for (const std::int64_t heads : {8, 16, 128}) {
    AttentionCase c = latent_case<TestType>(heads);
    c.sequences = {{2000, 1}, {500, 2}};
    c.sharpness = 12.0f;
    CAPTURE(heads);
    CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    c.kv_dtype = DType::fp8_e4m3;
    CHECK(AttentionWorld<TestType>(c).check(operators) == "");
  }
}

TEMPLATE_TEST_CASE("latents on a GPU: many small weights beside a large one", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  auto operators = latent_attention_operators<TestType>();
  operators.set_attention_blocks(1);  // no splits, because each has a maximum of its own
  for (const std::int64_t heads : {16, 128}) {
    AttentionCase c = latent_case<TestType>(heads);
    c.sequences = {{100000, 1}};
    // In f16, next to a weight of 1, the small weights would be a third too large, 0.3 % in total.
    c.loudness = 23.4f;
    CAPTURE(heads);
    CHECK(AttentionWorld<TestType>(c).check(operators) == "");
  }
}

TEMPLATE_TEST_CASE("latents on a GPU: rows whose first scores lie far below 0", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const auto operators = latent_attention_operators<TestType>();
  for (const std::int64_t heads : {8, 16, 128}) {
    AttentionCase c = latent_case<TestType>(heads);
    c.sequences = {{1, 1}, {1, 1}, {2, 1}, {3, 2}, {1, 1}, {1, 1}, {70, 1}};
    c.sharpness = 60.0f;
    CAPTURE(heads);
    for (const DType dtype : {kDTypeOf<TestType>, DType::fp8_e4m3}) {
      c.kv_dtype = dtype;
      CHECK(AttentionWorld<TestType>(c).check(operators) == "");
    }
    c.kv_dtype = DType::fp8_ds_mla;
    c.pool = mixed_latent_pool;
    CHECK(AttentionWorld<TestType>(c).check(cuda::Operators<TestType>()) == "");
  }
}

}  // namespace helix::test
