// SPDX-License-Identifier: Apache-2.0
// KvRows: finds a token's K and V rows in the pages, and converts them from and to values.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/backend.hpp>
#include <helix/dtype.hpp>
#include <helix/error.hpp>
#include <helix/kv_layout.hpp>
#include <helix/mixed_row.hpp>

namespace helix::cpu {

/// Scale of `head`; `scales` may be null.
inline float scale_of(const float* scales, std::int64_t head) {
  return scales == nullptr ? 1.0f : scales[head];
}

/// stored = nearest(value / scale). Divides instead of multiplying by the inverse, so that reading a row and
/// storing it again gives the same bits.
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

inline bool is_page(const KvView& kv, std::int64_t page) {
  return page >= 0 && page < kv.num_pages;
}

/// The page of local position `local` of the sequence in `slot`. @throws Error(invalid_argument) if the page
/// table has no entry for it, or the page is not in the pool, as when ShardedKVCache has made no room for the
/// token.
inline std::int64_t page_of(const KvView& kv, std::int32_t slot, std::int64_t local) {
  HELIX_EXPECTS(slot >= 0, ErrorCode::invalid_argument, "local token ", local, " is of the sequence in slot ",
                slot, "; slots count from 0: take ShardedKVCache::slot()");
  HELIX_EXPECTS(kv.num_slots == 0 || slot < kv.num_slots, ErrorCode::invalid_argument, "local token ", local,
                " is of the sequence in slot ", slot, " of ", kv.num_slots, "; take ShardedKVCache::slot()");
  const std::int64_t index = local / kv.format.page_tokens;
  const std::int64_t first = kv.first_page_of(slot);
  const std::int64_t most =
      kv.page_begins != nullptr ? kv.page_begins[std::int64_t{slot} + 1] - first : kv.max_pages;
  HELIX_EXPECTS(first >= 0, ErrorCode::invalid_argument, "the pages of the sequence in slot ", slot,
                " begin at place ", first, " of the page table; page_begins counts from 0");
  HELIX_EXPECTS(local >= 0 && index < most, ErrorCode::invalid_argument, "local token ", local,
                " of the sequence in slot ", slot, " is in page ", index,
                " of the sequence, whose row of the page table has ", most,
                "; append() to the sequence before its tokens are stored or read");
  const std::int64_t page = kv.page_table[first + index];
  HELIX_EXPECTS(is_page(kv, page), ErrorCode::invalid_argument, "local token ", local,
                " of the sequence in slot ", slot, " has page ", page, " of the KV pool's ", kv.num_pages,
                "; append() to the sequence before its tokens are stored or read");
  return page;
}

/// Checks that page_of() finds a page for each local position of `range`, which is not empty. @throws what
/// page_of() throws.
inline void check_pages(const KvView& kv, std::int32_t slot, const TokenRange& range) {
  const std::int64_t page_tokens = kv.format.page_tokens;
  (void)page_of(kv, slot, range.end - 1);  // checks the page table's length
  const std::int32_t* const row = kv.page_table + kv.first_page_of(slot);
  for (std::int64_t i = range.begin / page_tokens; i <= (range.end - 1) / page_tokens; ++i)
    if (!is_page(kv, row[i])) (void)page_of(kv, slot, i * page_tokens);
}

/// Row addresses in the pools of a KvView with dtype kDTypeOf<T>.
template <class T>
class KvRows {
 public:
  explicit KvRows(const KvView& kv) : kv_(kv) {}

  /// Stores row `from` of k and v (latent: of k alone) as the rows of one token and head.
  void store(std::int32_t slot, std::int64_t local, std::int64_t head,
             const TensorView<const float, 3>& from_k, const TensorView<const float, 3>& from_v,
             std::int64_t from) const {
    const KvFormat& format = kv_.format;
    const float k_scale = scale_of(kv_.k_scale, head);
    const float* row = &from_k(from, head, 0);
    store_row(row, k(slot, local, head), format.k_columns(), k_scale);
    if (format.is_latent) {
      store_row(row + format.value_dim, rope(slot, local), format.rope_columns(), k_scale);
    } else {
      store_row(&from_v(from, head, 0), v(slot, local, head), format.value_dim, scale_of(kv_.v_scale, head));
    }
  }

  /// Loads the rows into row `to` of k and v, as values.
  void load(std::int32_t slot, std::int64_t local, std::int64_t head, const TensorView<float, 3>& to_k,
            const TensorView<float, 3>& to_v, std::int64_t to) const {
    const KvFormat& format = kv_.format;
    const float k_scale = scale_of(kv_.k_scale, head);
    float* row = &to_k(to, head, 0);
    load_row(k(slot, local, head), row, format.k_columns(), k_scale);
    if (format.is_latent) {
      load_row(rope(slot, local), row + format.value_dim, format.rope_columns(), k_scale);
    } else {
      load_row(v(slot, local, head), &to_v(to, head, 0), format.value_dim, scale_of(kv_.v_scale, head));
    }
  }

 private:
  /// The key row of `head` for local position `local` of the sequence in `slot` (latent: its first value_dim
  /// columns). The next page_tokens - local % page_tokens tokens follow with stride format.k.token.
  T* k(std::int32_t slot, std::int64_t local, std::int64_t head) const {
    return row(kv_.k, kv_.format.k, slot, local, head);
  }
  /// The value row, with stride format.v.token; not for latent formats.
  T* v(std::int32_t slot, std::int64_t local, std::int64_t head) const {
    return row(kv_.v, kv_.format.v, slot, local, head);
  }
  /// The rope columns of a latent key row, with stride format.rope.token.
  T* rope(std::int32_t slot, std::int64_t local) const {
    return row(kv_.rope, kv_.format.rope, slot, local, 0);
  }

  T* row(void* pool, const KvStrides& strides, std::int32_t slot, std::int64_t local,
         std::int64_t head) const {
    return static_cast<T*>(pool) +
           strides.at(page_of(kv_, slot, local), head, local % kv_.format.page_tokens);
  }

  KvView kv_;
};

/// As KvRows, for rows of DType::fp8_ds_mla.
class MixedKvRows {
 public:
  explicit MixedKvRows(const KvView& kv) : kv_(kv) {}

  void store(std::int32_t slot, std::int64_t local, std::int64_t, const TensorView<const float, 3>& from_k,
             const TensorView<const float, 3>&, std::int64_t from) const {
    const KvFormat& format = kv_.format;
    store_mixed_row(&from_k(from, 0, 0), format.head_dim, format.value_dim, at(kv_.k, format.k, slot, local),
                    at(kv_.rope, format.rope, slot, local));
  }

  void load(std::int32_t slot, std::int64_t local, std::int64_t, const TensorView<float, 3>& to_k,
            const TensorView<float, 3>&, std::int64_t to) const {
    const KvFormat& format = kv_.format;
    load_mixed_row(at(kv_.k, format.k, slot, local), at(kv_.rope, format.rope, slot, local), format.head_dim,
                   format.value_dim, &to_k(to, 0, 0));
  }

 private:
  std::byte* at(void* pool, const KvStrides& strides, std::int32_t slot, std::int64_t local) const {
    return static_cast<std::byte*>(pool) +
           strides.at(page_of(kv_, slot, local), 0, local % kv_.format.page_tokens);
  }

  KvView kv_;
};

/// Calls use(rows) with the KvRows or MixedKvRows of `kv`.
template <class Use>
void with_kv_rows(const KvView& kv, const Use& use) {
  if (kv.format.is_mixed()) return use(MixedKvRows(kv));
  dispatch(kv.format.dtype, [&]<class T>(T*) { use(KvRows<T>(kv)); });
}

}  // namespace helix::cpu
