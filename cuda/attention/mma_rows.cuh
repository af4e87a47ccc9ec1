// SPDX-License-Identifier: Apache-2.0
// Copies rows of a paged pool into shared memory for the kernels of mma.cuh and mma_latent.cuh, by cp.async,
// from rows of any strides and alignment.
//
// In shared memory 16 unused bytes follow each row. Rows are then an odd number of 16-byte chunks apart, so
// that the eight rows of a matrix that ldmatrix reads lie in different banks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/attention/params.cuh"
#include "cuda/runtime/async_copy.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

inline constexpr int kChunkBytes = 16;

/// What the host knows of the alignment of rows.
struct RowAlignment {
  int kv = 1;  ///< Bytes that one copy or load of KV may have: a power of two up to 16.
  int q = 1;   ///< Bytes that one load of q may have: a power of two up to 16.
};

/// Where a token lies: its page, and its place in the page. Page -1: no row of the query tile sees the token.
using TokenPlace = int2;

/// Rows of a KV head. Their first `split` bytes lie in `rows`, the others in `rest`.
struct RowSource {
  const PagedRows& rows;
  const PagedRows& rest;  ///< Bytes from `split` on.
  std::int64_t row_offset;
  std::int64_t rest_offset;
  int split;
  int bytes;

  __device__ RowSource(const PagedRows& the_rows, const PagedRows& the_rest, int head, int split_bytes,
                       int row_bytes)
      : rows(the_rows),
        rest(the_rest),
        row_offset(head * the_rows.head_bytes),
        rest_offset(head * the_rest.head_bytes - split_bytes),
        split(split_bytes),
        bytes(row_bytes) {}

  __device__ bool is_split() const { return split < bytes; }
  template <bool kIsSplit>
  __device__ __forceinline__ const std::byte* at(const TokenPlace& place, int byte) const {
    if (kIsSplit && byte >= split)
      return rest.first + (rest_offset + byte + place.x * rest.page_bytes + place.y * rest.token_bytes);
    return rows.first + (row_offset + byte + place.x * rows.page_bytes + place.y * rows.token_bytes);
  }
};

/// Copies one chunk in pieces of `width` bytes, less than a chunk, with zeros past the row's end.
__device__ inline void copy_narrow_chunk(const RowSource& from, const TokenPlace& place, int first_byte,
                                         unsigned to, int width) {
#pragma unroll 1
  for (int i = 0; i < kChunkBytes; i += width) {
    const int byte = first_byte + i;
    const bool is_there = place.x >= 0 && byte < from.bytes;
    const std::byte* piece = is_there ? from.at<true>(place, byte) : from.rows.first;
    const int valid = is_there ? ::min(width, from.bytes - byte) : 0;
    if (width == 8) {
      copy_async<8>(to + static_cast<unsigned>(i), piece, valid);
    } else if (width == 4) {
      copy_async<4>(to + static_cast<unsigned>(i), piece, valid);
    } else {
#pragma unroll 1
      for (int k = 0; k < width; ++k)
        store_shared(to + static_cast<unsigned>(i + k), k < valid ? piece[k] : std::byte{0});
    }
  }
}

/// Issues copies of kTokens rows of kRowBytes, each a whole number of chunks. Tokens that are not seen, and
/// bytes past a row's end, become zeros. All kThreads threads.
template <bool kIsSplit, int kRowBytes, int kTokens, int kThreads>
__device__ __forceinline__ void copy_rows(const RowSource& from, const TokenPlace* places, unsigned to,
                                          int width) {
  constexpr int kChunks = kRowBytes / kChunkBytes;
  constexpr int kCount = kTokens * kChunks;
  constexpr int kStride = kRowBytes + kChunkBytes;
  const int thread = static_cast<int>(threadIdx.x);
  if (width == kChunkBytes) {
#pragma unroll 4
    for (int i = thread; i < kCount; i += kThreads) {
      const int row = i / kChunks;
      const int byte = i % kChunks * kChunkBytes;
      const TokenPlace place = places[row];
      const int valid = place.x < 0 ? 0 : ::min(::max(from.bytes - byte, 0), kChunkBytes);
      copy_async<kChunkBytes>(to + static_cast<unsigned>(row * kStride + byte),
                              from.at<kIsSplit>({::max(place.x, 0), place.y}, byte), valid);
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < kCount; i += kThreads) {
      const int row = i / kChunks;
      const int byte = i % kChunks * kChunkBytes;
      copy_narrow_chunk(from, places[row], byte, to + static_cast<unsigned>(row * kStride + byte), width);
    }
  }
}

/// Looks up the places of a work item's tokens of one query tile. It runs one KV tile ahead, because page
/// numbers come from memory.
template <class Plan>
struct TokenLookUp {
  static constexpr int kTokens = Plan::kKvTileTokens;

  const AttentionParams& p;
  const std::int32_t* pages;  ///< Page list of the sequence.
  int first;                  ///< Token of KV tile 0 of this part.
  int begin;                  ///< Tokens that the query tile sees: [begin, end).
  int end;
  TokenPlace place{-1, 0};  ///< Place of this thread's token in the last tile of ask().

  __device__ TokenLookUp(const AttentionParams& params, const Plan& plan, int query_tile, int first_kv_tile)
      : p(params),
        pages(params.lists.pages + plan.first_page[query_tile]),
        first(plan.first_kv_tile_token(query_tile) + first_kv_tile * kTokens),
        begin(plan.begin_token[query_tile]),
        end(plan.end_token[query_tile]) {}

  /// Starts to look up the tokens of KV tile `tile`, one by each of the first kTokens threads.
  __device__ __forceinline__ void ask(int tile) {
    const int token = first + tile * kTokens + static_cast<int>(threadIdx.x);
    place = {-1, 0};
    if (static_cast<int>(threadIdx.x) < kTokens && token >= begin && token < end) {
      const int i = token / p.page_tokens;
      place = {pages[i], token - i * p.page_tokens};
    }
  }
  __device__ __forceinline__ void keep(TokenPlace* places) const {
    if (static_cast<int>(threadIdx.x) < kTokens) places[threadIdx.x] = place;
  }
};

}  // namespace helix::cuda
