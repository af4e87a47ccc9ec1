// SPDX-License-Identifier: Apache-2.0
// Tensor maps of paged pools.
#pragma once

#include <cstdint>
#include <numeric>

#include <helix/kv_format.hpp>

#include "cuda/kv_cache/paged_rows.cuh"
#include "cuda/runtime/tensor_map.cuh"

namespace helix::cuda {

/// Tokens per box that the copy engine takes from pages: the most that lie in one page wherever a KV tile
/// begins.
inline int box_tokens_of(const KvFormat& format, std::int64_t kv_tile_tokens) {
  return static_cast<int>(std::gcd(format.page_tokens, kv_tile_tokens));
}

/// A map of the rows of a paged pool, with coordinates (column, token of the page, head, page) and boxes of
/// 128 bytes of `box_tokens` tokens.
inline CUtensorMap paged_rows_map(const PagedRows& rows, DType dtype, std::int64_t columns, const KvView& kv,
                                  int box_tokens,
                                  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  return rows_map<4>(rows.first, dtype, {columns, kv.format.page_tokens, kv.format.num_heads, kv.num_pages},
                     {rows.token_bytes, rows.head_bytes, rows.page_bytes},
                     {128 / static_cast<int>(size_bytes(dtype)), box_tokens, 1, 1}, promotion);
}

/// A map of the rows of a paged pool, with the coordinates of paged_rows_map() and boxes of whole rows, which
/// land one after another.
inline CUtensorMap paged_whole_rows_map(const PagedRows& rows, DType dtype, std::int64_t columns,
                                        const KvView& kv, int box_tokens) {
  return rows_map<4>(rows.first, dtype, {columns, kv.format.page_tokens, kv.format.num_heads, kv.num_pages},
                     {rows.token_bytes, rows.head_bytes, rows.page_bytes},
                     {static_cast<int>(columns), box_tokens, 1, 1}, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                     CU_TENSOR_MAP_SWIZZLE_NONE);
}

/// A map of the 16-bit rows of a paged pool of one head, with coordinates (0, token of the page, chunk of 64
/// columns, page) and boxes of `box_chunks` chunks of `box_tokens` tokens. Chunks land one after another. The
/// L2 cache fetches what boxes request, without neighbouring lines.
inline CUtensorMap paged_chunks_map(const PagedRows& rows, DType dtype, std::int64_t columns,
                                    const KvView& kv, int box_tokens, int box_chunks) {
  return rows_map<4>(rows.first, dtype,
                     {kChunkColumns, kv.format.page_tokens, columns / kChunkColumns, kv.num_pages},
                     {rows.token_bytes, kChunkColumns * 2, rows.page_bytes},
                     {kChunkColumns, box_tokens, box_chunks, 1}, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

}  // namespace helix::cuda
