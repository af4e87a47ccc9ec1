// SPDX-License-Identifier: Apache-2.0
// Which block of an attention kernel multiplies what.
//
// Work is a list of tiles: for each row block and each KV head, the tiles (kTileTokens local tokens, as many
// as the kernel likes) that any of the rows sees. Each block of a persistent grid takes a run of that list,
// so that one sequence of a million tokens and a ragged batch both fill the chip. Blocks compute the schedule
// themselves from device memory.
//
// Equal runs have at most one tile of imbalance, but one run may end a row block and begin another, and the
// end of a row block takes as long as kEndTiles tiles. Where there are enough blocks for the row blocks, each
// block therefore takes part in one of them only, as long as no run gets longer than that by it.
#pragma once

#include <cstdint>

#include "cuda/attention/params.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

inline constexpr int kEndTiles = 8;       ///< that are read in the time in which a row block ends
inline constexpr int kMergeBatch = 16;    ///< blocks whose results are merged in one trip to memory
inline constexpr int kShortRunTiles = 4;  ///< at least, of each of up to kMergeBatch blocks
inline constexpr int kRunTiles = 8;       ///< at least, of each of more

/// The schedule, in shared memory, for tiles of kTokens tokens. `u` is a row block of the launch.
template <int kTokens>
struct AttentionPlan {
  static constexpr int kTileTokens = kTokens;

  int row_block_begin[kMaxSequences + 1];  ///< of each sequence
  int tile_begin[kMaxRowBlocks + 1];       ///< tiles of one KV head before each row block
  int share_begin[kMaxRowBlocks + 1];      ///< blocks of one KV head before each row block, if has_shares
  RowBlock rows[kMaxRowBlocks];
  std::int64_t first_page[kMaxRowBlocks];  ///< place in the page lists of the sequence's first page
  int begin_token[kMaxRowBlocks];          ///< local token where the row block's keys begin
  int end_token[kMaxRowBlocks];            ///< and where they end
  bool has_shares;                         ///< no block works on two row blocks

  /// First token of the first tile; tiles lie at multiples of kTileTokens.
  __device__ int first_token_of_tiles(int u) const { return begin_token[u] / kTileTokens * kTileTokens; }
  __device__ int tiles(int u) const { return tile_begin[u + 1] - tile_begin[u]; }
  __device__ int share(int u) const { return share_begin[u + 1] - share_begin[u]; }
};

/// Numbers 0 .. total - 1 in `parts` runs, the first ones longer by one.
struct EqualRuns {
  int parts;
  int length;
  int longer;  ///< runs that have one more

  __device__ EqualRuns(int total, int the_parts)
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
__device__ inline void exclusive_sum(int* x, int n) {
  const int lane = static_cast<int>(threadIdx.x);
  int before = 0;
#pragma unroll 1
  for (int i = 0; i < n; i += kWarp) {
    const int value = i + lane < n ? x[i + lane] : 0;
    const int sum = before + sum_before(value);
    if (i + lane < n) x[i + lane] = sum;
    before = __shfl_sync(~0u, sum + value, kWarp - 1);
  }
  if (lane == 0) x[n] = before;
  __syncwarp();
}

/// Largest i with x[i] <= value, in x[0, n].
__device__ inline int find_last(const int* x, int n, int value) {
  int low = 0;
  int high = n;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (x[middle] <= value ? low : high) = middle;
  }
  return low;
}

/// Blocks that `tiles` tiles are worth. More of them read faster and take longer to merge: one KV head of
/// 2048 tokens takes 8.3 us in 16 runs of 4 tiles and 8.7 in 8 of 8, of 8192 tokens 10.3 in 32 of 8 and 11.8
/// in 64 of 4 (H200).
__device__ inline int most_blocks(int tiles) {
  return tiles <= kMergeBatch * kShortRunTiles ? (tiles + kShortRunTiles - 1) / kShortRunTiles
                                               : max(kMergeBatch, (tiles + kRunTiles - 1) / kRunTiles);
}

/// Blocks that share `tiles` tiles in equal runs.
__device__ inline int equal_runs(int tiles) {
  return min(static_cast<int>(gridDim.x), most_blocks(tiles));
}

/// Blocks for a row block of one KV head, in proportion to its tiles: at least one, and not more in all than
/// one for each row block and `spare` beside. `total` is the tiles of all.
__device__ inline int blocks_for(int tiles, int spare, int total) {
  const int shift = max(0, 9 - __clz(total));  // so that the product fits
  const unsigned part = static_cast<unsigned>(tiles >> shift) * static_cast<unsigned>(spare);
  return min(1 + static_cast<int>(part / static_cast<unsigned>(total >> shift)), most_blocks(tiles));
}

/// Whether runs of up to `longest` tiles are not too long beside the equal ones.
__device__ inline bool are_runs_short(const AttentionParams& p, int longest, int total) {
  const int all = total * p.kv_heads;
  return std::int64_t{longest - kEndTiles - 1} * equal_runs(all) < all;  // <= all / runs, rounded up
}

/// Blocks of a KV head beside one for each row block; negative if there are too few.
__device__ inline int spare_blocks(const AttentionParams& p) {
  return static_cast<int>(gridDim.x) / p.kv_heads - p.num_row_blocks;
}

/// Gives each row block blocks of its own, if that keeps the runs short; by the first warp.
template <class Plan>
__device__ inline void share_blocks(const AttentionParams& p, Plan& plan) {
  const int lane = static_cast<int>(threadIdx.x);
  const int total = plan.tile_begin[p.num_row_blocks];
  const int spare = spare_blocks(p);
  int longest = 0;
#pragma unroll 1
  for (int u = lane; u < p.num_row_blocks && spare >= 0; u += kWarp) {
    const int share = blocks_for(plan.tiles(u), spare, total);
    plan.share_begin[u] = share;
    longest = max(longest, (plan.tiles(u) + share - 1) / share);
  }
  longest = __reduce_max_sync(~0u, longest);
  const bool has_shares = spare >= 0 && are_runs_short(p, longest, total);
  if (lane == 0) plan.has_shares = has_shares;
  __syncwarp();
  if (has_shares) exclusive_sum(plan.share_begin, p.num_row_blocks);
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

/// Fills in row block `u`: `num_rows` rows of sequence `b` from `row` on. Returns its number of tiles.
template <class Plan>
__device__ inline int plan_row_block(const AttentionParams& p, Plan& plan, int u, int b, int row,
                                     int num_rows) {
  constexpr int kTileTokens = Plan::kTileTokens;
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
  plan.rows[u] = {first_token, row, num_rows};
  plan.first_page[u] = first_page;
  plan.begin_token[u] = end > 0 ? static_cast<int>(begin) : 0;
  plan.end_token[u] = static_cast<int>(end);
  // A row block that sees nothing has a tile of no tokens, so that somebody writes its zeros.
  const int first = plan.begin_token[u] / kTileTokens;
  return max(1, static_cast<int>((end + kTileTokens - 1) / kTileTokens) - first);
}

/// The plan of up to kWarp sequences, each of which is one row block, as in decoding: all in the registers of
/// the first warp.
template <class Plan>
__device__ inline void make_small_plan(const AttentionParams& p, Plan& plan) {
  const int u = static_cast<int>(threadIdx.x);
  const int count = p.num_row_blocks;
  const bool is_row_block = u < count;
  int tiles = 0;
  if (is_row_block) tiles = plan_row_block(p, plan, u, u, 0, query_rows(p, u));
  const int total = __reduce_add_sync(~0u, tiles);
  const int spare = spare_blocks(p);
  const int share = is_row_block && spare >= 0 ? blocks_for(tiles, spare, total) : 1;
  const int longest = __reduce_max_sync(~0u, (tiles + share - 1) / share);
  const int tiles_before = sum_before(tiles);
  const int shares_before = sum_before(share);
  if (u <= count) {
    plan.tile_begin[u] = tiles_before;
    plan.share_begin[u] = shares_before;
  }
  if (count == kWarp && u == kWarp - 1) {
    plan.tile_begin[kWarp] = total;
    plan.share_begin[kWarp] = shares_before + share;
  }
  if (u == 0) plan.has_shares = spare >= 0 && are_runs_short(p, longest, total);
}

/// The plan of any launch; all threads of the block.
template <class Plan>
__device__ inline void make_large_plan(const AttentionParams& p, Plan& plan) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  for (int t = thread; t < p.num_tokens; t += threads)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.positions + p.first_token + t));
#pragma unroll 1
  for (int b = thread; b < p.num_sequences; b += threads)
    plan.row_block_begin[b] = (query_rows(p, b) + p.rows - 1) / p.rows;
  __syncthreads();
  if (thread < kWarp) exclusive_sum(plan.row_block_begin, p.num_sequences);
  __syncthreads();
#pragma unroll 1
  for (int u = thread; u < p.num_row_blocks; u += threads) {
    const int b = find_last(plan.row_block_begin, p.num_sequences, u + p.first_row_block);
    const int row = (u + p.first_row_block - plan.row_block_begin[b]) * p.rows;
    plan.tile_begin[u] =
        plan_row_block(p, plan, u, b, row, min(static_cast<int>(p.rows), query_rows(p, b) - row));
  }
  __syncthreads();
  if (thread < kWarp) {
    exclusive_sum(plan.tile_begin, p.num_row_blocks);
    share_blocks(p, plan);
  }
}

/// Fills the plan; all threads of the block.
template <class Plan>
__device__ inline void make_plan(const AttentionParams& p, Plan& plan) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  if (p.is_one_row_block_each && p.num_row_blocks <= kWarp) {
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

/// A walk along the list of tiles.
struct TileCursor {
  int row_block;
  int head;
  int tile;   ///< of the row block and head
  int tiles;  ///< that these have

  /// `count` tiles on. At the end of the list it stays past the last row block.
  template <class Plan>
  __device__ void advance(const AttentionParams& p, const Plan& plan, int count) {
    tile += count;
    while (tile >= tiles && row_block < p.num_row_blocks) {
      tile -= tiles;
      if (++head == p.kv_heads) {
        head = 0;
        ++row_block;
        if (row_block < p.num_row_blocks) tiles = plan.tiles(row_block);
      }
    }
  }
};

/// A block's tiles.
struct TileRun {
  TileCursor start;
  int count;
};

/// The blocks that work on one row block of one KV head.
struct BlockRun {
  int first;
  int count;
};

/// Who takes which tiles of the list.
template <class Plan>
class Schedule {
 public:
  __device__ Schedule(const AttentionParams& p, const Plan& plan) : p_(p), plan_(plan) {}

  __device__ TileRun tiles_of(int block) const {
    if (plan_.has_shares) {
      if (block >= plan_.share_begin[p_.num_row_blocks] * p_.kv_heads) return {};
      const int u = find_last(plan_.share_begin, p_.num_row_blocks, block / p_.kv_heads);
      const int share = plan_.share(u);
      const int rest = block - plan_.share_begin[u] * p_.kv_heads;
      const int head = rest / share;
      const EqualRuns runs(plan_.tiles(u), share);
      const int part = rest - head * share;
      const int first = runs.begin(part);
      return {{u, head, first, plan_.tiles(u)}, runs.begin(part + 1) - first};
    }
    const EqualRuns runs = equal();
    if (block >= runs.parts) return {};
    const int first = runs.begin(block);
    // tile_begin counts one head's tiles; heads repeat them.
    const int u = find_last(plan_.tile_begin, p_.num_row_blocks, first / p_.kv_heads);
    const int rest = first - plan_.tile_begin[u] * p_.kv_heads;
    const int head = rest / plan_.tiles(u);
    return {{u, head, rest - head * plan_.tiles(u), plan_.tiles(u)}, runs.begin(block + 1) - first};
  }

  __device__ BlockRun blocks_of(int u, int head) const {
    if (plan_.has_shares) {
      const int share = plan_.share(u);
      return {plan_.share_begin[u] * p_.kv_heads + head * share, share};
    }
    const EqualRuns runs = equal();
    const int begin = plan_.tile_begin[u] * p_.kv_heads + head * plan_.tiles(u);
    const int first = runs.part_of(begin);
    return {first, runs.part_of(begin + plan_.tiles(u) - 1) - first + 1};
  }

 private:
  __device__ EqualRuns equal() const {
    const int total = plan_.tile_begin[p_.num_row_blocks] * p_.kv_heads;
    return {total, equal_runs(total)};
  }

  const AttentionParams& p_;
  const Plan& plan_;
};

}  // namespace helix::cuda
