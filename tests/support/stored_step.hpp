// SPDX-License-Identifier: Apache-2.0
// A step over sequences whose tokens are stored in an engine's pool, with all elements known.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include <helix/backend/batch.hpp>
#include <helix/kv_layout.hpp>

#include "support/catch.hpp"
#include "support/engine_pools.hpp"

namespace helix::test {

/// A page id that no pool has, for entries that must not be read.
inline constexpr std::int32_t kUnusedPage = 0x7ffffff0;

struct Sequence {
  std::int64_t length;
  std::int64_t queries;  // query tokens, which are the last ones
};

/// What a test requires of a layout.
struct Case {
  DType dtype = DType::f32;
  std::int64_t query_heads = 4;
  std::int64_t heads = 2;
  std::int64_t d = 64;
  std::int64_t dv = 64;
  std::int64_t kvp = 1;
  std::int64_t chunk = 1;
  bool is_csr = false;
  // Pages 0, 2, 1, 3, 4, 6, 5, 7, ...: each group of four ends where a consecutive run would end.
  bool is_nearly_in_order = false;
  std::vector<Sequence> sequences = {{70, 1}, {33, 4}, {1, 1}, {90, 20}};
};

/// A step over sequences whose tokens are stored in one layout, on one rank.
class StoredStep {
 public:
  StoredStep(const Layout& layout, const Case& c, std::int64_t rank)
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
  const Case& asked() const { return case_; }
  std::int64_t rank() const { return rank_; }
  std::int64_t position(std::int64_t t) const { return positions_[at(t)]; }
  const float* query(std::int64_t t, std::int64_t head) const {
    return &q_[at((t * case_.query_heads + head) * case_.d)];
  }
  /// The key of a token as read back, followed by its value.
  const double* key(std::size_t b, std::int64_t token, std::int64_t head) const {
    return &rows_[b][at((token * heads_ + head) * (case_.d + dv_))];
  }

  /// The value of column `i` of a key (or latent row) or value row before it is stored.
  float given(std::size_t b, std::int64_t token, std::int64_t head, bool is_value, std::int64_t i) const {
    if (layout_.is_latent) is_value = false;  // a value is a prefix of the key
    const auto mixed =
        static_cast<std::uint32_t>(((at(token) * 5 + b) * 3 + at(head)) * 2 + at(is_value)) * 2654435761u +
        static_cast<std::uint32_t>(i) * 40503u * 65537u;
    return static_cast<float>((mixed ^ mixed >> 15) % 2001u) * 1e-3f - 1.0f;
  }

  /// The same value after storing and reading back: nearest(value / scale) * scale.
  double stored(std::size_t b, std::int64_t token, std::int64_t head, bool is_value, std::int64_t i) const {
    const float scale = is_value ? v_scale_[at(head)] : k_scale_[at(head)];
    return dispatch(case_.dtype, [&]<class T>(T*) {
      return static_cast<double>(static_cast<float>(T(given(b, token, head, is_value, i) / scale))) *
             static_cast<double>(scale);
    });
  }

  /// Calls visit(place, value) for each element of an owned token; the value is as the pool's type holds it.
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

  /// Stores every owned token with the test's own arithmetic.
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

  /// Checks that the pool holds the owned tokens among the `held` tokens of each sequence, and NaN everywhere
  /// else.
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

 private:
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

  /// Assigns random pages: rows of a table with spare entries, or a CSR list without.
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
        table_.push_back(i < count ? free.back() : kUnusedPage);
        if (i < count) free.pop_back();
      }
      begins_.push_back(static_cast<std::int32_t>(table_.size()));
    }
    table_.push_back(kUnusedPage);
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

}  // namespace helix::test
