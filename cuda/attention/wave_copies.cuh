// SPDX-License-Identifier: Apache-2.0
// How the kernel of many query rows brings queries, keys and values into swizzled shared memory: a warp for
// keys, one for values, two for queries, each ahead of the products by as much as its ring holds.
//
// The places of rows that the query tile does not see hold anything.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/attention/wave_schedule.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/warp_groups.cuh"

namespace helix::cuda {

/// What copies of KV tiles need beside AttentionParams: tensor maps, of which only BoxCopies has use.
struct WaveMaps {
  CUtensorMap k;
  CUtensorMap v;
  int box_tokens = 0;
};

/// 16 bytes into shared memory, or zeros; what is read stays in the L2 cache for other blocks.
__device__ __forceinline__ void copy_chunk_or_zeros(unsigned to, const void* from, bool copies) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copies ? 16 : 0)
               : "memory");
#endif
}

/// Ends this thread's group of copies, and waits until at most kPending of its groups are on their way.
template <int kPending>
__device__ __forceinline__ void copies_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}
__device__ __forceinline__ void copies_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// KV tiles of kTokens rows of kDim columns by the copy engine, for page sizes that whole boxes of 8 rows or
/// more divide: a box is a lane's.
template <int kDim, int kTokens>
struct BoxCopies {
  static constexpr unsigned kFills = 1;  ///< Arrivals at a full barrier.
  static constexpr int kChunks = (kDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr unsigned kChunkBytes = kTokens * 128u;

  const AttentionParams& p;
  const CUtensorMap& map;
  int box_tokens;

  /// Copies the KV tiles of one part into the ring; one warp.
  template <class Plan, int kStages>
  __device__ void copy(const Plan& plan, const WavePart& part, unsigned ring_at,
                       RingPlace<kStages>& place) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::int32_t* pages = p.lists.pages + plan.first_page[part.query_tile];
    const int begin = plan.begin_token[part.query_tile];
    const int end = plan.end_token[part.query_tile];
    int token = plan.first_kv_tile_token(part.query_tile) + part.kv_tile * kTokens;
    for (int i = 0; i < part.count; ++i, token += kTokens) {
      // Boxes of which some row is seen.
      const int first = ::max(0, begin - token) / box_tokens;
      const int last = (::min(kTokens, end - token) + box_tokens - 1) / box_tokens;
      const int boxes = ::max(0, last - first) * kChunks;
      const auto place_of = [&](int box) { return token + (first + box / kChunks) * box_tokens; };
      // Not looked at before the stage is free, for it comes from memory.
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
            map, chunk * kChunkColumns, at % p.page_tokens, part.head, page, place.full());
      }
      place.advance();
    }
  }
};

/// KV tiles from rows of any strides, 16 bytes a lane and copy.
template <int kDim, int kTokens>
struct WaveChunkCopies {
  static constexpr unsigned kFills = kWarp;
  static constexpr int kChunks = (kDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr unsigned kChunkBytes = kTokens * 128u;
  static constexpr int kRowParts = kDim / 8;  ///< Of 16 bytes.
  static constexpr int kLaneTokens = kTokens / kWarp;

  const AttentionParams& p;
  const PagedRows& rows;

  template <class Plan, int kStages>
  __device__ void copy(const Plan& plan, const WavePart& part, unsigned ring_at,
                       RingPlace<kStages>& place) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::int32_t* pages = p.lists.pages + plan.first_page[part.query_tile];
    const int begin = plan.begin_token[part.query_tile];
    const int end = plan.end_token[part.query_tile];
    int token = plan.first_kv_tile_token(part.query_tile) + part.kv_tile * kTokens;
    for (int i = 0; i < part.count; ++i, token += kTokens) {
      const int first = ::max(0, begin - token);
      const int last = ::min(kTokens, end - token);
      std::uint64_t from[kLaneTokens];  // rows of tokens lane, lane + 32, ...; null: not seen
#pragma unroll
      for (int k = 0; k < kLaneTokens; ++k) {
        const int row = lane + k * kWarp;
        from[k] = 0;
        if (row >= first && row < last) {
          const int page = (token + row) / p.page_tokens;
          from[k] = reinterpret_cast<std::uint64_t>(
              rows.at(pages[page], part.head, token + row - page * p.page_tokens));
        }
      }
      place.wait_empty();
      const unsigned stage = ring_at + static_cast<unsigned>(place.stage()) * kChunks * kChunkBytes;
#pragma unroll
      for (int k = 0; k < kLaneTokens; ++k) {
#pragma unroll 4
        for (int j = 0; j < kRowParts; ++j) {
          const int at = j * kWarp + lane;  // 16-byte part of the 32 rows
          const int row = at / kRowParts;
          const int column = at % kRowParts;
          const std::uint64_t source = __shfl_sync(~0u, from[k], row);
          copy_chunk_or_zeros(
              stage + static_cast<unsigned>(column / 8) * kChunkBytes +
                  swizzled(static_cast<unsigned>(row + k * kWarp), static_cast<unsigned>(column % 8)),
              source != 0 ? reinterpret_cast<const std::byte*>(source) + column * 16 : rows.first,
              source != 0);
        }
      }
      barrier_arrive_after_copies(place.full());
      place.advance();
    }
  }
};

/// Query rows, and what each sees, of one query tile; shared memory.
template <int kRows>
struct RowBounds {
  int begin[kRows];  ///< Local tokens [begin, end).
  int end[kRows];
};

/// Brings in the queries and bounds of one part, by kThreads threads of which this is number `thread`. Rows
/// past the last are zeros that see `all`, what any row of the query tile does.
template <int kDim, int kRows, int kThreads>
__device__ inline void copy_queries(const AttentionParams& p, const QueryTile& query_tile, int head,
                                    TokenRange all, unsigned to, RowBounds<kRows>& bounds, int thread) {
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
  copies_commit();
  for (int row = thread; row < kRows; row += kThreads) {
    TokenRange seen = all;
    if (row < query_tile.num_rows) seen = visible(p, p.positions[query_tile.token(p, row)]);
    bounds.begin[row] = static_cast<int>(seen.begin);
    bounds.end[row] = static_cast<int>(seen.end);
  }
  copies_wait<0>();
  fence_before_copy();
}

}  // namespace helix::cuda
