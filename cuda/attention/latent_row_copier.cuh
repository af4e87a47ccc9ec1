// SPDX-License-Identifier: Apache-2.0
// How the kernel over latents copies KV tiles from pages that no box of TMA fits: row by row, by load units.
// A box takes about 25 cycles however small it is, and with pages of one token a KV tile has 576.
#pragma once

#include <cstdint>

#include "cuda/attention/latent_producer.cuh"
#include "cuda/runtime/async_copy.cuh"

namespace helix::cuda::latent {

/// Copies KV tiles by cp.async, 16 bytes a lane and copy, from rows of any strides in pages of any size, with
/// a warp for each half of each KV buffer. Rows that the query tile does not see become copies of one that it
/// does.
///
/// The warp itself waits until its copies have landed, and arrives at the barriers as TMA would, so that
/// consumers need no fence. It has nothing else to do meanwhile.
template <int kBlocks>
class RowCopier {
 public:
  __device__ RowCopier(const AttentionParams& params, Shared<kBlocks>& shared)
      : p(params), place_{params, shared} {}

  __device__ void run() {
    produce_parts<kBlocks>(p, place_.s, [&](const Part& part) {
      place_.begin(part);
      copy_tiles(part.span, part.first_token, part.count);
    });
  }

 private:
  static constexpr int kLaneTokens = kLatentTileTokens / kWarp;
  static constexpr int kRowLanes = static_cast<int>(kRowBytes) / 16;  // lanes that copy a row of a chunk
  static constexpr int kCopyRows = kWarp / kRowLanes;                 // rows of a copy
  static_assert(kCopyRows * 2 == kSwizzleRows && kHalfUnits == 2);
  static constexpr unsigned kHalfRowBytes = kHalfChunks * kRowBytes;
  /// Addresses of rows own_row(), own_row() + kWarp, ... of a KV tile.
  using Addresses = std::uint64_t[kLaneTokens];

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  /// The row whose address this lane finds. The kRowLanes lanes that copy a row find those of the rows that
  /// they copy.
  static __device__ int own_row() { return lane() % kRowLanes * kCopyRows + lane() / kRowLanes; }

  /// The part's fields are in registers: shared memory would be read again after each wait.
  __device__ __forceinline__ void copy_tiles(QueryTileSpan span, int first_token, int count) {
    const std::int32_t* pages = p.lists.pages + span.first_page;
    const bool is_seen = span.begin_token < span.end_token;  // if so, some token of each tile
    // Token of row own_row() + kWarp * k of tile `i`, or the one that is copied instead.
    const auto token_of = [&](int i, int k) {
      const int row = own_row() + k * kWarp;
      return max(min(first_token + i * kLatentTileTokens + row, span.end_token - 1), span.begin_token);
    };
    // Pages of the next tile, not used before it, as they come from memory.
    std::int32_t page[kLaneTokens] = {};
    const auto look_up = [&](int i) {
      if (!is_seen || i >= count) return;
#pragma unroll
      for (int k = 0; k < kLaneTokens; ++k) page[k] = pages[token_of(i, k) / p.page_tokens];
    };
    look_up(place_.buffer);
#pragma unroll 1
    for (int i = place_.buffer; i < count; i += 2) {
      Addresses latents;
      Addresses ropes;
#pragma unroll
      for (int k = 0; k < kLaneTokens; ++k) {
        const int in_page = token_of(i, k) % p.page_tokens;
        latents[k] = address_in(p.k, page[k], in_page) + static_cast<unsigned>(place_.half) * kHalfRowBytes;
        ropes[k] = address_in(p.rope, page[k], in_page);
      }
      look_up(i + 2);
      place_.await_place();
      place_.await_rows(span, first_token + i * kLatentTileTokens);
      if (is_seen) copy_chunks<kHalfChunks>(latents, place_.address());
      commit_copies();
      if (is_seen && place_.has_rope()) copy_chunks<1>(ropes, place_.address() + kHalfChunks * kChunkBytes);
      commit_copies();
      place_.end_copies();
      finish_unit<0>();
      finish_unit<1>();
    }
  }

  static __device__ std::uint64_t address_in(const PagedRows& rows, std::int32_t page, int in_page) {
    return reinterpret_cast<std::uint64_t>(rows.at(page, 0, in_page));
  }

  /// Issues the copies of kCopied chunks of all rows to `to`. A lane copies the same part of all chunks of a
  /// row, so that the row's address is passed to it once. Unrolled, as the producers have few registers: rows
  /// and places are then constants of the instructions.
  template <int kCopied>
  static __device__ __forceinline__ void copy_chunks(const Addresses& rows, unsigned to) {
    const auto part = static_cast<unsigned>(lane() % kRowLanes);
    const unsigned even = to + swizzled(static_cast<unsigned>(lane() / kRowLanes), part);
    const unsigned odd = even ^ kSwizzleRows / 2 * 16u;  // kCopyRows rows further on in the swizzle
#pragma unroll
    for (int k = 0; k < kLaneTokens; ++k) {
#pragma unroll
      for (int i = 0; i < kRowLanes; ++i) {
        const std::uint64_t from = __shfl_sync(~0u, rows[k], i, kRowLanes) + part * 16u;
        const unsigned at =
            (i % 2 == 0 ? even : odd) + static_cast<unsigned>(k * kWarp + i * kCopyRows) * kRowBytes;
#pragma unroll
        for (unsigned c = 0; c < kCopied; ++c)
          copy_chunk(at + c * kChunkBytes, reinterpret_cast<const void*>(from + c * kRowBytes));
      }
    }
  }

  /// Waits for the copies of a unit of the half, and tells consumers that they are there. The first unit
  /// waits for all latents of the half, which are copied together; the last one for the rope columns too.
  template <int kUnit>
  __device__ __forceinline__ void finish_unit() const {
    wait_for_copies<kHalfUnits - 1 - kUnit>();
    fence_before_copy();  // products read through another proxy
    __syncwarp();
    barrier_arrive_if(lane() == 0, place_.full(kUnit));
  }

  const AttentionParams& p;
  BufferHalf<kBlocks> place_;
};

}  // namespace helix::cuda::latent
