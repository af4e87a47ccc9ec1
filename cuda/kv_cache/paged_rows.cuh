// SPDX-License-Identifier: Apache-2.0
// PagedRows and PageLists: a KvView in the form that kernels read, and the alignment of its rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/kv_format.hpp>

#include "cuda/runtime/rows.cuh"

namespace helix::cuda {

/// Rows of one kind (keys, values or rope columns) in a paged pool; strides in bytes.
struct PagedRows {
  std::byte* first = nullptr;  ///< Token 0 of head 0 in page 0.
  std::int64_t page_bytes = 0;
  std::int64_t head_bytes = 0;
  std::int64_t token_bytes = 0;

  PagedRows() = default;
  PagedRows(void* first_row, const KvStrides& strides, std::int64_t element_bytes)
      : first(static_cast<std::byte*>(first_row)),
        page_bytes(strides.page * element_bytes),
        head_bytes(strides.head * element_bytes),
        token_bytes(strides.token * element_bytes) {}

  /// The row of `token` of a page.
  __host__ __device__ std::byte* at(std::int64_t page, std::int64_t head, std::int64_t token) const {
    return first + (page * page_bytes + head * head_bytes + token * token_bytes);
  }

  /// The largest power of two up to 16 that divides the address of every row of `kv`.
  std::size_t alignment(const KvView& kv) const {
    const auto step = [](std::int64_t bytes, std::int64_t extent) {
      return extent > 1 ? static_cast<std::uintptr_t>(bytes) : 0;
    };
    return common_alignment({address_of(first), step(page_bytes, kv.num_pages),
                             step(head_bytes, kv.format.num_heads),
                             step(token_bytes, kv.format.page_tokens)});
  }

  /// Whether the copy engine can walk the rows of `kv`.
  bool has_tensor_map(const KvView& kv) const {
    return kv.num_pages > 0 && is_map_stride(kv.num_pages, page_bytes) &&
           is_map_stride(kv.format.num_heads, head_bytes) &&
           is_map_stride(kv.format.page_tokens, token_bytes);
  }
};

/// The three kinds of rows of a view. In a latent format the values are the first columns of the keys.
struct KvPlaces {
  PagedRows k;
  PagedRows v;
  PagedRows rope;  ///< Latent only.

  explicit KvPlaces(const KvView& kv)
      : k(kv.k, kv.format.k, kv.format.element_bytes()),
        v(kv.format.is_latent ? k : PagedRows(kv.v, kv.format.v, kv.format.element_bytes())),
        rope(kv.rope, kv.format.rope, kv.format.element_bytes()) {}
};

/// The pages of each sequence: a row of a table, or a section of a CSR list.
struct PageLists {
  const std::int32_t* pages = nullptr;
  const std::int32_t* begins = nullptr;  ///< CSR, or null.
  std::int64_t max_pages = 0;

  PageLists() = default;
  explicit PageLists(const KvView& kv)
      : pages(kv.page_table), begins(kv.page_begins), max_pages(kv.max_pages) {}

  /// Index in `pages` of the first page of `slot`.
  __device__ std::int64_t first_of(std::int64_t slot) const {
    return detail::first_page(begins, max_pages, slot);
  }
};

}  // namespace helix::cuda
