// SPDX-License-Identifier: Apache-2.0
// Computes the values of synthetic KV for runs of rows.
#pragma once

#include <cstdint>

#include <helix/dtype.hpp>
#include <helix/synthetic_kv.hpp>

namespace helix::decode {

/// Columns [first_column, + num_columns) of the K (or V) rows of consecutive positions.
struct SyntheticRows {
  std::int64_t layer = 0;  ///< Index in the whole model, as are head and first_position.
  std::int64_t head = 0;
  std::int64_t first_position = 0;
  std::int64_t num_rows = 0;
  bool is_value = false;
  std::int64_t first_column = 0;
  std::int64_t num_columns = 0;
  float scale = 1.0f;  ///< Values are stored as value / scale.
};

/// Writes `rows` as elements of type `dtype`, with rows `stride` elements apart. Each value is rounded as if
/// synthetic_element() were converted to the type.
void fill_synthetic_rows(const SyntheticRows& rows, DType dtype, void* out, std::int64_t stride);

}  // namespace helix::decode
