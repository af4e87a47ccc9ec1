// SPDX-License-Identifier: Apache-2.0
// How the tensor-core kernel fetches a KV tile into shared memory, a class for each way.
// A warp keeps one of them: look_up() starts to read where the next KV tile lies, which comes from memory,
// and issue() asks for it. Rows land one after another, `barrier` completes a phase when all are there, and
// the places of rows that the query tile does not see hold anything.
#pragma once

#include <cstdint>

#include "cuda/attention/schedule.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// Tokens of a KV tile of the tensor-core kernel: a lane can look up one.
inline constexpr int kKvTileTokens = 32;

/// Rows of a head that lie one after another in a page, K and V alike: one bulk copy each of K and V a page.
template <int kDim>
struct PageCopies {
  static constexpr unsigned kArrivals = 1;        // at the barrier, a phase
  static constexpr bool kTakesLoadUnits = false;  // a copy engine moves the data
  static constexpr unsigned kRowBytes = kDim * 2u;

  int tokens = 0;       // of the KV tile
  int piece_begin = 0;  // this lane's part of it: rows that lie in one page
  int piece_tokens = 0;
  std::int32_t page = 0;    // that it lies in; not looked at before issue(), for it comes from memory
  std::int64_t offset = 0;  // of the piece's first row in the page, of K or V

  template <class Plan>
  __device__ __forceinline__ void look_up(const AttentionParams& p, const Plan& plan,
                                          const KvTileCursor& at) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int kv_tile = plan.first_kv_tile_token(at.query_tile) + at.kv_tile * kKvTileTokens;
    const int first = max(kv_tile, plan.begin_token[at.query_tile]);
    const int last = min(kv_tile + kKvTileTokens, plan.end_token[at.query_tile]);
    tokens = max(0, last - first);
    const int i = first / p.page_tokens + lane;
    piece_begin = max(first, i * p.page_tokens);
    piece_tokens = max(0, min(last, (i + 1) * p.page_tokens) - piece_begin);
    if (piece_tokens > 0) page = p.lists.pages[plan.first_page[at.query_tile] + i];
    offset = at.head * p.k.head_bytes + (piece_begin - i * p.page_tokens) * p.k.token_bytes;
    piece_begin -= kv_tile;
  }

  __device__ __forceinline__ void issue(const AttentionParams& p, const KvTileCursor&, unsigned stage,
                                        unsigned barrier) const {
    if (threadIdx.x % kWarp == 0) barrier_expect(barrier, static_cast<unsigned>(tokens) * 2u * kRowBytes);
    __syncwarp();
    if (piece_tokens > 0) {
      const auto bytes = static_cast<unsigned>(piece_tokens) * kRowBytes;
      const unsigned to = stage + static_cast<unsigned>(piece_begin) * kRowBytes;
      const std::int64_t from = page * p.k.page_bytes + offset;
      copy_bulk(to, p.k.first + from, bytes, barrier);
      copy_bulk(to + kKvTileTokens * kRowBytes, p.v.first + from, bytes, barrier);
    }
  }

  /// Orders this warp's writes to a KV tile before later copies over it.
  static __device__ __forceinline__ void fence() { fence_before_copy(); }
};

/// A lane's token of a KV tile: its place in the page lists and in the page.
struct TokenPlace {
  int first = 0;  // tokens of the KV tile that are seen: [first, last)
  int last = 0;
  int in_page = 0;
  std::int32_t page = 0;  // not looked at before issue(), for it comes from memory

  template <class Plan>
  __device__ __forceinline__ void look_up(const AttentionParams& p, const Plan& plan,
                                          const KvTileCursor& at) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int kv_tile = plan.first_kv_tile_token(at.query_tile) + at.kv_tile * kKvTileTokens;
    first = max(0, plan.begin_token[at.query_tile] - kv_tile);
    last = min(kKvTileTokens, plan.end_token[at.query_tile] - kv_tile);
    const int i = (kv_tile + lane) / p.page_tokens;
    in_page = kv_tile + lane - i * p.page_tokens;
    if (has(lane)) page = p.lists.pages[plan.first_page[at.query_tile] + i];
  }

  __device__ __forceinline__ bool has(int row) const { return row >= first && row < last; }
};

/// Rows of any strides, 16 bytes a lane and copy: the lanes of a warp walk whole rows side by side. Rows that
/// the query tile does not see become copies of one that it does: under a predicate each copy waited until
/// the one before it had read its address.
template <int kDim>
struct ChunkCopies {
  static constexpr unsigned kArrivals = kWarp;
  static constexpr bool kTakesLoadUnits = true;
  static constexpr unsigned kRowBytes = kDim * 2u;
  static constexpr int kRowChunks = kDim / 8;             // of 16 bytes
  static constexpr int kRowsAtOnce = kWarp / kRowChunks;  // of one copy by all lanes
  static_assert(kRowsAtOnce * kRowChunks == kWarp);

  TokenPlace place;

  template <class Plan>
  __device__ __forceinline__ void look_up(const AttentionParams& p, const Plan& plan,
                                          const KvTileCursor& at) {
    place.look_up(p, plan, at);
  }

  __device__ __forceinline__ void issue(const AttentionParams& p, const KvTileCursor& at, unsigned stage,
                                        unsigned barrier) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const auto key = reinterpret_cast<std::uint64_t>(p.k.at(place.page, at.head, place.in_page));
    const auto value = reinterpret_cast<std::uint64_t>(p.v.at(place.page, at.head, place.in_page));
    const unsigned chunk = static_cast<unsigned>(lane % kRowChunks) * 16u;
    const unsigned to = stage + static_cast<unsigned>(lane / kRowChunks) * kRowBytes + chunk;
    if (place.first < place.last) {
#pragma unroll
      for (int begin = 0; begin < kKvTileTokens; begin += kRowsAtOnce) {
        const int row = min(max(begin + lane / kRowChunks, place.first), place.last - 1);
        const std::uint64_t from_key = __shfl_sync(~0u, key, row);
        const std::uint64_t from_value = __shfl_sync(~0u, value, row);
        const unsigned at_row = to + static_cast<unsigned>(begin) * kRowBytes;
        copy_chunk(at_row, reinterpret_cast<const void*>(from_key + chunk));
        copy_chunk(at_row + kKvTileTokens * kRowBytes, reinterpret_cast<const void*>(from_value + chunk));
      }
    }
    barrier_arrive_after_copies(barrier);
  }

  static __device__ __forceinline__ void fence() {}
};

}  // namespace helix::cuda
