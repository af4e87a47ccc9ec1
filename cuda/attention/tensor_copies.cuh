// SPDX-License-Identifier: Apache-2.0
// The ways in which the tensor-core kernel fetches a KV tile into shared memory, a class each.
//
// A warp has one object of such a class. look_up() starts to read from memory where the next KV tile lies;
// issue() issues its copies. Rows land one after another. `barrier` completes a phase when all are there;
// with two barriers the first does when the keys are, the second when the values are. Rows that the query
// tile does not see hold anything.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cuda/attention/schedule.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// Kernel parameters of a way to fetch KV tiles that needs AttentionParams only.
struct NoMaps {};

/// Fetches rows of a head that lie one after another in a page, at the same places in K and V: one bulk copy
/// of K and one of V a page. Pages have at least kTokens / kWarp tokens, because a lane looks up one page.
template <int kKeyBytes, int kValueBytes, int kTokens>
struct PageCopies {
  using Maps = NoMaps;
  static constexpr unsigned kArrivals = 1;        // at the mbarrier, in a phase
  static constexpr bool kTakesLoadUnits = false;  // the bulk-copy engine moves the data
  static constexpr bool kTakesUnequalRows = false;
  static constexpr unsigned kRowBytes = kKeyBytes;
  static_assert(kKeyBytes == kValueBytes);

  int tokens = 0;       // tokens of the KV tile that are seen
  int piece_begin = 0;  // first row of this lane's piece: rows that lie in one page
  int piece_tokens = 0;
  std::int32_t page = 0;    // page of the piece; not used before issue(), as it comes from memory
  std::int64_t offset = 0;  // offset of the piece's first row in the page, of K or V

  template <class Plan>
  __device__ __forceinline__ void look_up(const AttentionParams& p, const Maps&, const Plan& plan,
                                          const KvTileCursor& at) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int kv_tile = plan.first_kv_tile_token(at.query_tile) + at.kv_tile * kTokens;
    const int first = max(kv_tile, plan.begin_token[at.query_tile]);
    const int last = min(kv_tile + kTokens, plan.end_token[at.query_tile]);
    tokens = max(0, last - first);
    const int i = first / p.page_tokens + lane;
    // Unsigned: the last page, and the lanes after it, may reach beyond 2^31 tokens.
    const auto page_tokens = static_cast<unsigned>(int{p.page_tokens});
    const unsigned page_begin = static_cast<unsigned>(i) * page_tokens;
    const unsigned begin = max(static_cast<unsigned>(first), page_begin);
    const unsigned end = min(static_cast<unsigned>(last), page_begin + page_tokens);
    piece_tokens = begin < end ? static_cast<int>(end - begin) : 0;
    if (piece_tokens > 0) page = p.lists.pages[plan.first_page[at.query_tile] + i];
    offset = at.head * p.k.head_bytes + static_cast<int>(begin - page_begin) * p.k.token_bytes;
    piece_begin = static_cast<int>(begin) - kv_tile;
  }

  template <int kBarriers>
  __device__ __forceinline__ void issue(const AttentionParams& p, const Maps&, const KvTileCursor&,
                                        unsigned stage, unsigned barrier) const {
    const unsigned value_barrier = barrier + (kBarriers - 1) * 8;
    if (threadIdx.x % kWarp == 0) {
      const unsigned bytes = static_cast<unsigned>(tokens) * kRowBytes;
      barrier_expect(barrier, kBarriers == 1 ? 2 * bytes : bytes);
      if (kBarriers > 1) barrier_expect(value_barrier, bytes);
    }
    __syncwarp();
    if (piece_tokens > 0) {
      const auto bytes = static_cast<unsigned>(piece_tokens) * kRowBytes;
      const unsigned to = stage + static_cast<unsigned>(piece_begin) * kRowBytes;
      const std::int64_t from = page * p.k.page_bytes + offset;
      copy_bulk(to, p.k.first + from, bytes, barrier);
      copy_bulk(to + kTokens * kRowBytes, p.v.first + from, bytes, value_barrier);
    }
  }

  static Maps maps_of(const AttentionParams&, const KvView&) { return {}; }
  static __device__ void prefetch(const Maps&) {}

  /// Orders this warp's writes to a KV tile before later copies over it.
  static __device__ __forceinline__ void fence() { fence_before_copy(); }
};

/// A lane's tokens of a KV tile, every kWarp-th one: their pages, and their places in these.
template <int kTokens>
struct TokenPlaces {
  static constexpr int kCount = kTokens / kWarp;
  static_assert(kCount * kWarp == kTokens);

  int first = 0;  // tokens of the KV tile that are seen: [first, last)
  int last = 0;
  int in_page[kCount] = {};
  std::int32_t page[kCount] = {};  // not used before issue(), as they come from memory

  template <class Plan>
  __device__ __forceinline__ void look_up(const AttentionParams& p, const Plan& plan,
                                          const KvTileCursor& at) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int kv_tile = plan.first_kv_tile_token(at.query_tile) + at.kv_tile * kTokens;
    first = max(0, plan.begin_token[at.query_tile] - kv_tile);
    last = min(kTokens, plan.end_token[at.query_tile] - kv_tile);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int row = k * kWarp + lane;
      const int i = (kv_tile + row) / p.page_tokens;
      in_page[k] = kv_tile + row - i * p.page_tokens;
      if (row >= first && row < last) page[k] = p.lists.pages[plan.first_page[at.query_tile] + i];
    }
  }
};

/// Fetches rows of any strides by cp.async, 16 bytes a lane and copy: the lanes of a warp walk along whole
/// rows side by side. Rows that the query tile does not see become copies of one that it does: with
/// predicated copies, each waited until the one before it had read its address.
template <int kKeyBytes, int kValueBytes, int kTokens>
struct ChunkCopies {
  using Maps = NoMaps;
  static constexpr unsigned kArrivals = kWarp;
  static constexpr bool kTakesLoadUnits = true;
  static constexpr bool kTakesUnequalRows = true;

  TokenPlaces<kTokens> places;

  template <class Plan>
  __device__ __forceinline__ void look_up(const AttentionParams& p, const Maps&, const Plan& plan,
                                          const KvTileCursor& at) {
    places.look_up(p, plan, at);
  }

  template <int kBarriers>
  __device__ __forceinline__ void issue(const AttentionParams& p, const Maps&, const KvTileCursor& at,
                                        unsigned stage, unsigned barrier) const {
    if constexpr (kBarriers == 1) {
      copy_rows<true, true>(p, at, stage);
    } else {
      copy_rows<true, false>(p, at, stage);
      barrier_arrive_after_copies(barrier);
      copy_rows<false, true>(p, at, stage);
    }
    barrier_arrive_after_copies(barrier + (kBarriers - 1) * 8);
  }

  static Maps maps_of(const AttentionParams&, const KvView&) { return {}; }
  static __device__ void prefetch(const Maps&) {}
  static __device__ __forceinline__ void fence() {}

 private:
  template <bool kKeys, bool kValues>
  __device__ __forceinline__ void copy_rows(const AttentionParams& p, const KvTileCursor& at,
                                            unsigned stage) const {
    constexpr int kCopies = std::max(kKeys ? kKeyBytes : 0, kValues ? kValueBytes : 0) / 16;
#pragma unroll
    for (int k = 0; k < TokenPlaces<kTokens>::kCount; ++k) {
      const auto key = reinterpret_cast<std::uint64_t>(p.k.at(places.page[k], at.head, places.in_page[k]));
      const auto value = reinterpret_cast<std::uint64_t>(p.v.at(places.page[k], at.head, places.in_page[k]));
      const int first = max(places.first - k * kWarp, 0);
      const int last = min(places.last - k * kWarp, kWarp);
      const unsigned to_keys = stage + static_cast<unsigned>(k * kWarp * kKeyBytes);
      const unsigned to_values = stage + static_cast<unsigned>(kTokens * kKeyBytes + k * kWarp * kValueBytes);
      if (first < last) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          if (kKeys) copy_chunks<kKeyBytes>(key, first, last, i, to_keys);
          if (kValues) copy_chunks<kValueBytes>(value, first, last, i, to_values);
        }
      }
    }
  }

  /// Issues the i-th of the copies that bring kWarp rows to `to`; `row` is the address of this lane's row.
  template <int kRowBytes>
  static __device__ __forceinline__ void copy_chunks(std::uint64_t row, int first, int last, int i,
                                                     unsigned to) {
    constexpr int kRowChunks = kRowBytes / 16;
    if (i >= kRowChunks) return;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    int to_row = 0;
    int chunk = 0;
    if constexpr (std::has_single_bit(static_cast<unsigned>(kRowChunks))) {
      to_row = i * (kWarp / kRowChunks) + lane / kRowChunks;
      chunk = lane % kRowChunks;
    } else {
      to_row = (i * kWarp + lane) / kRowChunks;
      chunk = (i * kWarp + lane) % kRowChunks;
    }
    const std::uint64_t from = __shfl_sync(~0u, row, min(max(to_row, first), last - 1));
    copy_chunk(to + static_cast<unsigned>(to_row * kRowBytes + chunk * 16),
               reinterpret_cast<const void*>(from + static_cast<unsigned>(chunk) * 16u));
  }
};

/// Issues a warp's copies: every kEvery-th KV tile of a work item.
template <class TileCopies, class Plan, int kEvery, int kBarriers>
struct TileProducer {
  using Maps = typename TileCopies::Maps;

  const AttentionParams& p;
  const Maps& maps;
  const Plan& plan;
  KvTileCursor at;
  int next;  // next KV tile, counted in the work item
  int count;
  TileCopies copies;  // copies of KV tile `next`

  /// Starts at KV tile `first` of the work item.
  __device__ TileProducer(const AttentionParams& params, const Maps& the_maps, const Plan& the_plan,
                          const WorkItem& item, int first)
      : p(params), maps(the_maps), plan(the_plan), at(item.start), next(first), count(item.count) {
    if (next >= count) return;
    at.advance(p, plan, next);
    copies.look_up(p, maps, plan, at);
  }

  /// Whether there is a next KV tile, it belongs to `query_tile`, and its rows are among the first `tokens`
  /// local ones.
  __device__ bool is_within(int query_tile, int tokens) const {
    const int end = plan.first_kv_tile_token(query_tile) + (at.kv_tile + 1) * Plan::kKvTileTokens;
    return next < count && at.query_tile == query_tile && min(end, plan.end_token[query_tile]) <= tokens;
  }

  __device__ void issue(unsigned stage, unsigned barrier) {
    if (next >= count) return;
    copies.template issue<kBarriers>(p, maps, at, stage, barrier);
    next += kEvery;
    if (next < count) {
      at.advance(p, plan, kEvery);
      copies.look_up(p, maps, plan, at);
    }
  }
};

}  // namespace helix::cuda
