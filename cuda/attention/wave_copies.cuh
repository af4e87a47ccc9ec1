// SPDX-License-Identifier: Apache-2.0
// Copies queries, keys and values into swizzled shared memory, in the kernel for many query rows, ahead of
// the products by as much as their rings hold. Keys and values of e4m3 are copied in wave_e4m3.cuh.
//
// Rows that the query tile does not see hold anything.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/attention/wave_walk.cuh"
#include "cuda/runtime/async_copy.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/warp_groups.cuh"

namespace helix::cuda {

/// Kernel parameters in addition to AttentionParams. k and v are for BoxCopies only.
struct WaveMaps {
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap q;
  Divisor box_tokens;        ///< Tokens of a box of k and of v.
  bool has_queries = false;  ///< Whether a box of q is a query tile: tokens times the group's heads.
  /// Whether a launch of its own combines the splits in AttentionParams::split_tiles[query tile * KV heads +
  /// head].
  bool combines_later = false;
};

/// The keys or the values of a launch.
struct WaveSource {
  const AttentionParams& p;
  const PagedRows& rows;
  const CUtensorMap& map;     ///< For copies by TMA.
  const Divisor& box_tokens;  ///< Tokens of a box of the map.
  /// For copies that widen: barriers of a ring's stages, each of which counts what arrives as it is stored.
  unsigned stored_barriers;
};

/// Copies KV tiles of kTokens rows of kDim columns by TMA, for page sizes that whole boxes of 8 rows or more
/// divide. Each lane issues a box.
template <int kDim, int kTokens>
struct BoxCopies {
  /// Whether TMA writes what products read; if not, these need a fence.
  static constexpr bool kIsBox = true;
  static constexpr bool kHasMaps = true;  ///< Whether tensor maps are needed.
  static constexpr int kWarps = 1;        ///< Warps that copy a KV tile's keys, and its values.
  static constexpr unsigned kFills = 1;   ///< Arrivals at a full barrier.
  static constexpr int kRegisters = 40;   ///< Registers of a thread that copies.
  static constexpr int kChunks = (kDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr unsigned kChunkBytes = kTokens * 128u;

  WaveSource from;

  /// Copies the KV tiles of one part into the ring; one warp.
  template <class Plan, int kStages>
  __device__ void copy(const Plan& plan, const WavePart& part, unsigned ring_at, RingPlace<kStages>& place,
                       int) const {
    const AttentionParams& p = from.p;
    const int box_tokens = from.box_tokens;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::int32_t* pages = p.lists.pages + plan.first_page[part.query_tile];
    const int begin = plan.begin_token[part.query_tile];
    const int end = plan.end_token[part.query_tile];
    int token = plan.first_kv_tile_token(part.query_tile) + part.kv_tile * kTokens;
    for (int i = 0; i < part.count; ++i, token += kTokens) {
      // Boxes that have a row that is seen.
      const int first = ::max(0, begin - token) / box_tokens;
      const int last = (::min(kTokens, end - token) + box_tokens - 1) / box_tokens;
      const int boxes = ::max(0, last - first) * kChunks;
      const auto place_of = [&](int box) { return token + (first + box / kChunks) * box_tokens; };
      // Not used before the stage is free, as it comes from memory.
      std::int32_t page = 0;
      if (lane < boxes) page = pages[place_of(lane) / p.page_tokens];
      place.wait_empty();
      const unsigned stage = ring_at + static_cast<unsigned>(place.stage()) * kChunks * kChunkBytes;
      if (lane == 0) barrier_expect(place.full(), static_cast<unsigned>(boxes * box_tokens) * 128u);
      __syncwarp();
      for (int box = lane; box < boxes; box += kWarp) {
        const int at = place_of(box);
        if (box >= kWarp) page = pages[at / p.page_tokens];
        const int chunk = box % kChunks;
        copy_box(
            stage + static_cast<unsigned>(chunk) * kChunkBytes + static_cast<unsigned>(at - token) * 128u,
            from.map, chunk * kChunkColumns, at % p.page_tokens, part.head, page, place.full());
      }
      place.advance();
    }
  }
};

/// Copies KV tiles from rows of any strides by cp.async, 16 bytes a lane and copy. Rows that the query tile
/// does not see become copies of one that it does.
template <int kDim, int kTokens>
struct WaveChunkCopies {
  static constexpr bool kIsBox = false;
  static constexpr bool kHasMaps = false;
  static constexpr int kWarps = 1;
  static constexpr unsigned kFills = kWarp;
  static constexpr int kRegisters = 56;
  static constexpr int kChunks = (kDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr unsigned kChunkBytes = kTokens * 128u;
  static constexpr int kRowParts = kDim / 8;  ///< 16-byte parts of a row.
  static constexpr int kLaneTokens = kTokens / kWarp;
  /// Copies whose addresses are computed together: a copy occupies the registers that it reads for long.
  static constexpr int kBatch = kRowParts % 4 == 0 ? 4 : 2;
  static_assert(kRowParts % kBatch == 0);

  WaveSource from;

  template <class Plan, int kStages>
  __device__ void copy(const Plan& plan, const WavePart& part, unsigned ring_at, RingPlace<kStages>& place,
                       int) const {
    const AttentionParams& p = from.p;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::int32_t* list = p.lists.pages + plan.first_page[part.query_tile];
    const int begin = plan.begin_token[part.query_tile];
    const int end = plan.end_token[part.query_tile];
    int token = plan.first_kv_tile_token(part.query_tile) + part.kv_tile * kTokens;
    // Token of row lane + 32 * k of a KV tile, or the one that is copied instead.
    const auto token_of = [&](int tile, int k) {
      return ::min(::max(tile + lane + k * kWarp, begin), end - 1);
    };
    std::int32_t pages[kLaneTokens];  // pages of the next KV tile
    const auto look_up = [&](int tile) {
#pragma unroll
      for (int k = 0; k < kLaneTokens; ++k) {
        if (begin < end) pages[k] = list[token_of(tile, k) / p.page_tokens];
      }
    };
    look_up(token);
#pragma unroll 1
    for (int i = 0; i < part.count; ++i, token += kTokens) {
      std::uint64_t sources[kLaneTokens];
#pragma unroll
      for (int k = 0; k < kLaneTokens; ++k)
        sources[k] = reinterpret_cast<std::uint64_t>(
            from.rows.at(pages[k], part.head, token_of(token, k) % p.page_tokens));
      if (i + 1 < part.count) look_up(token + kTokens);
      place.wait_empty();
      if (begin < end)
        copy_rows(sources, ring_at + static_cast<unsigned>(place.stage()) * kChunks * kChunkBytes);
      barrier_arrive_after_copies(place.full());
      place.advance();
    }
  }

 private:
  static __device__ __forceinline__ void copy_rows(const std::uint64_t (&from)[kLaneTokens], unsigned stage) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int k = 0; k < kLaneTokens; ++k) {
#pragma unroll 1
      for (int j = 0; j < kRowParts; j += kBatch) {
        std::uint64_t source[kBatch];
        unsigned to[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int at = (j + i) * kWarp + lane;  // 16-byte part of the 32 rows
          const int row = at / kRowParts;
          const int column = at % kRowParts;
          source[i] = __shfl_sync(~0u, from[k], row) + static_cast<unsigned>(column) * 16u;
          to[i] = stage + static_cast<unsigned>(column / 8) * kChunkBytes +
                  swizzled(static_cast<unsigned>(row + k * kWarp), static_cast<unsigned>(column % 8));
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          copy_chunk_or_zeros(to[i], reinterpret_cast<const void*>(source[i]), true);
      }
    }
  }
};

/// The local tokens that each row of one query tile sees, in shared memory.
template <int kRows>
struct RowBounds {
  int begin[kRows];  ///< Local tokens [begin, end).
  int end[kRows];
};

/// Copies the queries of one part, 16 bytes at a time, by kThreads threads; this one has number `thread`.
/// Rows past the last are zeros.
template <int kDim, int kRows, int kThreads>
__device__ inline void copy_queries(const AttentionParams& p, const QueryTile& query_tile, int head,
                                    unsigned to, int thread) {
  constexpr int kRowParts = kDim / 8;
#pragma unroll 4
  for (int i = thread; i < kRows * kRowParts; i += kThreads) {
    const int row = i / kRowParts;
    const int column = i % kRowParts;
    const bool is_row = row < query_tile.num_rows;
    const std::int64_t at = is_row ? query_tile.token(p, row) * p.q_token_stride +
                                         query_tile.query_head(p, head, row) * p.q_head_stride + column * 8
                                   : 0;
    copy_chunk_or_zeros(to + static_cast<unsigned>(column / 8) * (kRows * 128u) +
                            swizzled(static_cast<unsigned>(row), static_cast<unsigned>(column % 8)),
                        static_cast<const std::byte*>(p.q) + at * 2, is_row);
  }
  commit_copies();
}

/// Finds the tokens that each row of a query tile sees; rows past the last get `all`, those that any row
/// sees. By kThreads threads; this one has number `thread`.
template <int kThreads, int kRows>
__device__ inline void find_row_bounds(const AttentionParams& p, const QueryTile& query_tile, TokenRange all,
                                       RowBounds<kRows>& bounds, int thread) {
  std::int64_t positions[kRows / kThreads];
#pragma unroll
  for (int i = 0; i < kRows / kThreads; ++i) {
    const int row = ::min(thread + i * kThreads, query_tile.num_rows - 1);
    positions[i] = p.positions[query_tile.token(p, row)];
  }
#pragma unroll
  for (int i = 0; i < kRows / kThreads; ++i) {
    const int row = thread + i * kThreads;
    const TokenRange seen = row < query_tile.num_rows ? visible(p, positions[i]) : all;
    bounds.begin[row] = static_cast<int>(seen.begin);
    bounds.end[row] = static_cast<int>(seen.end);
  }
}

}  // namespace helix::cuda
