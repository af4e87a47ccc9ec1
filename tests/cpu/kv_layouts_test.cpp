// SPDX-License-Identifier: Apache-2.0
// Attention, appends and transfers in the KV layouts of other engines, against an attention in double that
// finds its rows by index arithmetic of its own. What must not be read is NaN, unused page ids are wild.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>
#include <helix/foreign_kv.hpp>
#include <helix/partial_attention.hpp>

#include "support/catch.hpp"

namespace helix::test {
namespace {

constexpr std::int32_t kWildPage = 0x7ffffff0;

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// Sizes of a pool under test.
struct Sizes {
  DType dtype = DType::f32;
  std::int64_t heads = 2;
  std::int64_t d = 64;
  std::int64_t dv = 64;
  std::int64_t page_tokens = 16;
  std::int64_t num_pages = 0;
};

/// Memory in an engine's layout, its view, and where a row lies: element of memory[buffer].
struct Pool {
  struct Place {
    std::size_t buffer;
    std::int64_t element;
  };
  std::vector<std::vector<std::byte>> memory;
  KvView view;
  std::function<Place(std::int64_t page, std::int64_t token, std::int64_t head)> k, v, rope;

  explicit Pool(DType dtype, std::vector<std::int64_t> elements) {
    dispatch(dtype, [&]<class T>(T*) {
      const T nan(std::nanf(""));
      for (const std::int64_t count : elements) {
        auto& bytes = memory.emplace_back(at(count) * sizeof(T));
        for (std::size_t i = 0; i < bytes.size(); i += sizeof(T)) std::memcpy(&bytes[i], &nan, sizeof(T));
      }
    });
  }
};

/// An engine's layout: a maker of pools, and what it fixes.
struct Layout {
  const char* name;
  Pool (*make)(const Sizes&);
  std::int64_t page_tokens = 16;
  bool is_latent = false;
  bool has_own_value_dim = false;
};

Pool vllm(const Sizes& s) {
  const std::int64_t half = s.num_pages * s.page_tokens * s.heads * s.d;
  Pool pool(s.dtype, {2 * half});
  pool.view = vllm_kv({.pool = pool.memory[0].data(),
                       .dtype = s.dtype,
                       .num_blocks = s.num_pages,
                       .block_size = s.page_tokens,
                       .num_kv_heads = s.heads,
                       .head_size = s.d});
  pool.k = [=](std::int64_t page, std::int64_t token, std::int64_t head) {
    return Pool::Place{0, ((page * s.page_tokens + token) * s.heads + head) * s.d};
  };
  pool.v = [=](std::int64_t page, std::int64_t token, std::int64_t head) {
    return Pool::Place{0, half + ((page * s.page_tokens + token) * s.heads + head) * s.d};
  };
  return pool;
}

FlashInferKvArgs flashinfer_args(const Sizes& s, Pool& pool) {
  return {.pool = pool.memory[0].data(),
          .dtype = s.dtype,
          .num_pages = s.num_pages,
          .page_size = s.page_tokens,
          .num_kv_heads = s.heads,
          .head_dim = s.d};
}

Pool flashinfer_nhd(const Sizes& s) {
  Pool pool(s.dtype, {s.num_pages * 2 * s.page_tokens * s.heads * s.d});
  pool.view = flashinfer_nhd_kv(flashinfer_args(s, pool));
  const auto row = [=](std::int64_t page, std::int64_t half, std::int64_t token, std::int64_t head) {
    return Pool::Place{0, (((page * 2 + half) * s.page_tokens + token) * s.heads + head) * s.d};
  };
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return row(p, 0, t, h); };
  pool.v = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return row(p, 1, t, h); };
  return pool;
}

Pool flashinfer_hnd(const Sizes& s) {
  Pool pool(s.dtype, {s.num_pages * 2 * s.heads * s.page_tokens * s.d});
  pool.view = flashinfer_hnd_kv(flashinfer_args(s, pool));
  const auto row = [=](std::int64_t page, std::int64_t half, std::int64_t token, std::int64_t head) {
    return Pool::Place{0, (((page * 2 + half) * s.heads + head) * s.page_tokens + token) * s.d};
  };
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return row(p, 0, t, h); };
  pool.v = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return row(p, 1, t, h); };
  return pool;
}

Pool flashinfer_mla(const Sizes& s) {
  const std::int64_t rope = s.d - s.dv;
  Pool pool(s.dtype, {s.num_pages * s.page_tokens * s.dv, s.num_pages * s.page_tokens * rope});
  pool.view = flashinfer_mla_kv({.ckv = pool.memory[0].data(),
                                 .kpe = pool.memory[1].data(),
                                 .dtype = s.dtype,
                                 .num_pages = s.num_pages,
                                 .page_size = s.page_tokens,
                                 .head_dim_ckv = s.dv,
                                 .head_dim_kpe = rope});
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t) {
    return Pool::Place{0, (p * s.page_tokens + t) * s.dv};
  };
  pool.rope = [=](std::int64_t p, std::int64_t t, std::int64_t) {
    return Pool::Place{1, (p * s.page_tokens + t) * rope};
  };
  return pool;
}

/// One row a token, [page][token][D]: vLLM's, SGLang's and FlashMLA's latents.
Pool latent_rows(const Sizes& s) {
  Pool pool(s.dtype, {s.num_pages * s.page_tokens * s.d});
  pool.view = KvView::of_pool(pool.memory[0].data(), KvFormat::latent(s.dtype, s.d, s.dv, s.page_tokens),
                              s.num_pages);
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t) {
    return Pool::Place{0, (p * s.page_tokens + t) * s.d};
  };
  pool.rope = [=](std::int64_t p, std::int64_t t, std::int64_t) {
    return Pool::Place{0, (p * s.page_tokens + t) * s.d + s.dv};
  };
  return pool;
}

Pool sglang(const Sizes& s) {
  const std::int64_t slots = s.num_pages * s.page_tokens;
  Pool pool(s.dtype, {slots * s.heads * s.d, slots * s.heads * s.dv});
  pool.view = sglang_kv({.k = pool.memory[0].data(),
                         .v = pool.memory[1].data(),
                         .dtype = s.dtype,
                         .num_slots = slots,
                         .page_size = s.page_tokens,
                         .num_kv_heads = s.heads,
                         .head_dim = s.d,
                         .v_head_dim = s.dv});
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t h) {
    return Pool::Place{0, ((p * s.page_tokens + t) * s.heads + h) * s.d};
  };
  pool.v = [=](std::int64_t p, std::int64_t t, std::int64_t h) {
    return Pool::Place{1, ((p * s.page_tokens + t) * s.heads + h) * s.dv};
  };
  return pool;
}

Pool tensorrt_llm(const Sizes& s) {
  constexpr std::int64_t kLayers = 3;
  constexpr std::int64_t kLayer = 1;
  Pool pool(s.dtype, {s.num_pages * kLayers * 2 * s.heads * s.page_tokens * s.d});
  pool.view = tensorrt_llm_kv({.pool = pool.memory[0].data(),
                               .dtype = s.dtype,
                               .num_blocks = s.num_pages,
                               .num_layers = kLayers,
                               .layer = kLayer,
                               .num_kv_heads = s.heads,
                               .tokens_per_block = s.page_tokens,
                               .size_per_head = s.d});
  const auto row = [=](std::int64_t page, std::int64_t half, std::int64_t token, std::int64_t head) {
    const std::int64_t part = (page * kLayers + kLayer) * 2 + half;
    return Pool::Place{0, ((part * s.heads + head) * s.page_tokens + token) * s.d};
  };
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return row(p, 0, t, h); };
  pool.v = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return row(p, 1, t, h); };
  return pool;
}

constexpr Layout kLayouts[] = {
    {.name = "vLLM", .make = vllm},
    {.name = "FlashInfer NHD", .make = flashinfer_nhd},
    {.name = "FlashInfer HND", .make = flashinfer_hnd},
    {.name = "FlashInfer NHD, page size 1", .make = flashinfer_nhd, .page_tokens = 1},
    {.name = "SGLang, page size 1", .make = sglang, .page_tokens = 1, .has_own_value_dim = true},
    {.name = "SGLang, page size 16", .make = sglang, .has_own_value_dim = true},
    {.name = "TensorRT-LLM", .make = tensorrt_llm, .page_tokens = 32},
    {.name = "FlashInfer MLA", .make = flashinfer_mla, .is_latent = true},
    {.name = "FlashInfer MLA, page size 1", .make = flashinfer_mla, .page_tokens = 1, .is_latent = true},
    {.name = "latent rows, page size 1", .make = latent_rows, .page_tokens = 1, .is_latent = true},
    {.name = "latent rows, page size 8", .make = latent_rows, .page_tokens = 8, .is_latent = true},
};

struct Sequence {
  std::int64_t length;
  std::int64_t queries;  // the last tokens
};

/// What a test asks of a layout.
struct Case {
  DType dtype = DType::f32;
  std::int64_t query_heads = 4;
  std::int64_t heads = 2;
  std::int64_t d = 64;
  std::int64_t dv = 64;
  std::int64_t kvp = 1;
  std::int64_t chunk = 1;
  bool is_csr = false;
  bool is_nearly_in_order = false;  // pages 0, 2, 1, 3, 4, 6, 5, 7, ...: four end where a run of them would
  std::vector<Sequence> sequences = {{70, 1}, {33, 4}, {1, 1}, {90, 20}};
};

/// A step over sequences whose tokens are stored in one layout, on one rank.
class World {
 public:
  World(const Layout& layout, const Case& c, std::int64_t rank)
      : layout_(layout),
        case_(c),
        split_(c.kvp, c.chunk),
        rank_(rank),
        heads_(layout.is_latent ? 1 : c.heads),
        dv_(layout.is_latent || layout.has_own_value_dim ? c.dv : c.d),
        slots_(c.sequences.size() == 4 ? std::vector<std::int32_t>{2, 0, 3, 1}
                                       : std::vector<std::int32_t>(c.sequences.size(), 0)),
        pool_(layout.make(sizes())) {
    for (const Sequence& s : c.sequences) {
      for (std::int64_t t = 0; t < s.queries; ++t) positions_.push_back(s.length - s.queries + t);
      offsets_.push_back(static_cast<std::int32_t>(positions_.size()));
    }
    std::mt19937 random(7);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    q_.resize(at(tokens() * c.query_heads * c.d));
    for (float& x : q_) x = uniform(random);
    assign_pages(random);
    for (std::int64_t head = 0; head < heads_; ++head) {
      const bool is_scaled = c.dtype == DType::fp8_e4m3;
      k_scale_.push_back(is_scaled ? 0.5f + 0.25f * static_cast<float>(head) : 1.0f);
      v_scale_.push_back(layout.is_latent ? k_scale_.back()
                                          : (is_scaled ? 1.5f - 0.25f * static_cast<float>(head) : 1.0f));
    }
    if (c.dtype == DType::fp8_e4m3) {
      pool_.view.k_scale = k_scale_.data();
      if (!layout.is_latent) pool_.view.v_scale = v_scale_.data();
    }
    for (std::size_t b = 0; b < num_sequences(); ++b) {
      auto& rows = rows_.emplace_back();
      for (std::int64_t token = 0; token < length(b); ++token)
        for (std::int64_t head = 0; head < heads_; ++head) {
          for (std::int64_t i = 0; i < c.d; ++i) rows.push_back(stored(b, token, head, false, i));
          for (std::int64_t i = 0; i < dv_; ++i) rows.push_back(stored(b, token, head, true, i));
        }
    }
  }

  std::int64_t tokens() const { return static_cast<std::int64_t>(positions_.size()); }
  const KvView& view() const { return pool_.view; }
  std::int64_t heads() const { return heads_; }
  std::int64_t dv() const { return dv_; }
  Batch batch() const { return {offsets_, offsets_.data(), positions_.data(), slots_.data()}; }
  std::size_t num_sequences() const { return case_.sequences.size(); }
  std::int64_t length(std::size_t b) const { return case_.sequences[b].length; }
  std::int32_t slot(std::size_t b) const { return slots_[b]; }
  const KvLayout& split() const { return split_; }

  /// The value that column `i` of a key (a latent row) or value row has before it is stored.
  float given(std::size_t b, std::int64_t token, std::int64_t head, bool is_value, std::int64_t i) const {
    if (layout_.is_latent) is_value = false;  // a prefix of the key
    const auto mixed =
        static_cast<std::uint32_t>(((at(token) * 5 + b) * 3 + at(head)) * 2 + at(is_value)) * 2654435761u +
        static_cast<std::uint32_t>(i) * 40503u * 65537u;
    return static_cast<float>((mixed ^ mixed >> 15) % 2001u) * 1e-3f - 1.0f;
  }

  /// That value as stored and read back: nearest(value / scale) * scale.
  double stored(std::size_t b, std::int64_t token, std::int64_t head, bool is_value, std::int64_t i) const {
    const float scale = is_value ? v_scale_[at(head)] : k_scale_[at(head)];
    return dispatch(case_.dtype, [&]<class T>(T*) {
      return static_cast<double>(static_cast<float>(T(given(b, token, head, is_value, i) / scale))) *
             static_cast<double>(scale);
    });
  }

  /// Calls visit(place of the element, value as the pool's type holds it) for each element of an owned token.
  template <class T, class Visit>
  void for_each_element(std::size_t b, std::int64_t token, Visit&& visit) const {
    const std::int64_t local = split_.local(token);
    const std::int64_t page = page_of(b, local);
    const std::int64_t in_page = local % layout_.page_tokens;
    const auto visit_row = [&](const auto& place, std::int64_t head, bool is_value, std::int64_t first,
                               std::int64_t columns) {
      Pool::Place row = place(page, in_page, head);
      const float scale = is_value ? v_scale_[at(head)] : k_scale_[at(head)];
      for (std::int64_t i = first; i < first + columns; ++i, ++row.element)
        visit(row, T(given(b, token, head, is_value, i) / scale));
    };
    for (std::int64_t head = 0; head < heads_; ++head) {
      visit_row(pool_.k, head, false, 0, layout_.is_latent ? dv_ : case_.d);
      if (layout_.is_latent) visit_row(pool_.rope, head, false, dv_, case_.d - dv_);
      if (!layout_.is_latent) visit_row(pool_.v, head, true, 0, dv_);
    }
  }

  /// Stores every owned token by the test's own arithmetic.
  void fill() {
    dispatch(case_.dtype, [&]<class T>(T*) {
      for (std::size_t b = 0; b < num_sequences(); ++b)
        for (std::int64_t token = 0; token < length(b); ++token)
          if (split_.owner(token) == rank_)
            for_each_element<T>(b, token, [&](Pool::Place place, T value) {
              std::memcpy(&pool_.memory[place.buffer][at(place.element) * sizeof(T)], &value, sizeof(T));
            });
    });
  }

  /// That the pool holds the owned ones of `held` tokens of each sequence, and NaN everywhere else.
  template <class Held>
  void check_pool(const Held& held) const {
    dispatch(case_.dtype, [&]<class T>(T*) {
      auto expected = layout_.make(sizes()).memory;  // all NaN
      for (std::size_t b = 0; b < num_sequences(); ++b)
        for (std::int64_t token = 0; token < length(b); ++token)
          if (split_.owner(token) == rank_ && held(b, token))
            for_each_element<T>(b, token, [&](Pool::Place place, T value) {
              std::memcpy(&expected[place.buffer][at(place.element) * sizeof(T)], &value, sizeof(T));
            });
      for (std::size_t i = 0; i < expected.size(); ++i) CHECK(expected[i] == pool_.memory[i]);
    });
  }

  void check_attention(int threads) const {
    const std::int64_t heads = case_.query_heads;
    std::vector<float> out(at(tokens() * heads * dv_), std::nanf(""));
    std::vector<float> lse(at(tokens() * heads), std::nanf(""));
    cpu::Backend<cpu::LocalComm> backend(threads);
    auto stream = backend.create_stream();
    std::vector<std::byte> workspace(
        backend.partial_attention_workspace_bytes(tokens(), heads, case_.d, dv_));
    partial_attention(
        backend,
        {.q = {q_.data(), {tokens(), heads, case_.d}},
         .batch = batch(),
         .kv = view(),
         .sink = {.out = {out.data(), {tokens(), heads, dv_}}, .lse = {lse.data(), {tokens(), heads}}},
         .scale = kScale,
         .workspace = workspace},
        stream);
    backend.synchronize(stream);
    for (std::size_t b = 0; b < num_sequences(); ++b)
      for (std::int64_t t = offsets_[b]; t < offsets_[b + 1]; ++t)
        for (std::int64_t head = 0; head < heads; ++head)
          check_query(b, t, head, &out[at((t * heads + head) * dv_)], lse[at(t * heads + head)]);
    SUCCEED();  // otherwise a FAIL
  }

 private:
  static constexpr float kScale = 0.3f;

  Sizes sizes() const {
    return {.dtype = case_.dtype,
            .heads = heads_,
            .d = case_.d,
            .dv = dv_,
            .page_tokens = layout_.page_tokens,
            .num_pages = needed_pages() + 2};
  }

  std::int64_t pages_of(const Sequence& s) const {
    return (split_.length(s.length, rank_) + layout_.page_tokens - 1) / layout_.page_tokens;
  }

  std::int64_t needed_pages() const {
    std::int64_t pages = 0;
    for (const Sequence& s : case_.sequences) pages += pages_of(s);
    return pages;
  }

  /// Random pages: rows of a table with room to spare, or a CSR list without.
  void assign_pages(std::mt19937& random) {
    std::vector<std::int32_t> free(at(needed_pages() + 2));
    std::iota(free.begin(), free.end(), 0);
    if (case_.is_nearly_in_order) {
      for (std::size_t i = 0; i + 4 <= free.size(); i += 4) std::swap(free[i + 1], free[i + 2]);
      std::reverse(free.begin(), free.end());
    } else {
      std::shuffle(free.begin(), free.end(), random);
    }
    std::vector<std::int64_t> pages(num_sequences(), 0);  // by slot
    for (std::size_t b = 0; b < num_sequences(); ++b) pages[at(slots_[b])] = pages_of(case_.sequences[b]);
    const std::int64_t row = *std::max_element(pages.begin(), pages.end()) + 1;
    begins_.push_back(0);
    for (const std::int64_t count : pages) {
      for (std::int64_t i = 0; i < (case_.is_csr ? count : row); ++i) {
        table_.push_back(i < count ? free.back() : kWildPage);
        if (i < count) free.pop_back();
      }
      begins_.push_back(static_cast<std::int32_t>(table_.size()));
    }
    table_.push_back(kWildPage);
    KvView& kv = pool_.view;
    kv.page_table = table_.data();
    if (case_.is_csr) {
      kv.page_begins = begins_.data();
    } else {
      kv.max_pages = row;
    }
    kv.layout = split_;
    kv.kvp_rank = rank_;
  }

  std::int64_t page_of(std::size_t b, std::int64_t local) const {
    return table_[at(begins_[at(slots_[b])] + local / layout_.page_tokens)];
  }

  void check_query(std::size_t b, std::int64_t t, std::int64_t head, const float* out, float lse) const {
    const std::int64_t kv_head = head / (case_.query_heads / heads_);
    const float* q = &q_[at((t * case_.query_heads + head) * case_.d)];
    std::vector<double> sums(at(dv_), 0.0);
    double total = 0.0;  // scores are small enough for exp without a shift
    for (std::int64_t token = 0; token <= positions_[at(t)]; ++token) {
      if (token / case_.chunk % case_.kvp != rank_) continue;
      const double* key = &rows_[b][at((token * heads_ + kv_head) * (case_.d + dv_))];
      const double* value = key + case_.d;
      double score = 0.0;
      for (std::int64_t i = 0; i < case_.d; ++i) score += static_cast<double>(q[i]) * key[i];
      const double weight = std::exp(score * static_cast<double>(kScale));
      total += weight;
      for (std::int64_t i = 0; i < dv_; ++i) sums[at(i)] += weight * value[i];
    }
    INFO("sequence " << b << " token " << t << " head " << head);
    if (total == 0.0) {
      REQUIRE(lse == -std::numeric_limits<float>::infinity());
      for (std::int64_t i = 0; i < dv_; ++i) REQUIRE(out[i] == 0.0f);
      return;
    }
    if (!(std::abs(lse - std::log(total)) <= 1e-5)) FAIL("lse is " << lse << ", not " << std::log(total));
    for (std::int64_t i = 0; i < dv_; ++i)
      if (!(std::abs(out[i] - sums[at(i)] / total) <= 1e-5))
        FAIL("out[" << i << "] is " << out[i] << ", not " << sums[at(i)] / total);
  }

  Layout layout_;
  Case case_;
  KvLayout split_;
  std::int64_t rank_;
  std::int64_t heads_;
  std::int64_t dv_;
  std::vector<std::int32_t> slots_;
  Pool pool_;
  std::vector<std::int32_t> offsets_{0};
  std::vector<std::int64_t> positions_;
  std::vector<float> q_;
  std::vector<float> k_scale_, v_scale_;
  std::vector<std::vector<double>> rows_;  // by sequence: [token, head, key then value], as read back
  std::vector<std::int32_t> table_, begins_;
};

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::fp8_e4m3};

/// The case as the layout can have it: a latent has columns of rope, others one width but where they say so.
Case for_layout(const Layout& layout, Case c) {
  if (layout.is_latent) c.dv = c.d - 32;
  return c;
}

TEST_CASE("partial attention reads the KV layout of every engine") {
  for (const Layout& layout : kLayouts) {
    for (const DType dtype : kTypes) {
      for (const std::int64_t query_heads : {2, 4, 16, 40}) {  // every kernel
        for (const std::int64_t d : {64, 96}) {
          CAPTURE(layout.name, to_string(dtype), query_heads, d);
          const Case c = for_layout(layout, {.dtype = dtype, .query_heads = query_heads, .d = d, .dv = 64});
          World world(layout, c, 0);
          world.fill();
          world.check_attention(2);
        }
      }
    }
  }
}

TEST_CASE("partial attention reads head sizes that are no multiple of a vector in every layout") {
  for (const Layout& layout : kLayouts) {
    for (const DType dtype : kTypes) {
      CAPTURE(layout.name, to_string(dtype));
      World world(layout, for_layout(layout, {.dtype = dtype, .d = 41, .dv = 23}), 0);
      world.fill();
      world.check_attention(1);
    }
  }
}

TEST_CASE("partial attention reads page lists in CSR form in every layout") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(layout.name);
    World world(layout, for_layout(layout, {.dtype = DType::bf16, .is_csr = true}), 0);
    world.fill();
    world.check_attention(2);
  }
}

TEST_CASE("partial attention reads shards interleaved as decode context parallelism leaves them") {
  for (const Layout& layout : kLayouts) {
    for (const std::int64_t interleave : {1, 4, 16}) {
      for (std::int64_t rank = 0; rank < 3; ++rank) {
        CAPTURE(layout.name, interleave, rank);
        World world(layout, for_layout(layout, {.kvp = 3, .chunk = interleave, .is_csr = rank == 1}), rank);
        world.fill();
        world.check_attention(2);
      }
    }
  }
}

TEST_CASE("partial attention follows the page table where small pages only nearly lie in order") {
  for (const Layout& layout : kLayouts) {
    for (const std::int64_t query_heads : {4, 32}) {
      CAPTURE(layout.name, query_heads);
      Case c = for_layout(layout, {.dtype = DType::bf16, .query_heads = query_heads});
      c.is_nearly_in_order = true;
      c.sequences = {{170, 2}};
      World world(layout, c, 0);
      world.fill();
      world.check_attention(1);
    }
  }
}

TEST_CASE("partial attention splits long sequences in every layout") {
  for (const Layout& layout : kLayouts) {
    for (const std::int64_t query_heads : {2, 24}) {
      CAPTURE(layout.name, query_heads);
      const Case c = for_layout(layout, {.dtype = DType::bf16,
                                         .query_heads = query_heads,
                                         .heads = 1,
                                         .d = 64,
                                         .dv = 32,
                                         .sequences = {{2300, 2}}});
      World world(layout, c, 0);
      world.fill();
      world.check_attention(2);
    }
  }
}

/// K and V of `rows` (sequence, token) as append_kv and write_kv take them.
struct Rows {
  std::vector<float> k, v;
  Rows(const World& world, std::int64_t d, const std::vector<std::pair<std::size_t, std::int64_t>>& rows) {
    for (const auto& [b, token] : rows)
      for (std::int64_t head = 0; head < world.heads(); ++head) {
        for (std::int64_t i = 0; i < d; ++i) k.push_back(world.given(b, token, head, false, i));
        for (std::int64_t i = 0; i < world.dv(); ++i) v.push_back(world.given(b, token, head, true, i));
      }
  }
};

TEST_CASE("append_kv stores the step's own tokens in every layout and touches nothing else") {
  for (const Layout& layout : kLayouts) {
    for (const DType dtype : kTypes) {
      for (const std::int64_t rank : {0, 1}) {
        CAPTURE(layout.name, to_string(dtype), rank);
        const Case c = for_layout(
            layout, {.dtype = dtype, .d = 48, .dv = 24, .kvp = 2, .chunk = 3, .is_csr = rank == 1});
        const World world(layout, c, rank);
        std::vector<std::pair<std::size_t, std::int64_t>> appended;
        for (std::size_t b = 0; b < c.sequences.size(); ++b)
          for (std::int64_t i = c.sequences[b].queries; i > 0; --i)
            appended.emplace_back(b, c.sequences[b].length - i);
        const Rows rows(world, c.d, appended);
        const cpu::Operators operators(2);
        const auto stream = operators.create_stream();
        AppendKvArgs<float> args;
        args.k = TensorView<const float, 3>(rows.k.data(), {world.tokens(), world.heads(), c.d});
        if (!layout.is_latent)
          args.v = TensorView<const float, 3>(rows.v.data(), {world.tokens(), world.heads(), world.dv()});
        args.batch = world.batch();
        args.kv = world.view();
        operators.append_kv(args, stream);
        operators.synchronize(stream);
        world.check_pool([&](std::size_t b, std::int64_t token) {
          return token >= c.sequences[b].length - c.sequences[b].queries;
        });
      }
    }
  }
}

TEST_CASE("write_kv stores a span of a sequence in every layout, and read_kv brings it back") {
  for (const Layout& layout : kLayouts) {
    for (const DType dtype : kTypes) {
      for (const std::int64_t rank : {0, 1}) {
        CAPTURE(layout.name, to_string(dtype), rank);
        const Case c = for_layout(
            layout, {.dtype = dtype, .d = 48, .dv = 24, .kvp = 2, .chunk = 3, .is_csr = rank == 1});
        const World world(layout, c, rank);
        constexpr std::size_t kSequence = 1;
        constexpr std::int64_t kBegin = 5;
        const std::int64_t end = world.length(kSequence) - 1;
        std::vector<std::pair<std::size_t, std::int64_t>> written;
        for (std::int64_t token = kBegin; token < end; ++token) written.emplace_back(kSequence, token);
        const Rows rows(world, c.d, written);
        const cpu::Operators operators(2);
        const auto stream = operators.create_stream();
        WriteKvArgs<float> write;
        write.k = TensorView<const float, 3>(rows.k.data(), {end - kBegin, world.heads(), c.d});
        if (!layout.is_latent)
          write.v = TensorView<const float, 3>(rows.v.data(), {end - kBegin, world.heads(), world.dv()});
        write.first_position = kBegin;
        write.sequence_slot = world.slot(kSequence);
        write.kv = world.view();
        operators.write_kv(write, stream);
        operators.synchronize(stream);
        world.check_pool([&](std::size_t b, std::int64_t token) {
          return b == kSequence && token >= kBegin && token < end;
        });

        const TokenRange local = world.split().local_range({kBegin, end}, rank);
        std::vector<float> k(at(local.size() * world.heads() * c.d), std::nanf(""));
        std::vector<float> v(at(local.size() * world.heads() * world.dv()), std::nanf(""));
        ReadKvArgs read;
        read.kv = world.view();
        read.sequence_slot = world.slot(kSequence);
        read.first_local = local.begin;
        read.k = {k.data(), {local.size(), world.heads(), c.d}};
        if (!layout.is_latent) read.v = {v.data(), {local.size(), world.heads(), world.dv()}};
        operators.read_kv(read, stream);
        operators.synchronize(stream);
        bool is_equal = true;
        for (std::int64_t l = local.begin; l < local.end; ++l) {
          const std::int64_t token = world.split().global(rank, l);
          for (std::int64_t head = 0; head < world.heads(); ++head) {
            const std::int64_t row = (l - local.begin) * world.heads() + head;
            for (std::int64_t i = 0; i < c.d; ++i)
              is_equal &=
                  static_cast<double>(k[at(row * c.d + i)]) == world.stored(kSequence, token, head, false, i);
            for (std::int64_t i = 0; i < (layout.is_latent ? 0 : world.dv()); ++i)
              is_equal &= static_cast<double>(v[at(row * world.dv() + i)]) ==
                          world.stored(kSequence, token, head, true, i);
          }
        }
        CHECK(is_equal);
      }
    }
  }
}

TEST_CASE("Helix's own pools read the same through strides of another engine, bit for bit") {
  const Case c{.dtype = DType::bf16, .query_heads = 16};
  World world(kLayouts[2], c, 0);  // HND
  world.fill();
  const KvView& view = world.view();
  const KvView own = KvView::of_pool(
      view.k, KvFormat::head_major(DType::bf16, c.heads, c.d, c.d, view.format.page_tokens), view.num_pages);
  CHECK(own.v == view.v);
  CHECK(own.format.k == view.format.k);
  CHECK(own.format.v == view.format.v);
}

/// A view that can be read, and everything around it.
struct Readable {
  std::vector<float> pool = std::vector<float>(2 * 4 * 2 * 2 * 8, 0.5f);
  std::vector<float> rope = std::vector<float>(4 * 2 * 8, 0.5f);
  std::int32_t pages[4] = {0, 1, 2, 3};
  std::int32_t begins[2] = {0, 1};
  float scales[2] = {1.0f, 1.0f};
  KvView kv;
  explicit Readable(bool is_latent) {
    kv = is_latent ? flashinfer_mla_kv({.ckv = pool.data(),
                                        .kpe = rope.data(),
                                        .dtype = DType::f32,
                                        .num_pages = 4,
                                        .page_size = 2,
                                        .head_dim_ckv = 8,
                                        .head_dim_kpe = 8})
                   : vllm_kv({.pool = pool.data(),
                              .dtype = DType::f32,
                              .num_blocks = 4,
                              .block_size = 2,
                              .num_kv_heads = 2,
                              .head_size = 8});
    kv.page_table = pages;
    kv.max_pages = 4;
  }

  /// What partial_attention() says of it, "" if nothing.
  std::string attend() const {
    const std::int32_t offsets[] = {0, 1};
    const std::int64_t position = 1;
    const std::int32_t slot = 0;
    const std::int64_t d = kv.format.is_latent ? 16 : 8;
    std::vector<float> q(at(2 * d), 1.0f), out(16), lse(2);
    cpu::Backend<cpu::LocalComm> backend;
    auto stream = backend.create_stream();
    std::vector<std::byte> workspace(backend.partial_attention_workspace_bytes(1, 2, d, 8));
    try {
      partial_attention(backend,
                        {.q = {q.data(), {1, 2, d}},
                         .batch = {offsets, offsets, &position, &slot},
                         .kv = kv,
                         .sink = {.out = {out.data(), {1, 2, 8}}, .lse = {lse.data(), {1, 2}}},
                         .scale = 1.0f,
                         .workspace = workspace},
                        stream);
      backend.synchronize(stream);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::invalid_argument);
      return error.what();
    }
    return "";
  }
};

TEST_CASE("a field of a KV view that was forgotten or cannot be is an Error that names it") {
  struct Mistake {
    const char* names;
    bool is_latent;
    void (*make)(Readable&);
  };
  const Mistake mistakes[] = {
      {"page_tokens is 0", false, [](Readable& r) { r.kv.format.page_tokens = 0; }},
      {"num_heads is 0", false, [](Readable& r) { r.kv.format.num_heads = 0; }},
      {"head_dim is 0", false, [](Readable& r) { r.kv.format.head_dim = 0; }},
      {"value_dim is 0", false, [](Readable& r) { r.kv.format.value_dim = 0; }},
      {"value_dim is 17", true, [](Readable& r) { r.kv.format.value_dim = 17; }},
      {"num_pages is 0", false, [](Readable& r) { r.kv.num_pages = 0; }},
      {"max_pages is 0", false, [](Readable& r) { r.kv.max_pages = 0; }},
      {"page_table is null", false, [](Readable& r) { r.kv.page_table = nullptr; }},
      {"'s k is null", false, [](Readable& r) { r.kv.k = nullptr; }},
      {"'s v is null", false, [](Readable& r) { r.kv.v = nullptr; }},
      {"rope is null", true, [](Readable& r) { r.kv.rope = nullptr; }},
      {"k.token stride is 7", false, [](Readable& r) { r.kv.format.k.token = 7; }},
      {"k.head stride is 0", false, [](Readable& r) { r.kv.format.k.head = 0; }},
      {"k.page stride is 0", false, [](Readable& r) { r.kv.format.k.page = 0; }},
      {"v.token stride is 0", false, [](Readable& r) { r.kv.format.v = {}; }},
      {"rope.token stride is 4", true, [](Readable& r) { r.kv.format.rope.token = 4; }},
      {"latent with 2 heads", true,
       [](Readable& r) {
         r.kv.format.num_heads = 2;
         r.kv.format.k.head = r.kv.format.rope.head = 64;
       }},
      {"kvp_rank is 1", false, [](Readable& r) { r.kv.kvp_rank = 1; }},
      {"kvp_rank is -1", false, [](Readable& r) { r.kv.kvp_rank = -1; }},
      {"has scales", false, [](Readable& r) { r.kv.k_scale = r.scales; }},
      {"dtype is bf16", false,
       [](Readable& r) {
         r.kv.format.dtype = DType::bf16;
         r.kv.v_scale = r.scales;
       }},
      {"names no type", false, [](Readable& r) { r.kv.format.dtype = static_cast<DType>(77); }},
  };
  for (const bool is_latent : {false, true}) CHECK(Readable(is_latent).attend() == "");
  Readable csr(false);
  csr.kv.max_pages = 0;
  csr.kv.page_begins = csr.begins;
  CHECK(csr.attend() == "");
  for (const Mistake& mistake : mistakes) {
    Readable readable(mistake.is_latent);
    mistake.make(readable);
    const std::string text = readable.attend();
    CAPTURE(mistake.names, text);
    CHECK(text.find(mistake.names) != std::string::npos);
  }
}

TEST_CASE("makers of views pass on what was forgotten, for the operation to name") {
  Readable readable(false);
  const auto what = [&](KvView kv) {
    kv.page_table = readable.pages;
    kv.max_pages = 4;
    readable.kv = kv;
    return readable.attend();
  };
  CHECK(what(vllm_kv({})).find("num_heads is 0") != std::string::npos);
  CHECK(what(flashinfer_nhd_kv({.num_kv_heads = 2})).find("head_dim is 0") != std::string::npos);
  CHECK(what(flashinfer_hnd_kv({.num_kv_heads = 2, .head_dim = 8})).find("page_tokens is 0") !=
        std::string::npos);
  CHECK(what(sglang_kv({.page_size = 0, .num_kv_heads = 2, .head_dim = 8, .v_head_dim = 8}))
            .find("page_tokens is 0") != std::string::npos);
  CHECK(what(sglang_kv({.num_slots = 8, .num_kv_heads = 2, .head_dim = 8, .v_head_dim = 8}))
            .find("k is null") != std::string::npos);
  CHECK(what(flashinfer_mla_kv({.num_pages = 1, .page_size = 2, .head_dim_ckv = 8, .head_dim_kpe = 8}))
            .find("k is null") != std::string::npos);
  CHECK_THROWS_AS(tensorrt_llm_kv({.num_layers = 2, .layer = 2}), Error);
}

}  // namespace
}  // namespace helix::test
