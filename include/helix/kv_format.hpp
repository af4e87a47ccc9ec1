// SPDX-License-Identifier: Apache-2.0
// KvFormat and KvView: where the rows of a paged KV cache lie, Helix's own or another engine's, and sizes
// that follow from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <helix/dtype.hpp>
#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/kv_layout.hpp>

namespace helix {

/// Where the rows of one kind lie: token `t` of head `h` in page `p` begins p * page + h * head + t * token
/// elements after the first row of the pool.
struct KvStrides {
  std::int64_t page = 0;
  std::int64_t head = 0;
  std::int64_t token = 0;

  /// Elements from the start of the pool to token `t` of head `h` in page `p`.
  HELIX_HOST_DEVICE constexpr std::int64_t at(std::int64_t p, std::int64_t h, std::int64_t t) const {
    return p * page + h * head + t * token;
  }
  friend constexpr bool operator==(const KvStrides&, const KvStrides&) = default;
};

/// Latent columns that share one scale in a row of DType::fp8_ds_mla.
inline constexpr std::int64_t kScaledColumns = 128;

/// Elements of dtype that the latent columns of one token take. For DType::fp8_ds_mla these are bytes:
/// `value_dim` e4m3 columns, then one f32 scale for each kScaledColumns of them (stored * scale = value).
HELIX_HOST_DEVICE constexpr std::int64_t latent_extent(DType dtype, std::int64_t value_dim) {
  constexpr auto kScaleBytes = static_cast<std::int64_t>(sizeof(float));
  return dtype == DType::fp8_ds_mla ? value_dim + ceil_div(value_dim, kScaledColumns) * kScaleBytes
                                    : value_dim;
}
/// Elements of dtype that `columns` rope columns of one token take. For DType::fp8_ds_mla these are bytes, of
/// bf16 columns.
HELIX_HOST_DEVICE constexpr std::int64_t rope_extent(DType dtype, std::int64_t columns) {
  return dtype == DType::fp8_ds_mla ? columns * static_cast<std::int64_t>(sizeof(bf16)) : columns;
}
/// Bytes of one token's latent row. With DType::fp8_ds_mla, 512 + 64 columns take 656 bytes.
constexpr std::int64_t latent_row_bytes(DType dtype, std::int64_t head_dim, std::int64_t value_dim) {
  return (latent_extent(dtype, value_dim) + rope_extent(dtype, head_dim - value_dim)) *
         static_cast<std::int64_t>(size_bytes(dtype));
}

/// Scale of a group of DType::fp8_ds_mla columns whose largest finite magnitude is `most`. That magnitude is
/// stored as 448, and so are infinities. If most / 448 is below 2^-126 the scale is 1, and finite values are
/// stored as 0.
HELIX_HOST_DEVICE constexpr float mixed_scale(float most) {
  constexpr float kLargest = 448.0f;
  constexpr float kMin = 0x1p-126f;
  const float scale = most / kLargest;
  return scale >= kMin ? scale : 1.0f;
}

namespace detail {

/// The product of sizes, kSaturated beyond int64. A size below 0 counts as 0 here: the operation that reads
/// the view reports it.
template <class... Sizes>
constexpr std::int64_t size_product(std::int64_t first, Sizes... sizes) {
  return saturating_product(larger<std::int64_t>(first, 0), std::int64_t{1},
                            larger<std::int64_t>(sizes, 0)...);
}

/// Index in a page table of the first page of slot `slot`: where its CSR section begins, or its row.
HELIX_HOST_DEVICE constexpr std::int64_t first_page(const std::int32_t* page_begins, std::int64_t max_pages,
                                                    std::int64_t slot) {
  return page_begins != nullptr ? std::int64_t{page_begins[slot]} : slot * max_pages;
}

/// Whether latent rows of these columns fit DType::fp8_ds_mla: its f32 scales and bf16 rope columns must
/// begin and end at multiples of their size.
constexpr bool fits_mixed_rows(std::int64_t head_dim, std::int64_t value_dim) {
  return value_dim % 4 == 0 && head_dim - value_dim >= 2 && (head_dim - value_dim) % 2 == 0;
}

/// The sum of two sizes, kSaturated beyond int64. A size below 0 counts as 0.
constexpr std::int64_t size_sum(std::int64_t a, std::int64_t b) {
  return saturating_sum(larger<std::int64_t>(a, 0), larger<std::int64_t>(b, 0));
}

}  // namespace detail

/// Element type, sizes and strides of a paged pool. The last stride of a row is 1. In a latent format (MLA)
/// one row a token is both key and value: all head_dim columns are the key, the first value_dim the value.
/// The latent columns and the rope columns may lie apart.
///
/// Rows of DType::fp8_ds_mla are those of FlashMLA and vLLM: e4m3 latent columns, their f32 scales, bf16 rope
/// columns. Their strides are in bytes, and their scales are those of mixed_scale().
struct KvFormat {
  DType dtype = DType::f32;
  std::int64_t num_heads = 0;    ///< KV heads that this rank stores: Hkv/TPA.
  std::int64_t head_dim = 0;     ///< D.
  std::int64_t value_dim = 0;    ///< Dv.
  std::int64_t page_tokens = 0;  ///< Local tokens a page.
  bool is_latent = false;
  KvStrides k{};     ///< Strides of key rows; latent: of their first value_dim columns.
  KvStrides v{};     ///< Strides of value rows; latent: unused.
  KvStrides rope{};  ///< Latent only: strides of columns [value_dim, head_dim) of the key rows.

  /// Helix's own pool of K and V: [page][K, V][head][token][D]. Rows of V take D columns too.
  static constexpr KvFormat head_major(DType dtype, std::int64_t num_heads, std::int64_t head_dim,
                                       std::int64_t value_dim, std::int64_t page_tokens) {
    const std::int64_t head = detail::size_product(page_tokens, head_dim);
    const KvStrides rows{detail::size_product(2, num_heads, head), head, head_dim};
    return {dtype, num_heads, head_dim, value_dim, page_tokens, false, rows, rows, {}};
  }

  /// A pool of K and one of V, each [page][token][head][D]; V's rows are value_dim wide.
  static constexpr KvFormat token_major(DType dtype, std::int64_t num_heads, std::int64_t head_dim,
                                        std::int64_t value_dim, std::int64_t page_tokens) {
    return {dtype,
            num_heads,
            head_dim,
            value_dim,
            page_tokens,
            false,
            {detail::size_product(page_tokens, num_heads, head_dim), head_dim,
             detail::size_product(num_heads, head_dim)},
            {detail::size_product(page_tokens, num_heads, value_dim), value_dim,
             detail::size_product(num_heads, value_dim)},
            {}};
  }

  /// A pool of latent rows, [page][token][head_dim]; fp8_ds_mla: [page][token][latent_row_bytes()].
  static constexpr KvFormat latent(DType dtype, std::int64_t head_dim, std::int64_t value_dim,
                                   std::int64_t page_tokens) {
    // Sizes are clamped here; the checks of head_dim and value_dim refuse wider rows.
    const auto columns = [](std::int64_t dim) {
      return smaller(larger<std::int64_t>(dim, 0), kSaturated / 8);
    };
    const std::int64_t row = latent_extent(dtype, columns(value_dim)) +
                             helix::rope_extent(dtype, columns(head_dim) - columns(value_dim));
    const KvStrides rows{detail::size_product(page_tokens, row), 0, row};
    return {dtype, 1, head_dim, value_dim, page_tokens, true, rows, {}, rows};
  }

  /// Columns of a key row that `k` addresses; the rest is in `rope`.
  HELIX_HOST_DEVICE constexpr std::int64_t k_columns() const { return is_latent ? value_dim : head_dim; }
  /// Columns of a key row that `rope` addresses.
  HELIX_HOST_DEVICE constexpr std::int64_t rope_columns() const {
    return is_latent ? head_dim - value_dim : 0;
  }
  /// Whether rows carry scales of their own, and rope columns of another type.
  HELIX_HOST_DEVICE constexpr bool is_mixed() const { return dtype == DType::fp8_ds_mla; }
  /// Elements of dtype that a key row takes at `k`.
  HELIX_HOST_DEVICE constexpr std::int64_t k_extent() const { return latent_extent(dtype, k_columns()); }
  /// Elements of dtype that a key row takes at `rope`.
  HELIX_HOST_DEVICE constexpr std::int64_t rope_extent() const {
    return helix::rope_extent(dtype, rope_columns());
  }
  /// Elements of one page in a pool of Helix's own, of K and V or of latents.
  constexpr std::int64_t page_elements() const { return k.page; }
  constexpr std::int64_t element_bytes() const { return static_cast<std::int64_t>(size_bytes(dtype)); }
};

/// A borrowed view of one layer's shard of a paged KV cache. Plain data: operations copy it to the device.
struct KvView {
  KvFormat format{};
  void* k = nullptr;           ///< First key row: token 0 of head 0 in page 0.
  void* v = nullptr;           ///< First value row; latent: null.
  void* rope = nullptr;        ///< Latent only: column value_dim of the first key row.
  std::int64_t num_pages = 0;  ///< Pages of the pool, 1 at least; page ids in the table are below it.
  /// [num_heads] scales of keys, device memory, fp8_e4m3 only: stored * scale = value, above 0; null means 1.
  const float* k_scale = nullptr;
  /// [num_heads] scales of values, as k_scale. Latent: null, because k_scale serves the whole row.
  const float* v_scale = nullptr;
  /// Page ids, device memory. Page i of a sequence holds its local tokens [i * page_tokens, (i + 1) *
  /// page_tokens). The row of slot s begins at entry s * max_pages, or in a CSR list at entry page_begins[s].
  /// Never null, also where the sequences of a step are so short that this rank has no page of them: any
  /// aligned address will do there, because it is not read.
  const std::int32_t* page_table = nullptr;
  std::int64_t max_pages = 0;  ///< Entries of a row, 1 at least; unused with page_begins.
  std::int64_t num_slots = 0;  ///< Rows of the table or of the CSR list; 0: not known and not checked.
  /// [slots + 1] row starts of a CSR list (FlashInfer's indptr), device memory, or null.
  const std::int32_t* page_begins = nullptr;
  KvLayout layout = KvLayout::unset();  ///< Split of the sequences over KVP ranks; the caller's to give.
  std::int64_t kvp_rank = -1;           ///< The shard that the pages hold; the caller's to give.

  /// A view of pool `pages` in a format made by KvFormat::head_major or KvFormat::latent. The caller fills in
  /// the page table, layout and kvp_rank. @throws Error(invalid_argument) if K and V have different strides:
  /// they are in two pools then, as token_major() has them.
  static KvView of_pool(void* pages, const KvFormat& format, std::int64_t num_pages) {
    HELIX_EXPECTS(format.is_latent || format.k == format.v, ErrorCode::invalid_argument,
                  "KvView::of_pool: rows of K and of V have different strides, so they are in two pools; set "
                  "k and v, or take a function of foreign_kv.hpp");
    auto* const bytes = static_cast<std::byte*>(pages);
    KvView view;
    view.format = format;
    view.num_pages = num_pages;
    view.k = bytes;
    if (format.is_latent) {
      view.rope = bytes + detail::size_product(format.k_extent(), format.element_bytes());
    } else {
      view.v = bytes + detail::size_product(format.num_heads, format.k.head, format.element_bytes());
    }
    return view;
  }

  /// This view, of sequences whose tokens are all on this rank.
  KvView whole() const {
    KvView view = *this;
    view.layout = KvLayout(1, 1);
    view.kvp_rank = 0;
    return view;
  }

  /// Index in page_table of the first page of slot `slot`. Call it only where page_begins is null or can be
  /// read.
  HELIX_HOST_DEVICE constexpr std::int64_t first_page_of(std::int64_t slot) const {
    return detail::first_page(page_begins, max_pages, slot);
  }
};

/// Throws Error(invalid_argument) that names the field unless `kv` can be read: sizes in range, no pointer
/// missing, strides that keep rows apart, and K and V (latent: the latent and rope columns) apart too if
/// their strides are equal. Any permutation and slice of a dense tensor passes, page and row padding
/// included. Device memory (page ids) is not looked at. Local, host only.
void check_kv_view(std::string_view operation, const KvView& kv);

}  // namespace helix

#include <helix/kv_format-inl.hpp>
