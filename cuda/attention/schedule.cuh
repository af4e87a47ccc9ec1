// SPDX-License-Identifier: Apache-2.0
// Which thread block of an attention kernel multiplies which keys and values.
//
// Query rows are cut into query tiles, and the local tokens that any row of a query tile sees into KV tiles
// of a size that the kernel chooses. The work of a launch is the list of all KV tiles: of each query tile, of
// each KV head. Each block of a persistent grid takes one work item, consecutive KV tiles of that list; what
// it takes of one query tile and KV head is a KV split. One sequence of a million tokens is thus cut into as
// many splits as there are blocks, and a ragged batch fills the chip as well. Each block computes the
// schedule itself from device memory.
//
// Work items of equal length have at most one KV tile of imbalance, but one may end a query tile and begin
// another, and a query tile's epilogue takes as long as some KV tiles. Where there are enough blocks for the
// query tiles, each work item is therefore a single split, as long as none gets longer than that by it.
//
// A kernel may have two blocks take one work item, half of the query rows each: "block" below is then a pair.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/params.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

inline constexpr int kCombineBatch = 16;  ///< Split partials that are combined in one trip to memory.

/// How finely KV is split, for KV tiles of 32 tokens and query tiles of up to 32 rows.
struct ShortTileLimits {
  static constexpr int kEpilogueTiles = 8;  ///< KV tiles read in the time of a query tile's epilogue.
  /// KV tiles of a split at least, where up to kCombineBatch splits share a query tile. More splits read
  /// faster and take longer to combine: one KV head of 2048 tokens takes 8.3 us in 16 splits of 4 KV tiles
  /// and 8.7 in 8 of 8, of 8192 tokens 10.3 in 32 of 8 and 11.8 in 64 of 4 (H200).
  static constexpr int kShortSplitTiles = 4;
  static constexpr int kSplitTiles = 8;  ///< KV tiles of a split at least, where there are more splits.
  static constexpr int kWholeTiles = 0;  ///< KV tiles of a query tile that is not split at most.
  static constexpr int kPairTiles = 0;   ///< KV tiles of a query tile that is cut in two at most, above that.
  /// KV tiles of no tokens behind those of each query tile, where its epilogue takes as long as these and
  /// work items hold many query tiles: such items would not be of equal length.
  static constexpr int kPaddingTiles = 0;
};

/// The same for blocks that have an SM of their own, for KV tiles of kTokens tokens: their warps read several
/// KV tiles at a time, so that few tokens take less time than a trip to memory to combine splits, and a few
/// more are better cut for a pair of blocks, which need no trip. Decode steps of 8 layers: one sequence of
/// 330 tokens whole 1.198 ms, in a pair 1.190; of 750 in a pair 1.219, in six splits 1.210; eight of 512
/// whole 1.287, in pairs 1.257 (H200).
template <int kTokens>
struct WholeSmLimits : ShortTileLimits {
  static constexpr int kWholeTiles = 256 / kTokens;
  static constexpr int kPairTiles = 640 / kTokens;
};

/// A query tile and the keys that any of its rows sees.
struct QueryTileSpan {
  QueryTile query_tile;
  std::int64_t first_page;  ///< Place in the page lists of the sequence's first page.
  int begin_token;          ///< Local token where the keys begin.
  int end_token;            ///< Local token where the keys end.
};

/// What the schedule of every kernel is made of, in shared memory, for KV tiles of kTokens tokens. `u` is a
/// query tile of the launch; `Count` holds numbers of query tiles and of splits.
template <int kTokens, class TheLimits, int kBlocks, class Count>
struct AttentionLists {
  using Limits = TheLimits;
  static constexpr int kKvTileTokens = kTokens;

  int kv_tile_begin[kMaxQueryTiles + 1];      ///< KV tiles of one KV head before each query tile.
  Count query_tile_begin[kMaxSequences + 1];  ///< First query tile of each sequence, of the launch's.
  /// KV splits of one KV head before each query tile, if is_one_split_each.
  Count split_begin[kMaxQueryTiles + 1];
  bool is_one_split_each;  ///< Whether each work item is one KV split: of one query tile only.

  __device__ int kv_tiles(int u) const { return kv_tile_begin[u + 1] - kv_tile_begin[u]; }
  __device__ int splits(int u) const { return split_begin[u + 1] - split_begin[u]; }
  /// Blocks of the grid, or pairs.
  static __device__ int num_blocks() { return static_cast<int>(gridDim.x) / kBlocks; }
};

/// The schedule, with all that is known of the query tiles.
template <int kTokens, class TheLimits = ShortTileLimits>
struct AttentionPlan : AttentionLists<kTokens, TheLimits, 1, int> {
  QueryTile query_tiles[kMaxQueryTiles];
  std::int64_t first_page[kMaxQueryTiles];  ///< As in QueryTileSpan, as the following.
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

/// The schedule in 2 KB, for kernels whose tiles fill the shared memory: span_of() says the rest again.
template <int kTokens, class TheLimits, int kBlocks>
struct SmallAttentionPlan : AttentionLists<kTokens, TheLimits, kBlocks, std::uint16_t> {
  __device__ void keep(int, const QueryTileSpan&) {}
};

/// Numbers 0 .. total - 1 in `parts` ranges, the first ones longer by one.
struct EvenPartition {
  int parts;
  int length;
  int longer;  ///< Ranges that have one more.

  __device__ EvenPartition(int total, int the_parts)
      : parts(the_parts), length(total / the_parts), longer(total - length * the_parts) {}
  __device__ int begin(int part) const { return part * length + min(part, longer); }
  __device__ int part_of(int i) const {
    const int in_longer = longer * (length + 1);
    return i < in_longer ? i / (length + 1) : longer + (i - in_longer) / length;
  }
};

/// Sum of x over the lanes before this one.
__device__ inline int sum_before(int x) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int sum = x;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int other = __shfl_up_sync(~0u, sum, offset);
    if (lane >= offset) sum += other;
  }
  return sum - x;
}

/// Exclusive sums in place over x[0, n], x[n] the total, by the first warp.
template <class Count>
__device__ inline void exclusive_sum(Count* x, int n) {
  const int lane = static_cast<int>(threadIdx.x);
  int before = 0;
#pragma unroll 1
  for (int i = 0; i < n; i += kWarp) {
    const int value = i + lane < n ? x[i + lane] : 0;
    const int sum = before + sum_before(value);
    if (i + lane < n) x[i + lane] = static_cast<Count>(sum);
    before = __shfl_sync(~0u, sum + value, kWarp - 1);
  }
  if (lane == 0) x[n] = static_cast<Count>(before);
  __syncwarp();
}

/// Largest i with x[i] <= value, in x[0, n].
template <class Count>
__device__ inline int find_last(const Count* x, int n, int value) {
  int low = 0;
  int high = n;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (x[middle] <= value ? low : high) = middle;
  }
  return low;
}

/// KV splits that `kv_tiles` KV tiles are worth.
template <class Limits>
__device__ inline int max_splits(int kv_tiles) {
  if (kv_tiles <= Limits::kWholeTiles) return 1;
  if (kv_tiles <= Limits::kPairTiles) return 2;
  return kv_tiles <= kCombineBatch * Limits::kShortSplitTiles
             ? (kv_tiles + Limits::kShortSplitTiles - 1) / Limits::kShortSplitTiles
             : max(kCombineBatch, (kv_tiles + Limits::kSplitTiles - 1) / Limits::kSplitTiles);
}

/// Work items of equal length into which a list of `kv_tiles` KV tiles is cut.
template <class Plan>
__device__ inline int even_work_items(int kv_tiles) {
  return min(Plan::num_blocks(), max_splits<typename Plan::Limits>(kv_tiles));
}

/// KV splits for a query tile of one KV head, in proportion to its KV tiles: at least one, and not more in
/// all than one for each query tile and `spare` beside. `total` is the KV tiles of all.
template <class Limits>
__device__ inline int splits_for(int kv_tiles, int spare, int total) {
  const int shift = max(0, 9 - __clz(total));  // so that the product fits
  const unsigned part = static_cast<unsigned>(kv_tiles >> shift) * static_cast<unsigned>(spare);
  return min(1 + static_cast<int>(part / static_cast<unsigned>(total >> shift)),
             max_splits<Limits>(kv_tiles));
}

/// Whether splits of up to `longest` KV tiles are not too long beside work items of equal length.
template <class Plan>
__device__ inline bool are_splits_short(const AttentionParams& p, int longest, int total) {
  const int all = total * p.kv_heads;
  return std::int64_t{longest - Plan::Limits::kEpilogueTiles - 1} * even_work_items<Plan>(all) <
         all;  // <= all / items, rounded up
}

/// Blocks of a KV head beside one for each query tile; negative if there are too few.
template <class Plan>
__device__ inline int spare_blocks(const AttentionParams& p) {
  return Plan::num_blocks() / p.kv_heads - p.num_query_tiles;
}

/// Cuts each query tile into KV splits with a block each, if that keeps them short; by the first warp.
template <class Plan>
__device__ inline void assign_splits(const AttentionParams& p, Plan& plan) {
  using Count = std::remove_reference_t<decltype(plan.split_begin[0])>;
  const int lane = static_cast<int>(threadIdx.x);
  const int total = plan.kv_tile_begin[p.num_query_tiles];
  const int spare = spare_blocks<Plan>(p);
  int longest = 0;
#pragma unroll 1
  for (int u = lane; u < p.num_query_tiles && spare >= 0; u += kWarp) {
    const int splits = splits_for<typename Plan::Limits>(plan.kv_tiles(u), spare, total);
    plan.split_begin[u] = static_cast<Count>(splits);
    longest = max(longest, (plan.kv_tiles(u) + splits - 1) / splits);
  }
  longest = __reduce_max_sync(~0u, longest);
  const bool is_one_split_each = spare >= 0 && are_splits_short<Plan>(p, longest, total);
  if (lane == 0) plan.is_one_split_each = is_one_split_each;
  __syncwarp();
  if (is_one_split_each) exclusive_sum(plan.split_begin, p.num_query_tiles);
}

/// Asks for this block's share of the queries, by `threads` threads of which this is number `thread`.
__device__ inline void prefetch_queries(const AttentionParams& p, int thread, int threads) {
  constexpr int kLineBytes = 128;
  const int element_bytes = p.dtype == DType::f32 ? 4 : 2;
  const int lines = (p.head_dim * element_bytes + kLineBytes - 1) / kLineBytes;
  const int heads = p.kv_heads * p.group;
  const int count = p.num_tokens * heads * lines;
  const auto* q = static_cast<const std::byte*>(p.q);
  for (int i = static_cast<int>(blockIdx.x) * threads + thread; i < count;
       i += static_cast<int>(gridDim.x) * threads) {
    const int row = i / lines;
    const std::int64_t at = (p.first_token + row / heads) * p.q_token_stride + row % heads * p.q_head_stride;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(q + at * element_bytes + i % lines * kLineBytes));
  }
}

/// Query rows of sequence `b`, of one KV head.
__device__ inline int query_rows(const AttentionParams& p, int b) {
  return (p.query_offsets[b + 1] - p.query_offsets[b]) * p.group;
}

/// `num_rows` query rows of sequence `b` from `row` on.
__device__ inline QueryTileSpan span_of(const AttentionParams& p, int b, int row, int num_rows) {
  const std::int64_t first_page = p.lists.first_of(p.slots[b]);
  const int first_token = p.query_offsets[b];
  std::int64_t begin = INT64_MAX;
  std::int64_t end = 0;
#pragma unroll 1
  for (int t = row / p.group; t <= (row + num_rows - 1) / p.group; ++t) {
    const TokenRange seen = visible(p, p.positions[first_token + t]);
    if (seen.size() <= 0) continue;
    begin = min(begin, seen.begin);
    end = max(end, seen.end);
  }
  return {
      {first_token, row, num_rows}, first_page, end > 0 ? static_cast<int>(begin) : 0, static_cast<int>(end)};
}

/// Query tile `u` of the launch, which is of sequence `b`.
template <class Plan>
__device__ inline QueryTileSpan span_of_tile(const AttentionParams& p, const Plan& plan, int u, int b) {
  const int skipped = b == 0 ? p.first_query_tile : 0;
  const int row = (u - plan.query_tile_begin[b] + skipped) * p.query_tile_rows;
  return span_of(p, b, row, min(static_cast<int>(p.query_tile_rows), query_rows(p, b) - row));
}

/// Query tile `u` of the launch, for kernels that do not keep it.
template <class Plan>
__device__ inline QueryTileSpan span_of_tile(const AttentionParams& p, const Plan& plan, int u) {
  if (p.is_one_query_tile_each) return span_of(p, u, 0, query_rows(p, u));
  return span_of_tile(p, plan, u, find_last(plan.query_tile_begin, p.num_sequences, u));
}

/// Keeps query tile `u` in the plan. Returns its number of KV tiles.
template <class Plan>
__device__ inline int plan_query_tile(Plan& plan, int u, const QueryTileSpan& span) {
  constexpr int kKvTileTokens = Plan::kKvTileTokens;
  plan.keep(u, span);
  // A query tile that sees nothing has a KV tile of no tokens, so that some block writes its zeros.
  const int first = span.begin_token / kKvTileTokens;
  return max(1, (span.end_token + kKvTileTokens - 1) / kKvTileTokens - first) + Plan::Limits::kPaddingTiles;
}

/// The plan of up to kWarp sequences, each of which is one query tile, as in decoding: all in the registers
/// of the first warp.
template <class Plan>
__device__ inline void make_small_plan(const AttentionParams& p, Plan& plan) {
  using Count = std::remove_reference_t<decltype(plan.split_begin[0])>;
  const int u = static_cast<int>(threadIdx.x);
  const int count = p.num_query_tiles;
  const bool is_query_tile = u < count;
  int kv_tiles = 0;
  if (is_query_tile) kv_tiles = plan_query_tile(plan, u, span_of(p, u, 0, query_rows(p, u)));
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
  if (u == 0) plan.is_one_split_each = spare >= 0 && are_splits_short<Plan>(p, longest, total);
}

/// The plan of any launch; all threads of the block.
template <class Plan>
__device__ inline void make_large_plan(const AttentionParams& p, Plan& plan) {
  using Count = std::remove_reference_t<decltype(plan.query_tile_begin[0])>;
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  for (int t = thread; t < p.num_tokens; t += threads)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.positions + p.first_token + t));
#pragma unroll 1
  for (int b = thread; b < p.num_sequences; b += threads) {
    const int skipped = b == 0 ? p.first_query_tile : 0;
    const int tiles = (query_rows(p, b) + p.query_tile_rows - 1) / p.query_tile_rows - skipped;
    plan.query_tile_begin[b] =
        static_cast<Count>(min(tiles, kMaxQueryTiles));  // the rest is another launch's
  }
  __syncthreads();
  if (thread < kWarp) exclusive_sum(plan.query_tile_begin, p.num_sequences);
  __syncthreads();
#pragma unroll 1
  for (int u = thread; u < p.num_query_tiles; u += threads) {
    const int b = find_last(plan.query_tile_begin, p.num_sequences, u);
    plan.kv_tile_begin[u] = plan_query_tile(plan, u, span_of_tile(p, plan, u, b));
  }
  __syncthreads();
  if (thread < kWarp) {
    exclusive_sum(plan.kv_tile_begin, p.num_query_tiles);
    assign_splits(p, plan);
  }
}

/// Fills the plan; all threads of the block.
template <class Plan>
__device__ inline void make_plan(const AttentionParams& p, Plan& plan) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  if (p.is_one_query_tile_each && p.num_query_tiles <= kWarp) {
    if (thread < kWarp) {
      make_small_plan(p, plan);
    } else {
      prefetch_queries(p, thread - kWarp, threads - kWarp);
    }
  } else {
    prefetch_queries(p, thread, threads);
    make_large_plan(p, plan);
  }
  __syncthreads();
}

/// A walk along the list of KV tiles.
struct KvTileCursor {
  int query_tile;
  int head;
  int kv_tile;       ///< KV tile of the query tile and head.
  int num_kv_tiles;  ///< KV tiles that the query tile and head have.

  /// `count` KV tiles on. At the end of the list it stays past the last query tile.
  template <class Plan>
  __device__ void advance(const AttentionParams& p, const Plan& plan, int count) {
    kv_tile += count;
    while (kv_tile >= num_kv_tiles && query_tile < p.num_query_tiles) {
      kv_tile -= num_kv_tiles;
      if (++head == p.kv_heads) {
        head = 0;
        ++query_tile;
        if (query_tile < p.num_query_tiles) num_kv_tiles = plan.kv_tiles(query_tile);
      }
    }
  }
};

/// What a block takes of the list: consecutive KV tiles, which are a KV split of each query tile and head
/// that they belong to.
struct WorkItem {
  KvTileCursor start;
  int count;  ///< KV tiles.
};

/// The KV splits of one query tile and KV head: block first_block + i takes split i.
struct KvSplits {
  int first_block;
  int count;
};

/// Who takes which KV tiles of the list.
template <class Plan>
class Schedule {
 public:
  __device__ Schedule(const AttentionParams& p, const Plan& plan) : p_(p), plan_(plan) {}

  __device__ WorkItem work_item(int block) const {
    if (plan_.is_one_split_each) {
      if (block >= plan_.split_begin[p_.num_query_tiles] * p_.kv_heads) return {};
      const int u = find_last(plan_.split_begin, p_.num_query_tiles, block / p_.kv_heads);
      const int splits = plan_.splits(u);
      const int rest = block - plan_.split_begin[u] * p_.kv_heads;
      const int head = rest / splits;
      const EvenPartition ranges(plan_.kv_tiles(u), splits);
      const int split = rest - head * splits;
      const int first = ranges.begin(split);
      return {{u, head, first, plan_.kv_tiles(u)}, ranges.begin(split + 1) - first};
    }
    const EvenPartition items = even_items();
    if (block >= items.parts) return {};
    const int first = items.begin(block);
    // kv_tile_begin counts one head's KV tiles; heads repeat them.
    const int u = find_last(plan_.kv_tile_begin, p_.num_query_tiles, first / p_.kv_heads);
    const int rest = first - plan_.kv_tile_begin[u] * p_.kv_heads;
    const int head = rest / plan_.kv_tiles(u);
    return {{u, head, rest - head * plan_.kv_tiles(u), plan_.kv_tiles(u)}, items.begin(block + 1) - first};
  }

  __device__ KvSplits splits_of(int u, int head) const {
    if (plan_.is_one_split_each) {
      const int splits = plan_.splits(u);
      return {plan_.split_begin[u] * p_.kv_heads + head * splits, splits};
    }
    const EvenPartition items = even_items();
    const int begin = plan_.kv_tile_begin[u] * p_.kv_heads + head * plan_.kv_tiles(u);
    const int first = items.part_of(begin);
    return {first, items.part_of(begin + plan_.kv_tiles(u) - 1) - first + 1};
  }

 private:
  __device__ EvenPartition even_items() const {
    const int total = plan_.kv_tile_begin[p_.num_query_tiles] * p_.kv_heads;
    return {total, even_work_items<Plan>(total)};
  }

  const AttentionParams& p_;
  const Plan& plan_;
};

}  // namespace helix::cuda
