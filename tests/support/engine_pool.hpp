// SPDX-License-Identifier: Apache-2.0
// A KV pool under test: memory full of NaN, its view, and an independent formula for the place of each row.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

#include <helix/dtype.hpp>
#include <helix/kv_format.hpp>

namespace helix::test {

inline std::size_t at(std::int64_t i) {
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

/// Memory in an engine's layout, its view, and the place of a row: an element of memory[buffer].
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

/// An engine's layout: a function that creates pools, and the sizes that the layout fixes.
struct Layout {
  const char* name;
  Pool (*make)(const Sizes&);
  std::int64_t page_tokens = 16;
  bool is_latent = false;
  bool has_own_value_dim = false;
};

/// An index and the extent of its axis.
using Index = std::pair<std::int64_t, std::int64_t>;

/// Place of a row of `columns` elements in a dense tensor; indices are given from the outermost axis on.
inline std::int64_t row_of(std::int64_t columns, std::initializer_list<Index> indices) {
  std::int64_t row = 0;
  for (const auto& [i, extent] : indices) row = row * extent + i;
  return row * columns;
}

/// Derives a pool's k and v from one function: row(half, page, token, head) in the first buffer.
template <class Row>
void set_rows(Pool& pool, const Row& row) {
  pool.k = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return Pool::Place{0, row(0, p, t, h)}; };
  pool.v = [=](std::int64_t p, std::int64_t t, std::int64_t h) { return Pool::Place{0, row(1, p, t, h)}; };
}

inline std::int64_t pool_elements(const Sizes& s) {
  return s.num_pages * 2 * s.page_tokens * s.heads * s.d;
}

}  // namespace helix::test
