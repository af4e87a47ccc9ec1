// SPDX-License-Identifier: Apache-2.0
// Properties of cpu partial attention against a naive double-precision reference, with everything poisoned
// that must not be read.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <hwy/targets.h>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/tuning.hpp>

#include "support/catch.hpp"

namespace {

using helix::DType;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int32_t kWildPage = 0x7ffffff0;

struct Sequence {
  std::int64_t length = 0;   ///< global tokens, the query tokens included
  std::int64_t queries = 1;  ///< the last ones
};

struct Case {
  std::int64_t query_heads = 4;
  std::int64_t kv_heads = 2;
  std::int64_t d = 32;
  std::int64_t dv = 32;
  bool is_mla = false;
  DType dtype = DType::f32;
  std::int64_t page_tokens = 16;
  std::int64_t kvp = 1;
  std::int64_t chunk = 1;
  std::int64_t window = 0;
  float soft_cap = 0.0f;
  std::vector<Sequence> sequences = {{40, 1}};
};

/// One layer of one model: what every token holds, what each query asks.
class World {
 public:
  explicit World(const Case& c, unsigned seed = 1) : case_(c), random_(seed) {
    offsets_.push_back(0);
    for (std::size_t b = 0; b < c.sequences.size(); ++b) {
      const Sequence& s = c.sequences[b];
      for (std::int64_t t = 0; t < s.queries; ++t) positions_.push_back(s.length - s.queries + t);
      offsets_.push_back(static_cast<std::int32_t>(positions_.size()));
      slots_.push_back(static_cast<std::int32_t>((b * 7 + 3) % c.sequences.size()));
    }
    if (c.sequences.size() % 7 == 0) std::iota(slots_.begin(), slots_.end(), 0);
    q_.resize(positions_.size() * at(c.query_heads * c.d));
    for (float& x : q_) x = uniform();
    for (std::int64_t h = 0; h < c.kv_heads; ++h) {
      k_scale_.push_back(0.5f + 0.25f * static_cast<float>(h));
      v_scale_.push_back(1.5f - 0.25f * static_cast<float>(h));
    }
    stored_.resize(c.sequences.size());
    for (std::size_t b = 0; b < stored_.size(); ++b) {
      stored_[b].resize(at(c.sequences[b].length * row_elements()) * helix::size_bytes(c.dtype));
      helix::dispatch(c.dtype, [&]<class T>(T*) {
        for (std::size_t i = 0; i < stored_[b].size() / sizeof(T); ++i) store<T>(b, i, T(2.0f * uniform()));
      });
    }
  }

  std::vector<std::int64_t>& positions() { return positions_; }
  std::int64_t num_tokens() const { return static_cast<std::int64_t>(positions_.size()); }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.d)) * 2.0f; }

  /// Makes every element of a token's K and V NaN, where the type has one.
  void poison(std::size_t b, std::int64_t token) {
    helix::dispatch(case_.dtype, [&]<class T>(T*) {
      for (std::int64_t i = 0; i < row_elements(); ++i) store<T>(b, at(token * row_elements() + i), T(kNaN));
    });
  }

  /// Fills the query of `token` of the step with NaN.
  void poison_query(std::int64_t token) {
    const auto begin = q_.begin() + token * case_.query_heads * case_.d;
    std::fill(begin, begin + case_.query_heads * case_.d, kNaN);
  }

  struct Result {
    std::vector<float> out;
    std::vector<float> lse;
  };

  /// The code under test, on the shard of `kvp_rank`. Unowned slots are NaN and unused page ids wild.
  Result run(std::int64_t kvp_rank, int num_threads = 1, std::int64_t slice = 0,
             unsigned page_seed = 5) const {
    const Case& c = case_;
    const helix::KvLayout layout(c.kvp, c.chunk);
    std::int64_t needed = 0;
    std::int64_t max_pages = 1;
    for (const Sequence& s : c.sequences) {
      const std::int64_t pages = (layout.length(s.length, kvp_rank) + c.page_tokens - 1) / c.page_tokens;
      needed += pages;
      max_pages = std::max(max_pages, pages + 1);
    }
    const helix::KvFormat format =
        c.is_mla ? helix::KvFormat::latent(c.dtype, c.d, c.dv, c.page_tokens)
                 : helix::KvFormat::head_major(c.dtype, c.kv_heads, c.d, c.dv, c.page_tokens);
    const std::int64_t num_pages = needed + 2;
    std::vector<std::int32_t> free_pages(at(num_pages));
    std::iota(free_pages.begin(), free_pages.end(), 0);
    std::mt19937 shuffle(page_seed);
    std::shuffle(free_pages.begin(), free_pages.end(), shuffle);
    std::vector<std::int32_t> table(c.sequences.size() * at(max_pages), kWildPage);
    const std::size_t bytes = helix::size_bytes(c.dtype);
    std::vector<std::byte> pages(at(num_pages * format.page_elements()) * bytes);
    helix::dispatch(c.dtype, [&]<class T>(T*) {
      for (std::size_t i = 0; i < pages.size() / sizeof(T); ++i) {
        const T nan{kNaN};
        std::memcpy(pages.data() + i * sizeof(T), &nan, sizeof(T));
      }
    });
    for (std::size_t b = 0; b < c.sequences.size(); ++b) {
      for (std::int64_t token = 0; token < c.sequences[b].length; ++token) {
        if (layout.owner(token) != kvp_rank) continue;
        const std::int64_t local = layout.local(token);
        auto& page = table[at(slots_[b] * max_pages + local / c.page_tokens)];
        if (page == kWildPage) {
          page = free_pages.back();
          free_pages.pop_back();
        }
        for (std::int64_t part = 0; part < (c.is_mla ? 1 : 2 * c.kv_heads); ++part) {
          const std::int64_t to =
              page * format.page_elements() + (part * c.page_tokens + local % c.page_tokens) * c.d;
          const std::int64_t from = token * row_elements() + part * c.d;
          std::memcpy(pages.data() + at(to) * bytes, stored_[b].data() + at(from) * bytes, at(c.d) * bytes);
        }
      }
    }
    helix::KvView kv = helix::KvView::of_pool(pages.data(), format, num_pages);
    kv.page_table = table.data();
    kv.max_pages = max_pages;
    kv.layout = layout;
    kv.kvp_rank = kvp_rank;
    if (c.dtype == DType::fp8_e4m3) {
      kv.k_scale = k_scale_.data();
      if (!c.is_mla) kv.v_scale = v_scale_.data();
    }

    Result result;
    result.out.assign(at(num_tokens() * c.query_heads * c.dv), kNaN);
    result.lse.assign(at(num_tokens() * c.query_heads), kNaN);
    helix::cpu::Operators operators(num_threads);
    helix::cpu::Stream stream = operators.create_stream();
    std::vector<std::byte> workspace(
        operators.partial_attention_workspace_bytes(num_tokens(), c.query_heads, c.d, c.dv) + 1);
    helix::PartialAttentionArgs<float> args;
    args.q = {q_.data(), {num_tokens(), c.query_heads, c.d}};
    args.kv = kv;
    args.sink.out = {result.out.data(), {num_tokens(), c.query_heads, c.dv}};
    args.sink.lse = {result.lse.data(), {num_tokens(), c.query_heads}};
    args.scale = scale();
    args.window = c.window;
    args.soft_cap = c.soft_cap;
    args.workspace = std::span(workspace).subspan(1);  // the kernel owes nothing to its alignment
    const helix::Batch batch{offsets_, offsets_.data(), positions_.data(), slots_.data()};
    const std::int64_t step = slice == 0 ? batch.num_sequences() : slice;
    for (std::int64_t first = 0; first < batch.num_sequences(); first += step) {
      args.batch = batch.slice(first, std::min(step, batch.num_sequences() - first));
      operators.partial_attention(args, stream);
    }
    operators.synchronize(stream);
    return result;
  }

  /// Attention of query token `t`, head `head`, over the tokens that `kvp_rank` owns (-1: all), in double.
  void reference(std::int64_t t, std::int64_t head, std::int64_t kvp_rank, std::vector<double>& out,
                 double& lse) const {
    const Case& c = case_;
    const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), static_cast<std::int32_t>(t));
    const auto b = static_cast<std::size_t>(after - offsets_.begin() - 1);
    const std::int64_t kv_head = head / (c.query_heads / c.kv_heads);
    const std::int64_t position = positions_[at(t)];
    const bool is_fp8 = c.dtype == DType::fp8_e4m3;
    const double k_scale = is_fp8 ? k_scale_[at(kv_head)] : 1.0;
    const double v_scale = c.is_mla ? k_scale : (is_fp8 ? v_scale_[at(kv_head)] : 1.0);
    std::vector<double> scores;
    std::vector<std::int64_t> tokens;
    for (std::int64_t token = 0; token <= position; ++token) {
      if (c.window > 0 && token <= position - c.window) continue;
      if (kvp_rank >= 0 && (token / c.chunk) % c.kvp != kvp_rank) continue;
      double score = 0.0;
      for (std::int64_t i = 0; i < c.d; ++i) {
        const double q = q_[at((t * c.query_heads + head) * c.d + i)];
        score += q * value(b, token * row_elements() + (c.is_mla ? 0 : kv_head * c.d) + i) * k_scale;
      }
      score *= scale();
      if (c.soft_cap > 0.0f) score = c.soft_cap * std::tanh(score / c.soft_cap);
      scores.push_back(score);
      tokens.push_back(token);
    }
    out.assign(at(c.dv), 0.0);
    lse = -kInfinity;
    if (scores.empty()) return;
    const double highest = *std::max_element(scores.begin(), scores.end());
    double total = 0.0;
    for (std::size_t j = 0; j < scores.size(); ++j) {
      const double weight = std::exp(scores[j] - highest);
      total += weight;
      const std::int64_t row = tokens[j] * row_elements() + (c.is_mla ? 0 : (c.kv_heads + kv_head) * c.d);
      for (std::int64_t i = 0; i < c.dv; ++i) out[at(i)] += weight * value(b, row + i) * v_scale;
    }
    for (double& x : out) x /= total;
    lse = highest + std::log(total);
  }

  /// Every query of every rank, and the merge of all ranks, against the reference.
  void check(int num_threads = 2) const {
    const Case& c = case_;
    std::vector<Result> results;
    for (std::int64_t rank = 0; rank < c.kvp; ++rank) results.push_back(run(rank, num_threads));
    std::vector<double> expected;
    double expected_lse = 0.0;
    for (std::int64_t t = 0; t < num_tokens(); ++t) {
      for (std::int64_t head = 0; head < c.query_heads; ++head) {
        std::vector<double> merged(at(c.dv), 0.0);
        double total = 0.0;
        for (std::int64_t rank = 0; rank < c.kvp; ++rank) {
          reference(t, head, rank, expected, expected_lse);
          const float lse = results[at(rank)].lse[at(t * c.query_heads + head)];
          const float* out = results[at(rank)].out.data() + (t * c.query_heads + head) * c.dv;
          INFO("token " << t << " head " << head << " rank " << rank << " position " << positions_[at(t)]);
          compare(out, lse, expected, expected_lse);
          for (std::int64_t i = 0; i < c.dv; ++i)
            merged[at(i)] += std::exp(static_cast<double>(lse)) * out[i];
          total += std::exp(static_cast<double>(lse));
        }
        if (c.kvp == 1 || total == 0.0) continue;
        reference(t, head, -1, expected, expected_lse);
        INFO("token " << t << " head " << head << ", all ranks merged");
        std::vector<float> out(at(c.dv));
        for (std::int64_t i = 0; i < c.dv; ++i) out[at(i)] = static_cast<float>(merged[at(i)] / total);
        compare(out.data(), static_cast<float>(std::log(total)), expected, expected_lse);
      }
    }
  }

  static void compare(const float* out, float lse, const std::vector<double>& expected, double expected_lse) {
    if (expected_lse == -kInfinity) {
      if (lse != -std::numeric_limits<float>::infinity()) FAIL("lse is " << lse << ", expected -inf");
    } else if (!(std::abs(lse - expected_lse) <= 1e-5 * std::max(1.0, std::abs(expected_lse)))) {
      FAIL("lse is " << lse << ", expected " << expected_lse);
    }
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (!(std::abs(out[i] - expected[i]) <= 1e-5)) {
        FAIL("out[" << i << "] is " << out[i] << ", expected " << expected[i]);
      }
    }
  }

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

 private:
  /// Elements of a token: [K of every head, V of every head], or the latent row.
  std::int64_t row_elements() const { return (case_.is_mla ? 1 : 2 * case_.kv_heads) * case_.d; }
  float uniform() { return std::uniform_real_distribution<float>(-1.0f, 1.0f)(random_); }

  template <class T>
  void store(std::size_t b, std::size_t i, T x) {
    std::memcpy(stored_[b].data() + i * sizeof(T), &x, sizeof(T));
  }
  double value(std::size_t b, std::int64_t i) const {
    return helix::dispatch(case_.dtype, [&]<class T>(T*) {
      T x;
      std::memcpy(&x, stored_[b].data() + at(i) * sizeof(T), sizeof(T));
      return static_cast<double>(static_cast<float>(x));
    });
  }

  Case case_;
  std::mt19937 random_;
  std::vector<std::int32_t> offsets_;
  std::vector<std::int32_t> slots_;
  std::vector<std::int64_t> positions_;
  std::vector<float> q_;
  std::vector<float> k_scale_;
  std::vector<float> v_scale_;
  std::vector<std::vector<std::byte>> stored_;
};

bool same_bits(const World::Result& a, const World::Result& b) {
  return std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(float)) == 0 &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
}

}  // namespace

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
  for (float cap : {0.25f, 1.0f, 30.0f}) {
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

TEST_CASE("partial attention gives the same bits for any number of threads") {
  const World world({.query_heads = 8,
                     .d = 64,
                     .dv = 64,
                     .dtype = DType::bf16,
                     .page_tokens = 64,
                     .sequences = {{5000, 1}, {3000, 4}, {200, 40}}});
  const World::Result one = world.run(0, 1);
  for (int threads : {2, 3, 5}) REQUIRE(same_bits(one, world.run(0, threads)));
  REQUIRE_FALSE(same_bits(one, World({.query_heads = 8,
                                      .d = 64,
                                      .dv = 64,
                                      .dtype = DType::bf16,
                                      .page_tokens = 64,
                                      .sequences = {{5000, 1}, {3000, 4}, {200, 40}}},
                                     2)
                                   .run(0, 1)));
}

TEST_CASE("partial attention gives the same bits in every variant") {
  const std::vector<const char*> variants = {"heads1",          "plain",           "heads2",
                                             "heads4",          "heads8",          "heads8.in_order",
                                             "heads2.straight", "heads4.straight", "heads8.straight"};
  const std::vector<const char*> narrow = {"heads1.narrow", "heads4.narrow", "heads8.narrow",
                                           "heads4.straight.narrow", "heads8.straight.narrow"};
  // Four units of one split, so that a thread has tasks enough for heads to share them.
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
          REQUIRE(same_bits(first, world.run(0)));
        };
        for (const char* variant : variants) check("attention.*", variant);
        if (dtype == DType::bf16 && group > 4) {
          for (const char* variant : narrow) check("attention.bf16.rows8", variant);
        }
      }
    }
  }
  for (const char* variant : {"heads8.in_order", "heads8.straight"}) {
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
  for (std::int64_t slice : {1, 2, 3}) REQUIRE(same_bits(whole, world.run(0, 2, slice)));
  REQUIRE(same_bits(whole, world.run(0, 2, 0, 77)));
}

TEST_CASE("partial attention lets no token reach a query that may not see it") {
  for (std::int64_t window : {0, 6}) {
    for (std::int64_t query_heads : {2, 8, 24}) {
      for (DType dtype : {DType::f32, DType::bf16, DType::fp8_e4m3}) {
        CAPTURE(window, query_heads, helix::to_string(dtype));
        World world({.query_heads = query_heads, .dtype = dtype, .window = window, .sequences = {{60, 4}}});
        world.poison(0, 58);                  // the third of four query tokens
        if (window > 0) world.poison(0, 51);  // seen by the first query token alone
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
  for (std::int64_t query_heads : {2, 8, 24}) {  // a kernel each
    for (DType dtype : {DType::f32, DType::bf16}) {
      CAPTURE(query_heads, helix::to_string(dtype));
      World world({.query_heads = query_heads, .dtype = dtype, .sequences = {{60, 2}}});
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
        helix::KvView::of_pool(pages.data(), helix::KvFormat::head_major(DType::f32, 1, 16, 16, length), 1);
    args.kv.max_pages = 1;
    args.kv.page_table = table.data();
    args.sink.out = {out.data(), {count, 1, 16}};
    args.sink.lse = {lse.data(), {count, 1}};
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
