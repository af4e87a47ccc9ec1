// SPDX-License-Identifier: Apache-2.0
// The values of synthetic KV, one by one and in runs of rows.
#pragma once

#include <cstdint>

#include <helix/dtype.hpp>

namespace helix::decode {

constexpr std::uint64_t synthetic_mix(std::uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

/// Key of the K (or V) row of the model's `head` at global `position` in the model's `layer`: a function of
/// these alone.
constexpr std::uint32_t synthetic_row_key(std::int64_t layer, std::int64_t head, std::int64_t position,
                                          bool is_value) {
  const std::uint64_t where = synthetic_mix(static_cast<std::uint64_t>(layer) << 1 | (is_value ? 1u : 0u)) ^
                              static_cast<std::uint64_t>(head) * 0x9e3779b97f4a7c15ull;
  return static_cast<std::uint32_t>(synthetic_mix(where + static_cast<std::uint64_t>(position)) >> 32);
}

/// Pseudo-random value in [-1, 1) of one element of the row.
constexpr float synthetic_element(std::uint32_t row_key, std::uint32_t element) {
  std::uint32_t x = row_key ^ element * 0x9e3779b9u;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return static_cast<float>(static_cast<std::int32_t>(x)) * 0x1p-31f;
}

/// Columns [first_column, + num_columns) of the K (or V) rows of consecutive positions.
struct SyntheticRows {
  std::int64_t layer = 0;  ///< Of the model, like head and first_position.
  std::int64_t head = 0;
  std::int64_t first_position = 0;
  std::int64_t num_rows = 0;
  bool is_value = false;
  std::int64_t first_column = 0;
  std::int64_t num_columns = 0;
  float scale = 1.0f;  ///< Values are stored as value / scale.
};

/// Writes `rows` as elements of type `dtype`, rows `stride` elements apart, rounded as converting each
/// synthetic_element() does.
void fill_synthetic_rows(const SyntheticRows& rows, DType dtype, void* out, std::int64_t stride);

}  // namespace helix::decode
