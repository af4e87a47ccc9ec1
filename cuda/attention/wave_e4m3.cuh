// SPDX-License-Identifier: Apache-2.0
// What e4m3 KV needs in the kernel for many query rows (waves.cuh). Keys and values are widened to f16 in
// shared memory or on their way there; queries of bf16 become f16 there, each row scaled by a power of two
// (row_operands.cuh). Scales multiply scores and results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "cuda/attention/row_operands.cuh"
#include "cuda/attention/wave_copies.cuh"
#include "cuda/attention/weights.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/warp_groups.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace helix::cuda {

/// Widens 16 e4m3 to f16, and stores each half of them at its place.
__device__ __forceinline__ void store_widened(const uint4& x, unsigned first, unsigned second) {
  uint4 halves[2];
  widen(x.x, halves[0].x, halves[0].y);
  widen(x.y, halves[0].z, halves[0].w);
  widen(x.z, halves[1].x, halves[1].y);
  widen(x.w, halves[1].z, halves[1].w);
  store_shared(first, halves[0]);
  store_shared(second, halves[1]);
}

/// Copies KV tiles of e4m3 by TMA, for page sizes that whole boxes of 8 rows or more divide, and widens them
/// to f16 in place, by two warps, 32 rows in turn. A stage first gets the rows as they are stored: 128 bytes
/// of each where a chunk will lie, the bytes that follow two chunks further. The lane that has a row then
/// widens it. So stored rows need neither registers nor memory of their own, and are asked for as soon as the
/// stage is free.
template <int kDim, int kTokens>
struct WaveWideningBoxes {
  static constexpr bool kIsBox = false;
  static constexpr bool kHasMaps = true;
  static constexpr int kWarps = 2;
  static constexpr unsigned kFills = kWarps * kWarp;
  /// 4096 tokens after 28672 (32 / 8 heads, D = 128): 3580 us with 64, 3560 with 72, 4290 with 80, which
  /// leave too few for products.
  static constexpr int kRegisters = 72;
  static constexpr int kChunks = (kDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr unsigned kChunkBytes = kTokens * 128u;
  static constexpr int kStoredColumns = 128;  ///< Columns of a stored chunk.
  static constexpr int kStoredChunks = (kDim + kStoredColumns - 1) / kStoredColumns;
  static constexpr unsigned kStoredChunkBytes = 2 * kChunkBytes;  ///< From a stored chunk to the next.
  static constexpr int kRowParts = kDim / 16;                     ///< 16-byte parts of a stored row.
  static constexpr int kUnits = kTokens / kWarp;                  ///< Units of 32 rows in a KV tile.
  static_assert(kTokens % kWarp == 0 && kDim % 16 == 0);
  static_assert(kTokens / kSwizzleRows * kStoredChunks <= kWarp);  // each lane has a box at most

  WaveSource from;

  /// Copies the KV tiles of one part into the ring. Warp `warp` of kWarps widens every second unit, over all
  /// KV tiles if their number is odd; warp 0 asks for stored rows: for those of the next KV tile as soon as
  /// the stage is free, if need be between units of this one.
  template <class Plan, int kStages>
  __device__ void copy(const Plan& plan, const WavePart& part, unsigned ring_at, RingPlace<kStages>& place,
                       int warp) const {
    Boxes boxes(from, plan, part);
    RingPlace<kStages> next = place;  // of the KV tile to be asked for
    int asked = warp == 0 ? 0 : part.count;
    const auto ask = [&] {
      boxes.ask(from, stage_of(next, ring_at), stored_barrier(next));
      next.advance();
      ++asked;
    };
#pragma unroll 1
    for (int i = 0; i < part.count; ++i) {
      if (asked == i) {
        next.wait_empty();
        ask();
      }
      const int first = kUnits % kWarps == 0 ? warp : (warp + i) % kWarps;
#pragma unroll 1
      for (int unit = first; unit < kUnits; unit += kWarps) {
        if (asked == i + 1 && asked < part.count && __all_sync(~0u, next.is_empty())) ask();
        if (unit == first) barrier_wait(stored_barrier(place), place.parity());
        widen_unit(unit, stage_of(place, ring_at));
      }
      fence_before_copy();
      barrier_arrive(place.full());
      place.advance();
    }
  }

 private:
  static __device__ __forceinline__ int lane() {
    return static_cast<int>(threadIdx.x) % kWarp;
  }
  template <int kStages>
  static __device__ __forceinline__ unsigned stage_of(const RingPlace<kStages>& place, unsigned ring_at) {
    return ring_at + static_cast<unsigned>(place.stage()) * kChunks * kChunkBytes;
  }
  template <int kStages>
  __device__ __forceinline__ unsigned stored_barrier(const RingPlace<kStages>& place) const {
    return from.stored_barriers + static_cast<unsigned>(place.stage()) * 8u;
  }

  /// The boxes of a part's KV tiles, one KV tile after another; each lane has one.
  struct Boxes {
    const std::int32_t* pages;
    int head;
    int begin;  ///< Tokens [begin, end) are seen.
    int end;
    int tile;   ///< First token of the next KV tile.
    int count;  ///< Its boxes that have a row that is seen.
    int token;  ///< First token of this lane's box.
    std::int32_t page = 0;

    template <class Plan>
    __device__ __forceinline__ Boxes(const WaveSource& from, const Plan& plan, const WavePart& part)
        : pages(from.p.lists.pages + plan.first_page[part.query_tile]),
          head(part.head),
          begin(plan.begin_token[part.query_tile]),
          end(plan.end_token[part.query_tile]),
          tile(plan.first_kv_tile_token(part.query_tile) + part.kv_tile * kTokens) {
      look_up(from);
    }

    /// Finds the boxes, and this lane's page, ahead of their use.
    __device__ __forceinline__ void look_up(const WaveSource& from) {
      const int first = ::max(0, begin - tile) / from.box_tokens;
      const int last = (::max(0, ::min(kTokens, end - tile)) + from.box_tokens - 1) / from.box_tokens;
      count = ::max(0, last - first) * kStoredChunks;
      token = tile + (first + lane() / kStoredChunks) * from.box_tokens;
      if (lane() < count) page = pages[token / from.p.page_tokens];
    }

    /// Asks for the next KV tile's stored rows. `barrier` counts them.
    __device__ __forceinline__ void ask(const WaveSource& from, unsigned stage, unsigned barrier) {
      if (lane() == 0) barrier_expect(barrier, static_cast<unsigned>(count * from.box_tokens) * 128u);
      __syncwarp();
      const int chunk = lane() % kStoredChunks;
      if (lane() < count)
        copy_box(stage + static_cast<unsigned>(chunk) * kStoredChunkBytes +
                     static_cast<unsigned>(token - tile) * 128u,
                 from.map, chunk * kStoredColumns, token % from.p.page_tokens, head, page, barrier);
      tile += kTokens;
      look_up(from);
    }
  };

  /// Widens this lane's row of a unit.
  static __device__ __forceinline__ void widen_unit(int unit, unsigned stage) {
    constexpr int kStoredParts = kStoredColumns / 16;
    const unsigned row = stage + static_cast<unsigned>(unit * kWarp + lane()) * 128u +
                         static_cast<unsigned>(lane() % kSwizzleRows) * 16u;
#pragma unroll
    for (int first = 0; first < kRowParts; first += kStoredParts) {
      const unsigned from = row + static_cast<unsigned>(first / kStoredParts) * kStoredChunkBytes;
      uint4 stored[kStoredParts];  // all of them, before the first ones overwrite others
#pragma unroll
      for (int i = 0; i < kStoredParts; ++i) {
        if (first + i < kRowParts) stored[i] = load_shared(from ^ static_cast<unsigned>(i) * 16u);
      }
#pragma unroll
      for (int i = 0; i < kStoredParts; ++i) {
        if (first + i >= kRowParts) break;
        constexpr int kChunkParts = kChunkColumns / 16;
        const unsigned to = from ^ static_cast<unsigned>(i % kChunkParts) * 32u;
        const unsigned chunk = static_cast<unsigned>(i / kChunkParts) * kChunkBytes;
        store_widened(stored[i], to + chunk, (to ^ 16u) + chunk);
      }
    }
  }
};

/// Copies KV tiles of e4m3 from rows of any strides, widened to f16 on the way, 32 rows after another. A lane
/// loads 16 bytes at a time and stores them as two parts of 16 bytes; kAhead loads are on their way. Loops
/// are rolled up, and pages looked up 32 rows ahead, for a copying thread has few registers. Pages of one
/// token: 309 us (4096 tokens, 32 / 8 heads, D = 128); by cp.async, and widened in place, 411.
template <int kDim, int kTokens>
struct WaveWideningRows {
  static constexpr bool kIsBox = false;
  static constexpr bool kHasMaps = false;
  static constexpr int kWarps = 2;
  static constexpr unsigned kFills = kWarps * kWarp;
  static constexpr int kRegisters = 72;
  static constexpr int kStep = kWarps * kWarp;  ///< Rows from 32 rows of a warp to its next ones.
  static constexpr int kChunks = (kDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr unsigned kChunkBytes = kTokens * 128u;
  static constexpr int kRowParts = kDim / 16;  ///< 16-byte parts of a stored row; a lane's loads of 32 rows.
  static constexpr int kAhead = kRowParts > 8 ? kRowParts / 2 : kRowParts;
  /// Parts of a row that neighbouring lanes load. With four, which are a chunk of f16, a lane's places differ
  /// by constants.
  static constexpr int kLaneParts = std::gcd(kRowParts, 4);
  static constexpr int kLoadRows = kWarp / kLaneParts;  ///< Rows of one load.
  static_assert(kRowParts % kAhead == 0 && kTokens % kWarp == 0 && kLoadRows % kSwizzleRows == 0);

  WaveSource from;

  /// Copies the KV tiles of one part into the ring: warp `warp` of kWarps takes 32 rows of every kStep. Rows
  /// that the query tile does not see become copies of one that it does.
  template <class Plan, int kStages>
  __device__ void copy(const Plan& plan, const WavePart& part, unsigned ring_at, RingPlace<kStages>& place,
                       int warp) const {
    const AttentionParams& p = from.p;
    const std::int32_t* list = p.lists.pages + plan.first_page[part.query_tile];
    const int begin = plan.begin_token[part.query_tile];
    const int end = plan.end_token[part.query_tile];
    if (begin >= end) return pass(part.count, place);
    int tile = plan.first_kv_tile_token(part.query_tile) + part.kv_tile * kTokens;
    const int end_tile = tile + part.count * kTokens;
    const auto token_of = [&](int first) { return ::min(::max(first + lane(), begin), end - 1); };
    int token = tile + warp * kWarp;
    std::int32_t page = list[token_of(token) / p.page_tokens];
    // The address of row `first` + this lane, and a look at the page of the row that follows.
    const auto next_row = [&](int first) {
      const auto row =
          reinterpret_cast<std::uint64_t>(from.rows.at(page, part.head, token_of(first) % p.page_tokens));
      page = list[token_of(first + kStep) / p.page_tokens];
      return row;
    };
    std::uint64_t row = next_row(token);
    uint4 parts[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) parts[i] = load(row, i);
#pragma unroll 1
    for (; tile < end_tile; tile += kTokens) {
      place.wait_empty();
      const unsigned stage = ring_at + static_cast<unsigned>(place.stage()) * kChunks * kChunkBytes;
#pragma unroll 1
      while (token < tile + kTokens) {
        const unsigned to = stage + static_cast<unsigned>(token - tile) * 128u;
        token += kStep;
#pragma unroll
        for (int i = 0; i < kRowParts; ++i) {
          if (i == kRowParts - kAhead) row = next_row(token);
          store(parts[i % kAhead], i, to);
          parts[i % kAhead] = load(row, (i + kAhead) % kRowParts);
        }
      }
      fence_before_copy();
      barrier_arrive(place.full());
      place.advance();
    }
  }

 private:
  static __device__ __forceinline__ int lane() {
    return static_cast<int>(threadIdx.x) % kWarp;
  }

  /// Gives on `count` KV tiles of which no row is seen.
  template <int kStages>
  static __device__ void pass(int count, RingPlace<kStages>& place) {
    for (int i = 0; i < count; ++i) {
      place.wait_empty();
      barrier_arrive(place.full());
      place.advance();
    }
  }

  /// The i-th load of 32 rows; `row` is the address of this lane's row.
  static __device__ __forceinline__ uint4 load(std::uint64_t row, int i) {
    const std::uint64_t at = __shfl_sync(~0u, row, i % kLaneParts * kLoadRows + lane() / kLaneParts);
    return __ldcg(reinterpret_cast<const uint4*>(at) + lane() % kLaneParts + i / kLaneParts * kLaneParts);
  }

  /// Widens and stores the i-th load of 32 rows; `to` is the place of the first row.
  static __device__ __forceinline__ void store(const uint4& x, int i, unsigned to) {
    const int part = i / kLaneParts * kLaneParts * 2;  // of f16, of the first lane
    const auto row = static_cast<unsigned>(lane() / kLaneParts);
    const auto in_chunk = static_cast<unsigned>(lane() % kLaneParts * 2 + part % 8);
    to += static_cast<unsigned>(part / 8) * kChunkBytes +
          static_cast<unsigned>(i % kLaneParts * kLoadRows) * 128u;
    store_widened(x, to + swizzled(row, in_chunk), to + swizzled(row, in_chunk + 1u));
  }
};

/// Factors of a part's scores and sums. For 16-bit KV: all rows have the softmax scale.
template <bool kIsFp8>
struct WaveScales {
  __device__ __forceinline__ float of_scores(const AttentionParams& p, int) const { return p.scale; }
};

/// For e4m3 KV: `scores` combines the softmax scale, the keys' scale and RowScale::inverse() of each of a
/// thread's two rows.
template <>
struct WaveScales<true> {
  float scores[2];
  float values;

  __device__ __forceinline__ float of_scores(const AttentionParams&, int h) const { return scores[h]; }
};

/// Turns the 16 query rows of this warp, from `row` on, from bf16 to f16, in place. Returns the
/// RowScale::inverse() of the two rows that this lane has in products: row + lane / 4, and 8 further on.
template <class S>
__device__ __forceinline__ float2 make_queries_f16(std::byte* queries, int row) {
  constexpr int kLaneParts = S::kDim / 16;  // parts of 16 bytes in half a row
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto at = [&](int i) {
    const int part = 2 * i + lane % 2;
    return reinterpret_cast<uint4*>(
        queries + part / 8 * (S::kRows * 128) +
        swizzled(static_cast<unsigned>(row + lane / 2), static_cast<unsigned>(part % 8)));
  };
  uint4 parts[kLaneParts];
  unsigned top = 0;
#pragma unroll
  for (int i = 0; i < kLaneParts; ++i) {
    parts[i] = *at(i);
    top = larger_magnitude(top, parts[i]);
  }
  top = ::max(top, __shfl_xor_sync(~0u, top, 1));
  const RowScale scale(top);
#pragma unroll
  for (int i = 0; i < kLaneParts; ++i) {
    scale.make_f16(parts[i]);
    *at(i) = parts[i];
  }
  const float inverse = scale.inverse();
  const int own = lane / 4 * 2;  // a lane of this lane's first row
  return {__shfl_sync(~0u, inverse, own), __shfl_sync(~0u, inverse, own + 16)};
}

}  // namespace helix::cuda
