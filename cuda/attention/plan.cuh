// SPDX-License-Identifier: Apache-2.0
// The plan of an attention kernel: its query tiles and their KV tiles, from which Schedule derives each
// block's work item. Each block makes the plan itself, in shared memory, from device memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/dealing.cuh"
#include "cuda/attention/local_tokens.hpp"
#include "cuda/attention/splits.cuh"
#include "cuda/runtime/prefix_sums.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// A query tile and the keys that any of its rows sees.
struct QueryTileSpan {
  QueryTile query_tile;
  std::int64_t first_page;  ///< Index of the sequence's first page in the page lists.
  int begin_token;          ///< Local token where the keys begin.
  int end_token;            ///< Local token where the keys end.
};

/// The lists that every kernel's schedule is made of, in shared memory. KV tiles have kTokens tokens, and
/// kBlocks blocks share a work item. `u` is a query tile of the launch; `Count` holds numbers of query tiles
/// and of splits. kMayDeal: for kernels of one KV head, whose query tiles may be dealt out (dealing.cuh).
template <int kTokens, class TheLimits, int kBlocks, class Count, bool kMayDeal>
struct AttentionLists {
  static constexpr bool kDeals = kMayDeal;
  using Limits = TheLimits;
  static constexpr int kKvTileTokens = kTokens;
  static_assert(kTokens >= kMinKvTileTokens && Limits::kPaddingTiles <= kMaxPaddingTiles);

  /// KV tiles of one KV head before each query tile, with padding, in order of the list.
  alignas(16) int kv_tile_begin[kMaxQueryTiles + 1];
  /// First query tile of each sequence, counted in the launch; unset if each is one query tile.
  Count query_tile_begin[kMaxLaunchSequences + 1];
  union {
    /// KV splits of one KV head before each query tile, if is_one_split_each.
    Count split_begin[kMaxQueryTiles + 1];
    /// The query tile at each place in the list, if SmallAttentionPlan::may_deal().
    Count query_tile_at[kMaxQueryTiles];
  };
  bool is_one_split_each;  ///< Whether each work item is one KV split: of one query tile only.
  int even_items;          ///< Otherwise: number of work items, of equal length.

  /// KV tiles of query tile `u` and one KV head in the list, with padding.
  __device__ int listed_tiles(int u) const { return kv_tile_begin[u + 1] - kv_tile_begin[u]; }
  __device__ int kv_tiles(const AttentionParams& p, int u) const {
    return listed_tiles(u) - padding_tiles(p);
  }
  __device__ int splits(int u) const { return split_begin[u + 1] - split_begin[u]; }
  /// Blocks of the grid, where blocks that share a work item count as one.
  static __device__ int num_blocks() { return static_cast<int>(gridDim.x) / kBlocks; }
  /// KV heads of the launch.
  static __device__ decltype(auto) kv_heads(const AttentionParams& p) {
    if constexpr (kDeals) {
      return 1;
    } else {
      return (p.kv_heads);
    }
  }
  /// Whether there are more query tiles than blocks.
  static __device__ bool is_crowded(const AttentionParams& p) {
    return num_blocks() < p.num_query_tiles * kv_heads(p);
  }
  /// Empty KV tiles that follow those of each query tile in the list.
  static __device__ int padding_tiles(const AttentionParams& p) {
    if constexpr (Limits::kPaddingTiles == 0) return 0;
    return is_crowded(p) ? Limits::kPaddingTiles : 0;
  }
};

/// The lists, and the spans of all query tiles. kCallsFunctions: long functions that decode steps seldom run
/// are called, not inlined, so that the code of decode steps is contiguous and arrives from memory sooner.
/// Not for kernels whose warps exchange registers (setmaxnreg), which calls prevent.
template <int kTokens, class TheLimits = ShortTileLimits, bool kCallsFunctions = false, int kBlocks = 1>
struct AttentionPlan : AttentionLists<kTokens, TheLimits, kBlocks, int, false> {
  static constexpr bool kCalls = kCallsFunctions;
  static constexpr bool is_dealt = false;  ///< As in SmallAttentionPlan.
  QueryTile query_tiles[kMaxQueryTiles];
  std::int64_t first_page[kMaxQueryTiles];  ///< This and the next two: the fields of QueryTileSpan.
  int begin_token[kMaxQueryTiles];
  int end_token[kMaxQueryTiles];

  __device__ void keep(int u, const QueryTileSpan& span) {
    query_tiles[u] = span.query_tile;
    first_page[u] = span.first_page;
    begin_token[u] = span.begin_token;
    end_token[u] = span.end_token;
  }
  /// First token of the first KV tile; KV tiles lie at multiples of kKvTileTokens.
  __device__ int first_kv_tile_token(int u) const { return begin_token[u] / kTokens * kTokens; }
};

/// The lists alone, in 2 KiB, for kernels of one KV head whose tiles fill the shared memory: span_of()
/// computes the spans again. Query tiles that are more than the blocks may be dealt out whole (dealing.cuh).
template <int kTokens, class TheLimits, int kBlocks>
struct SmallAttentionPlan : AttentionLists<kTokens, TheLimits, kBlocks, std::uint16_t, true> {
  static constexpr bool kCalls = false;

  bool is_dealt;  ///< Whether each work item is whole query tiles.

  static __device__ bool may_deal(const AttentionParams& p) {
    return SmallAttentionPlan::is_crowded(p) && p.query_tile_rows >= TheLimits::kDealtRows;
  }
  /// The query tile at a place in the list.
  __device__ int query_tile_of(const AttentionParams& p, int place) const {
    return may_deal(p) ? this->query_tile_at[place] : place;
  }
  __device__ void keep(int, const QueryTileSpan&) {}
};

/// Prefetches this block's share of the queries, by `threads` threads; this one has number `thread`.
__device__ inline void prefetch_queries(const AttentionParams& p, int thread, int threads) {
  constexpr int kCacheLineBytes = 128;
  const int element_bytes = p.dtype == DType::f32 ? 4 : 2;
  const int lines = (p.head_dim * element_bytes + kCacheLineBytes - 1) / kCacheLineBytes;
  const int heads = p.kv_heads * p.group;
  const int count = p.num_tokens * heads * lines;
  const auto* q = static_cast<const std::byte*>(p.q);
  for (int i = static_cast<int>(blockIdx.x) * threads + thread; i < count;
       i += static_cast<int>(gridDim.x) * threads) {
    const int row = i / lines;
    const std::int64_t at = (p.first_token + row / heads) * p.q_token_stride + row % heads * p.q_head_stride;
    prefetch_line(q + at * element_bytes + i % lines * kCacheLineBytes);
  }
}

/// Query rows of sequence `b`, of one KV head.
__device__ inline int query_rows(const AttentionParams& p, int b) {
  return (p.query_offsets[b + 1] - p.query_offsets[b]) * p.group;
}

/// The span of `num_rows` query rows of sequence `b` from `row` on.
template <bool kCalls>
__device__ inline QueryTileSpan span_of(const AttentionParams& p, int b, int row, int num_rows) {
  const std::int64_t slot = p.sequence_slots[b];  // asked for before positions are
  const int first_token = p.query_offsets[b];
  std::int64_t begin = INT64_MAX;
  std::int64_t end = 0;
#pragma unroll 1
  for (int t = row / p.group; t <= (row + num_rows - 1) / p.group; ++t) {
    const TokenRange seen = visible<kCalls>(p, p.positions[first_token + t]);
    if (seen.size() <= 0) continue;
    begin = min(begin, seen.begin);
    end = max(end, seen.end);
  }
  // The slot of a sequence that sees nothing may be anything.
  return {{first_token, row, num_rows},
          end > 0 ? p.lists.first_of(slot) : 0,
          end > 0 ? static_cast<int>(begin) : 0,
          static_cast<int>(end)};
}

/// The local tokens that row `row` of a query tile sees: those of the whole tile if it has one token, or for
/// rows past the last.
template <bool kCalls = false>
__device__ inline TokenRange seen_by_row(const AttentionParams& p, const QueryTileSpan& span, int row) {
  const QueryTile& tile = span.query_tile;
  const bool is_one_token = tile.token(p, 0) == tile.token(p, tile.num_rows - 1);
  if (is_one_token || row >= tile.num_rows) return {span.begin_token, span.end_token};
  return visible<kCalls>(p, p.positions[tile.token(p, row)]);
}

/// The span of query tile `u` of the launch.
template <class Plan>
__device__ inline QueryTileSpan span_of_tile(const AttentionParams& p, const Plan& plan, int u) {
  int b = u;
  int row = 0;
  if (!p.is_one_query_tile_each) {
    b = find_last(plan.query_tile_begin, p.num_sequences, u);
    const int skipped = b == 0 ? p.first_query_tile : 0;
    row = (u - plan.query_tile_begin[b] + skipped) * p.query_tile_rows;
  }
  return span_of<Plan::kCalls>(p, b, row, min(static_cast<int>(p.query_tile_rows), query_rows(p, b) - row));
}

/// Keeps query tile `u` in the plan. Returns its number of KV tiles, with padding.
template <class Plan>
__device__ inline int plan_query_tile(const AttentionParams& p, Plan& plan, int u,
                                      const QueryTileSpan& span) {
  constexpr int kKvTileTokens = Plan::kKvTileTokens;
  plan.keep(u, span);
  // A query tile that sees nothing has a KV tile of no tokens, so that some block writes its zeros.
  const int first = span.begin_token / kKvTileTokens;
  return max(1, (span.end_token + kKvTileTokens - 1) / kKvTileTokens - first) + Plan::padding_tiles(p);
}

/// Makes the plan for up to kWarp sequences of one query tile each, as in decoding, in the registers of the
/// first warp.
template <class Plan>
__device__ inline void make_small_plan(const AttentionParams& p, Plan& plan) {
  using Count = std::remove_reference_t<decltype(plan.split_begin[0])>;
  const int u = static_cast<int>(threadIdx.x);
  const int count = p.num_query_tiles;
  const bool is_query_tile = u < count;
  int kv_tiles = 0;
  if (is_query_tile) kv_tiles = plan_query_tile(p, plan, u, span_of<Plan::kCalls>(p, u, 0, query_rows(p, u)));
  const int total = __reduce_add_sync(~0u, kv_tiles);
  const int spare = spare_blocks<Plan>(p);
  const int splits =
      is_query_tile && spare >= 0 ? splits_for<typename Plan::Limits>(kv_tiles, spare, total) : 1;
  const int longest = __reduce_max_sync(~0u, (kv_tiles + splits - 1) / splits);
  const int kv_tiles_before = sum_before(kv_tiles);
  const int splits_before = sum_before(splits);
  if (u <= count) {
    plan.kv_tile_begin[u] = kv_tiles_before;
    plan.split_begin[u] = static_cast<Count>(splits_before);
  }
  if (count == kWarp && u == kWarp - 1) {
    plan.kv_tile_begin[kWarp] = total;
    plan.split_begin[kWarp] = static_cast<Count>(splits_before + splits);
  }
  if (u == 0) {
    const int all = total * Plan::kv_heads(p);
    plan.even_items = even_work_items<Plan>(p, all);
    plan.is_one_split_each = spare >= 0 && are_splits_short<Plan>(longest, plan.even_items, all);
    if constexpr (Plan::kDeals) plan.is_dealt = false;
  }
}

/// Makes the plan of any launch; all threads of the block.
template <class Plan>
__device__ inline void make_large_plan(const AttentionParams& p, Plan& plan) {
  using Count = std::remove_reference_t<decltype(plan.query_tile_begin[0])>;
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  if (!p.is_one_query_tile_each) {
    for (int t = thread; t < p.num_tokens; t += threads) prefetch_line(p.positions + p.first_token + t);
#pragma unroll 1
    for (int b = thread; b < p.num_sequences; b += threads) {
      const int skipped = b == 0 ? p.first_query_tile : 0;
      const int tiles = (query_rows(p, b) + p.query_tile_rows - 1) / p.query_tile_rows - skipped;
      plan.query_tile_begin[b] =
          static_cast<Count>(min(tiles, kMaxQueryTiles));  // other launches have the rest
    }
    __syncthreads();
    if (thread < kWarp) exclusive_sum(plan.query_tile_begin, p.num_sequences);
    __syncthreads();
  }
#pragma unroll 1
  for (int u = thread; u < p.num_query_tiles; u += threads)
    plan.kv_tile_begin[u] = plan_query_tile(p, plan, u, span_of_tile(p, plan, u));
  __syncthreads();
  if constexpr (Plan::kDeals) {
    if (thread == 0) plan.is_dealt = false;
    if (Plan::may_deal(p)) deal_query_tiles(p, plan);
  }
  if (thread < kWarp) {
    exclusive_sum(plan.kv_tile_begin, p.num_query_tiles);
    assign_splits(p, plan);
  }
}

/// make_large_plan() as a function call.
template <class Plan>
__device__ __noinline__ void call_large_plan(const AttentionParams& p, Plan& plan) {
  make_large_plan(p, plan);
}

/// Fills the plan; all threads of the block.
template <class Plan>
__device__ inline void make_plan(const AttentionParams& p, Plan& plan) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  bool is_small = p.is_one_query_tile_each && p.num_query_tiles <= kWarp;
  if constexpr (Plan::kDeals) is_small = is_small && !Plan::may_deal(p);
  if (is_small) {
    if (thread < kWarp) {
      make_small_plan(p, plan);
    } else {
      prefetch_queries(p, thread - kWarp, threads - kWarp);
    }
  } else {
    prefetch_queries(p, thread, threads);
    if constexpr (Plan::kCalls) {
      call_large_plan(p, plan);
    } else {
      make_large_plan(p, plan);
    }
  }
  __syncthreads();
}

}  // namespace helix::cuda
