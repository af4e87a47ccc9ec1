// SPDX-License-Identifier: Apache-2.0
// Row-wise operations of cpu::Operators, for properties that the backend contract does not test: accuracy,
// threads, ownership.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <helix/cpu/backend.hpp>

#include "support/catch.hpp"
#include "support/worse.hpp"

namespace helix::test {
namespace {

using cpu::Operators;

std::vector<float> random_values(std::size_t count, std::uint32_t seed, float spread = 1.0f) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-spread, spread);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(generator);
  return values;
}

/// Runs one operation to completion on a rank with `threads` threads.
template <class Operation>
void run(int threads, const Operation& operation) {
  const Operators ops(threads);
  const Operators::Stream stream = ops.create_stream();
  operation(ops, stream);
  stream.synchronize();
}

TEST_CASE("rms_norm of a long row of unequal values is accurate to f32") {
  for (const std::int64_t width : {std::int64_t{9}, std::int64_t{16384}, std::int64_t{65537}}) {
    std::vector<float> x = random_values(static_cast<std::size_t>(width), 7);
    x[3] = 3000.0f;  // a running f32 sum would lose the other terms next to its square
    const std::vector<float> weight = random_values(x.size(), 8);
    std::vector<float> out(x.size());
    run(1, [&](const Operators& ops, auto stream) {
      ops.rms_norm({{},
                    {x.data(), {1, width}},
                    {weight.data(), DType::f32, 1, width},
                    {out.data(), {1, width}},
                    1e-6f},
                   stream);
    });
    double sum = 0.0;
    for (const float value : x) sum += double{value} * value;
    const double rms = std::sqrt(sum / static_cast<double>(width) + 1e-6);
    double worst = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = x[i] / rms * weight[i];
      worst = worse(worst, std::abs(out[i] - expected) / (std::abs(expected) + 1e-30));
    }
    CAPTURE(width);
    CHECK(worst < 4e-7);
  }
}

TEST_CASE("rms_norm with no weight adds only, and with no delta leaves the residual alone") {
  std::vector<float> residual{1, 2, 3, 4};
  const std::vector<float> delta{10, 20, 30, 40};
  run(1, [&](const Operators& ops, auto stream) {
    ops.rms_norm({{delta.data(), {2, 2}}, {residual.data(), {2, 2}}, {}, {}, 1e-5f}, stream);
  });
  CHECK(residual == std::vector<float>{11, 22, 33, 44});
  const std::vector<float> weight{1, 1};
  std::vector<float> out(4);
  run(1, [&](const Operators& ops, auto stream) {
    ops.rms_norm(
        {{}, {residual.data(), {2, 2}}, {weight.data(), DType::f32, 1, 2}, {out.data(), {2, 2}}, 0.0f},
        stream);
  });
  CHECK(residual == std::vector<float>{11, 22, 33, 44});
  CHECK(out[0] == Approx(11 / std::sqrt((121 + 484) / 2.0)));
}

/// One head of `2 * pairs` elements, rotated for `position`.
std::vector<float> rotated(const std::vector<float>& x, std::int64_t position,
                           const std::vector<float>& frequency, bool is_interleaved) {
  const auto width = static_cast<std::int64_t>(x.size());
  const auto rotary = 2 * static_cast<std::int64_t>(frequency.size());
  std::vector<float> out(x.size());
  run(1, [&](const Operators& ops, auto stream) {
    ops.rope({{x.data(), {1, 1, width}},
              {out.data(), {1, 1, width}},
              &position,
              {frequency.data(), rotary, is_interleaved, 1.0f}},
             stream);
  });
  return out;
}

TEST_CASE("rope is accurate at angles up to a million radians") {
  std::vector<float> frequency;
  for (int i = 0; i < 64; ++i) frequency.push_back(static_cast<float>(std::pow(5e5, -i / 64.0)));
  const std::vector<float> x = random_values(128, 3);
  for (const bool is_interleaved : {false, true}) {
    for (const std::int64_t position : {0, 1, 4097, 131071, 999'999, 1'000'000}) {
      const std::vector<float> out = rotated(x, position, frequency, is_interleaved);
      double worst = 0.0;
      for (std::size_t i = 0; i < 64; ++i) {
        const std::size_t a = is_interleaved ? 2 * i : i;
        const std::size_t b = is_interleaved ? 2 * i + 1 : i + 64;
        const double angle =
            static_cast<float>(position) * frequency[i];  // the models round the product to f32
        worst = worse(worst, std::abs(out[a] - (x[a] * std::cos(angle) - x[b] * std::sin(angle))));
        worst = worse(worst, std::abs(out[b] - (x[b] * std::cos(angle) + x[a] * std::sin(angle))));
      }
      CAPTURE(is_interleaved, position);
      CHECK(worst < 3e-7);
    }
  }
}

TEST_CASE("rope rotates each pair once on both sides of the table's size, and copies what follows") {
  for (const bool is_interleaved : {false, true}) {
    for (const std::size_t pairs : {1u, 63u, 64u, 65u, 128u, 129u}) {
      CAPTURE(is_interleaved, pairs);
      std::vector<float> frequency(pairs);
      for (std::size_t i = 0; i < pairs; ++i) frequency[i] = 1.0f / static_cast<float>(i + 1);
      const std::vector<float> x = random_values(2 * pairs + 3, 5);
      const std::vector<float> out = rotated(x, 2, frequency, is_interleaved);
      for (std::size_t i = 0; i < pairs; ++i) {
        const std::size_t a = is_interleaved ? 2 * i : i;
        const std::size_t b = is_interleaved ? 2 * i + 1 : i + pairs;
        const double angle = 2.0f * frequency[i];
        REQUIRE(std::abs(out[a] - (x[a] * std::cos(angle) - x[b] * std::sin(angle))) < 3e-7);
        REQUIRE(std::abs(out[b] - (x[b] * std::cos(angle) + x[a] * std::sin(angle))) < 3e-7);
      }
      for (std::size_t i = 2 * pairs; i < x.size(); ++i) CHECK(out[i] == x[i]);
    }
  }
}

TEST_CASE("rope makes query-key products depend on the distance alone, and leaves padding as it is") {
  std::vector<float> frequency;
  for (int i = 0; i < 8; ++i) frequency.push_back(static_cast<float>(std::pow(1e4, -i / 8.0)));
  const std::vector<float> q = random_values(16, 1);
  const std::vector<float> k = random_values(16, 2);
  const auto score = [&](std::int64_t query, std::int64_t key, bool is_interleaved) {
    const std::vector<float> a = rotated(q, query, frequency, is_interleaved);
    const std::vector<float> b = rotated(k, key, frequency, is_interleaved);
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  for (const bool is_interleaved : {false, true}) {
    CHECK(score(57, 50, is_interleaved) == Approx(score(7, 0, is_interleaved)).margin(1e-5));
    CHECK(std::abs(score(57, 50, is_interleaved) - score(57, 49, is_interleaved)) >
          1e-3);  // control: the result does depend on it
    CHECK(rotated(q, -1, frequency, is_interleaved) == q);
  }
}

/// A step of `counts[b]` tokens that end at `lengths[b]`, appended on every KVP rank.
struct Appended {
  std::vector<std::vector<float>> pages;  // [rank], f32
  std::int64_t page_elements = 0;
  std::int64_t max_pages = 0;
  std::vector<std::int32_t> table;  // [sequences, max_pages]
};

Appended append(const std::vector<std::int64_t>& lengths, const std::vector<std::int32_t>& counts,
                std::int64_t kvp, std::int64_t chunk, std::int64_t page_tokens, bool is_mla, int threads) {
  const std::int64_t heads = is_mla ? 1 : 2;
  const std::int64_t dim = 3;
  std::vector<std::int32_t> offsets{0};
  std::vector<std::int64_t> positions;
  std::vector<std::int32_t> slots;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    slots.push_back(static_cast<std::int32_t>(b));
    for (std::int32_t i = 0; i < counts[b]; ++i) positions.push_back(lengths[b] - counts[b] + i);
    offsets.push_back(offsets.back() + counts[b]);
  }
  const auto tokens = static_cast<std::int64_t>(positions.size());
  std::vector<float> k;
  std::vector<float> v;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t e = 0; e < heads * dim; ++e) {
      k.push_back(static_cast<float>(1000 * t + e));
      v.push_back(static_cast<float>(-1000 * t - e - 1));
    }
  }
  const std::int64_t max_length = *std::max_element(lengths.begin(), lengths.end());
  const std::int64_t max_pages = max_length / page_tokens + 1;
  std::vector<std::int32_t> table(lengths.size() * static_cast<std::size_t>(max_pages));
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(table.size() - 1 - i);
  Appended result;
  for (std::int64_t rank = 0; rank < kvp; ++rank) {
    const KvFormat format = is_mla ? KvFormat::latent(DType::f32, dim, 2, page_tokens)
                                   : KvFormat::head_major(DType::f32, heads, dim, dim, page_tokens);
    const auto num_pages = static_cast<std::int64_t>(table.size());
    result.page_elements = format.page_elements();
    result.max_pages = max_pages;
    result.table = table;
    std::vector<float> pages(static_cast<std::size_t>(num_pages * format.page_elements()), std::nanf(""));
    KvView kv = KvView::of_pool(pages.data(), format, num_pages);
    kv.page_table = table.data();
    kv.max_pages = max_pages;
    kv.layout = KvLayout(kvp, chunk);
    kv.kvp_rank = rank;
    run(threads, [&](const Operators& ops, auto stream) {
      AppendKvArgs<float> args;
      args.k = TensorView<const float, 3>(k.data(), {tokens, heads, dim});
      if (!is_mla) args.v = TensorView<const float, 3>(v.data(), {tokens, heads, dim});
      args.batch = {offsets, offsets.data(), positions.data(), slots.data()};
      args.kv = kv;
      ops.append_kv(args, stream);
    });
    result.pages.push_back(std::move(pages));
  }
  return result;
}

TEST_CASE("append_kv stores each element of each token once over all KVP ranks") {
  const std::vector<std::int64_t> lengths{37, 5, 64, 1, 20};
  const std::vector<std::int32_t> counts{37, 0, 8, 1, 3};  // a prefill, an idle sequence, draft tokens
  constexpr std::size_t kTokens = 49;
  for (const bool is_mla : {false, true}) {
    for (const std::int64_t kvp : {1, 2, 3, 8}) {
      for (const std::int64_t chunk : {1, 2, 5, 16}) {
        for (const std::int64_t page_tokens : {1, 4, 16}) {
          CAPTURE(is_mla, kvp, chunk, page_tokens);
          const Appended appended = append(lengths, counts, kvp, chunk, page_tokens, is_mla, 1);
          std::multiset<float> stored;
          for (const auto& pages : appended.pages)
            for (const float value : pages)
              if (!std::isnan(value)) stored.insert(value);
          const std::size_t elements = is_mla ? 3 : 12;
          CHECK(stored.size() == kTokens * elements);
          CHECK(std::set<float>(stored.begin(), stored.end()).size() == stored.size());
        }
      }
    }
  }
}

TEST_CASE("append_kv stores each token in its own sequence's pages, at its owner's local position") {
  const std::vector<std::int64_t> lengths{9, 5, 30, 1, 20};
  const std::vector<std::int32_t> counts{4, 0, 30, 1, 2};
  for (const std::int64_t kvp : {1, 3}) {
    for (const std::int64_t chunk : {1, 4}) {
      CAPTURE(kvp, chunk);
      constexpr std::int64_t kPageTokens = 4;
      const Appended appended = append(lengths, counts, kvp, chunk, kPageTokens, false, 2);
      std::int64_t token = 0;
      for (std::size_t b = 0; b < lengths.size(); ++b) {
        std::vector<std::int64_t> held(
            static_cast<std::size_t>(kvp));  // tokens a rank owns, counted one by one
        for (std::int64_t position = 0; position < lengths[b]; ++position) {
          const auto owner = static_cast<std::size_t>(position / chunk % kvp);
          const std::int64_t local = held[owner]++;
          if (position < lengths[b] - counts[b]) continue;
          const std::int64_t entry = static_cast<std::int64_t>(b) * appended.max_pages + local / kPageTokens;
          const std::int64_t page = appended.table[static_cast<std::size_t>(entry)];
          for (std::int64_t plane = 0; plane < 4; ++plane) {  // K of two heads, V of two heads
            const std::int64_t at =
                page * appended.page_elements + (plane * kPageTokens + local % kPageTokens) * 3 + 2;
            const auto number = static_cast<float>(1000 * token + plane % 2 * 3 + 2);
            REQUIRE(appended.pages[owner][static_cast<std::size_t>(at)] ==
                    (plane < 2 ? number : -number - 1));
          }
          ++token;
        }
      }
      CHECK(token == 37);
    }
  }
}

TEST_CASE("append_kv stores a token where its page table, layout and head say") {
  // Sequence 0 of two; KVP 2, chunk 2, pages of 2: position 5 is local token 3 of rank 0: page table[1], row
  // 1.
  const Appended appended = append({6, 4}, {1, 0}, 2, 2, 2, false, 1);
  const auto& pages = appended.pages[0];
  // max_pages is 6 / 2 + 1 = 4; the table is filled from the back: entry 1 of slot 0 names page 6 of 8.
  const auto page = static_cast<std::size_t>(6 * appended.page_elements);
  const auto at = [&](std::size_t plane, std::size_t row) { return page + (plane * 2 + row) * 3; };
  CHECK(pages[at(0, 1)] == 0.0f);   // K of head 0
  CHECK(pages[at(1, 1)] == 3.0f);   // K of head 1
  CHECK(pages[at(2, 1)] == -1.0f);  // V of head 0
  CHECK(pages[at(3, 1) + 2] == -6.0f);
  CHECK(std::count_if(pages.begin(), pages.end(), [](float x) { return !std::isnan(x); }) == 12);
  CHECK(std::count_if(appended.pages[1].begin(), appended.pages[1].end(),
                      [](float x) { return !std::isnan(x); }) == 0);
}

TEST_CASE("append_kv divides by the head's scale, rounds and saturates for fp8") {
  const std::vector<float> k{1.0f, 1000.0f, 2.0f, 3.0f};
  const std::vector<float> v{0.3f, -1000.0f, 4.0f, 5.0f};
  const std::vector<float> k_scale{0.5f, 2.0f};
  const std::vector<float> v_scale{1.0f, 4.0f};
  const std::vector<std::int32_t> offsets{0, 1};
  const std::int64_t position = 0;
  const std::int32_t zero = 0;
  std::vector<fp8_e4m3> pages(8);
  KvView kv = KvView::of_pool(pages.data(), KvFormat::head_major(DType::fp8_e4m3, 2, 2, 2, 1), 1).whole();
  kv.max_pages = 1;
  kv.k_scale = k_scale.data();
  kv.v_scale = v_scale.data();
  kv.page_table = &zero;
  run(1, [&](const Operators& ops, auto stream) {
    ops.append_kv(
        {{k.data(), {1, 2, 2}}, {v.data(), {1, 2, 2}}, {offsets, offsets.data(), &position, &zero}, kv},
        stream);
  });
  std::vector<float> stored;
  for (const fp8_e4m3 value : pages) stored.push_back(static_cast<float>(value));
  CHECK(stored == std::vector<float>{2.0f, 448.0f, 1.0f, 1.5f, 0.3125f, -448.0f, 1.0f, 1.25f});
}

TEST_CASE("append_kv and gather_rows refuse what would read past their inputs") {
  const std::vector<float> rows(4);
  const std::vector<std::int32_t> host{0, 2};
  const std::vector<std::int32_t> device{0, 4};
  const std::vector<std::int64_t> positions{0, 1, 2, 3};
  const std::int32_t zero = 0;
  std::vector<float> pages(8);
  KvView kv = KvView::of_pool(pages.data(), KvFormat::head_major(DType::f32, 1, 1, 1, 4), 1).whole();
  kv.max_pages = 1;
  kv.page_table = &zero;
  const auto append = [&](const Operators& ops, auto stream) {
    ops.append_kv({{rows.data(), {2, 1, 1}},
                   {rows.data(), {2, 1, 1}},
                   {host, device.data(), positions.data(), &zero},
                   kv},
                  stream);
  };
  CHECK_THROWS_WITH(run(1, append),
                    Catch::Matchers::ContainsSubstring("has 2 tokens by its query_offsets_host"));
  const std::vector<std::int32_t> host_of_two{0, 2, 2};
  const std::vector<std::int32_t> device_of_two{0, 0, 2};
  const auto append_to_two = [&](const Operators& ops, auto stream) {
    ops.append_kv({{rows.data(), {2, 1, 1}},
                   {rows.data(), {2, 1, 1}},
                   {host_of_two, device_of_two.data(), positions.data(), &zero},
                   kv},
                  stream);
  };
  CHECK_THROWS_WITH(run(1, append_to_two),
                    Catch::Matchers::ContainsSubstring("append_kv: the batch's 2 tokens are divided"));

  std::vector<float> out(2);
  for (const std::int32_t row : {-1, 4}) {
    const std::vector<std::int32_t> chosen{0, row};
    const auto gather = [&](const Operators& ops, auto stream) {
      ops.gather_rows({{rows.data(), {4, 1}}, chosen.data(), {out.data(), {2, 1}}}, stream);
    };
    CHECK_THROWS_WITH(run(1, gather),
                      Catch::Matchers::ContainsSubstring("rows[1] is " + std::to_string(row)));
  }
}

TEST_CASE("shards of the vocabulary embed to the whole table when they are added") {
  const std::vector<float> table = random_values(7 * 4, 11);
  const std::vector<std::int32_t> ids{6, 0, 3, 3, 2};
  std::vector<float> sum(ids.size() * 4, 0.0f);
  for (const auto& [begin, end] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 3}, {3, 3}, {3, 7}}) {
    std::vector<float> part(sum.size(), std::nanf(""));
    run(1, [&, begin = begin, end = end](const Operators& ops, auto stream) {
      ops.embed(
          {ids.data(), {table.data() + begin * 4, DType::f32, end - begin, 4}, begin, {part.data(), {5, 4}}},
          stream);
    });
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
  }
  for (std::size_t t = 0; t < ids.size(); ++t)
    for (std::size_t i = 0; i < 4; ++i)
      CHECK(sum[t * 4 + i] == table[static_cast<std::size_t>(ids[t]) * 4 + i]);
}

TEST_CASE("row-wise operations give the same bits for any number of threads") {
  constexpr std::int64_t kRows = 70;
  constexpr std::int64_t kWidth = 1030;
  const std::vector<float> x = random_values(kRows * kWidth, 21);
  const std::vector<float> weight = random_values(kWidth, 22);
  const std::vector<float> frequency = random_values(kWidth / 2 / 5, 23);
  std::vector<std::int64_t> positions(kRows);
  std::iota(positions.begin(), positions.end(), 1000);
  const auto all_results = [&](int threads) {
    std::vector<float> normed(x.size()), added = x, head_normed = x, roped(x.size()), activated(x.size() / 2);
    run(threads, [&](const Operators& ops, auto stream) {
      const WeightView w{weight.data(), DType::f32, 1, kWidth};
      const TensorView<const float, 2> in(x.data(), {kRows, kWidth});
      ops.rms_norm({in, {added.data(), {kRows, kWidth}}, w, {normed.data(), {kRows, kWidth}}, 1e-5f}, stream);
      ops.head_rms_norm(
          {{head_normed.data(), {kRows, 5, kWidth / 5}}, {weight.data(), DType::f32, 1, kWidth / 5}, 1e-5f},
          stream);
      ops.rope({{x.data(), {kRows, 5, kWidth / 5}},
                {roped.data(), {kRows, 5, kWidth / 5}},
                positions.data(),
                {frequency.data(), 2 * static_cast<std::int64_t>(frequency.size()), false, 1.0f}},
               stream);
      ops.swiglu({in, {activated.data(), {kRows, kWidth / 2}}}, stream);
    });
    std::vector<float> all = normed;
    for (const auto* part : {&added, &head_normed, &roped, &activated})
      all.insert(all.end(), part->begin(), part->end());
    return all;
  };
  const std::vector<float> alone = all_results(1);
  CHECK(alone == all_results(2));
  CHECK(alone == all_results(5));
  const auto bits = [](const Appended& appended) {
    std::vector<float> all;
    for (const auto& pages : appended.pages)
      for (const float value : pages) all.push_back(std::isnan(value) ? 12345.25f : value);
    return all;
  };
  CHECK(bits(append({9000, 3}, {9000, 2}, 2, 16, 16, false, 1)) ==
        bits(append({9000, 3}, {9000, 2}, 2, 16, 16, false, 4)));
}

}  // namespace
}  // namespace helix::test
