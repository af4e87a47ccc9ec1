// SPDX-License-Identifier: Apache-2.0
// KvRows: where a token's K and V rows lie in the pages, and their conversion from and to values.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/backend.hpp>
#include <helix/dtype.hpp>

namespace helix::cpu {

/// Addresses inside the pages of a KvView whose dtype is kDTypeOf<T>. MLA pages hold one row a token and no V
/// rows.
template <class T>
class KvRows {
 public:
  explicit KvRows(const KvView& kv)
      : pages_(static_cast<T*>(kv.pages)),
        page_table_(kv.page_table),
        max_pages_(kv.max_pages),
        page_elements_(kv.page_elements()),
        page_tokens_(kv.page_tokens),
        num_heads_(kv.num_heads),
        head_dim_(kv.head_dim) {}

  /// Row of `head` for local position `local` of the sequence in `slot`; the next page_tokens - local %
  /// page_tokens tokens follow, head_dim apart.
  T* k(std::int32_t slot, std::int64_t local, std::int64_t head) const { return row(slot, local, head); }
  T* v(std::int32_t slot, std::int64_t local, std::int64_t head) const {
    return row(slot, local, num_heads_ + head);
  }

 private:
  T* row(std::int32_t slot, std::int64_t local, std::int64_t plane) const {
    const std::int64_t page = page_table_[slot * max_pages_ + local / page_tokens_];
    return pages_ + page * page_elements_ + (plane * page_tokens_ + local % page_tokens_) * head_dim_;
  }

  T* pages_;
  const std::int32_t* page_table_;
  std::int64_t max_pages_;
  std::int64_t page_elements_;
  std::int64_t page_tokens_;
  std::int64_t num_heads_;
  std::int64_t head_dim_;
};

/// Scale of `head`; `scales` may be null.
inline float scale_of(const float* scales, std::int64_t head) {
  return scales == nullptr ? 1.0f : scales[head];
}

/// stored = nearest(value / scale). Division, not a product with the inverse: reading a row and storing it
/// again then gives the same bits.
template <class T>
void store_row(const float* values, T* stored, std::int64_t count, float scale) {
  if (scale == 1.0f) {
    for (std::int64_t i = 0; i < count; ++i) stored[i] = T(values[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i) stored[i] = T(values[i] / scale);
  }
}

/// value = stored * scale.
template <class T>
void load_row(const T* stored, float* values, std::int64_t count, float scale) {
  for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(stored[i]) * scale;
}

}  // namespace helix::cpu
