// SPDX-License-Identifier: Apache-2.0
// Which thread block multiplies which KV tiles, in the kernel for many query rows: whole query tiles first,
// then even shares.
//
// Splitting large query tiles costs a combine, and blocks that walk the same keys at different times read
// them from memory again and again. So the items, a query tile and KV head each, are dealt out to the blocks
// whole, in waves, the longest first, in alternating direction. The blocks of a wave are at the same keys at
// the same time, which then come from the L2 cache. If the L2 cache does not hold the keys and values of all
// KV heads, items are dealt out in passes of some heads: 64 heads over 8, 4096 tokens after 28672, take 6416
// us by single heads, 6738 by all; 99 % of the reads hit the L2 cache, instead of 83 %. When another wave
// would make some block late, the rest is a list of KV tiles as in schedule.cuh, cut into consecutive shares
// that bring all blocks to the same number of KV tiles.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/attention/local_tokens.hpp"
#include "cuda/attention/schedule.cuh"

namespace helix::cuda {

inline constexpr int kMaxWaveQueryTiles = 512;  ///< Query tiles of one launch.
inline constexpr int kMaxWaveBlocks = 256;
inline constexpr int kWaveSplitTiles = 2;  ///< Fewest KV tiles of a share, on average.
/// KV tiles that a split and its combine cost. If all query tiles stay whole, a block may exceed the even
/// share by as many.
inline constexpr int kWaveSlackTiles = 3;
inline constexpr int kWaveSlackPart = 24;  ///< Or by the even share over this number.

/// Most bytes of keys and values in a pass, counted as of 16 bits: half of an H200's L2 cache, because each
/// half of its SMs keeps a copy.
inline constexpr std::int64_t kWavePassBytes = std::int64_t{24} << 20;
/// Waves that even out a pass of query tiles of different lengths.
inline constexpr int kWavePassWaves = 4;

/// The schedule, in shared memory, for KV tiles of kTokens tokens. `u` is a query tile of the launch, counted
/// backwards from the last one of the batch, because the last ones see most.
template <int kTokens>
struct WavePlan {
  static constexpr int kKvTileTokens = kTokens;
  static_assert(kTokens >= kMinKvTileTokens);

  std::int64_t first_page[kMaxWaveQueryTiles];  ///< Index of the sequence's first page in the page lists.
  QueryTile query_tiles[kMaxWaveQueryTiles];
  int begin_token[kMaxWaveQueryTiles];        ///< Local token where the query tile's keys begin.
  int end_token[kMaxWaveQueryTiles];          ///< Local token where the query tile's keys end.
  int kv_tile_begin[kMaxWaveQueryTiles + 1];  ///< KV tiles of one KV head before each query tile.
  /// First query tile of each sequence, in order of the batch.
  int query_tile_begin[kMaxLaunchSequences + 1];
  int share_begin[kMaxWaveBlocks + 1];  ///< KV tiles of the list of shares before each block's.
  int least_kv_tiles;                   ///< Fewest KV tiles of a query tile.
  int most_kv_tiles;                    ///< Most KV tiles of a query tile.
  int pass_heads;                       ///< KV heads of a pass; divides the number of all.
  int workers;                          ///< Blocks that have work.
  int longest;                          ///< Most KV tiles of a block if all query tiles stay whole.
  int even_waves;                       ///< Waves after which no block has more than its even share.
  int waves;                            ///< Whole query tiles and heads that each block takes.
  int first_shared;                     ///< KV tiles of all passes before the list of shares.

  __device__ int first_kv_tile_token(int u) const { return begin_token[u] / kTokens * kTokens; }
  __device__ int kv_tiles(int u) const { return kv_tile_begin[u + 1] - kv_tile_begin[u]; }
};

/// A query tile and a KV head.
struct WaveItem {
  int query_tile;
  int head;
};

/// Item `item` in the order of dealing: by pass, then by query tile, then by head.
template <class Plan>
__device__ inline WaveItem wave_item(const AttentionParams& p, const Plan& plan, int item) {
  const int pass_items = p.num_query_tiles * plan.pass_heads;
  const int pass = item / pass_items;
  const int in_pass = item - pass * pass_items;
  const int u = in_pass / plan.pass_heads;
  return {u, pass * plan.pass_heads + in_pass - u * plan.pass_heads};
}

/// The item of worker `block` in a wave. Waves alternate in direction, so that items of falling lengths add
/// up to equal sums.
__device__ inline int wave_place(int wave, int workers, int block) {
  return wave * workers + (wave % 2 == 0 ? block : workers - 1 - block);
}

/// Fills in query tile `u`, by kLanes neighbouring lanes, each of which reads some of its tokens' positions.
template <int kLanes, class Plan>
__device__ inline void plan_wave_tile(const AttentionParams& p, Plan& plan, int u) {
  constexpr int kTokens = Plan::kKvTileTokens;
  constexpr int kLoads = 4;  // positions that a lane loads at once
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int in_batch = p.first_query_tile + p.num_query_tiles - 1 - u;
  const int b = find_last(plan.query_tile_begin, p.num_sequences, in_batch);
  const int row = (in_batch - plan.query_tile_begin[b]) * p.query_tile_rows;
  const QueryTile query_tile{p.query_offsets[b], row,
                             ::min(static_cast<int>(p.query_tile_rows), query_rows(p, b) - row)};
  const std::int32_t slot = p.sequence_slots[b];
  const int last = query_tile.token(p, query_tile.num_rows - 1);
  int begin = INT_MAX;
  int end = 0;
#pragma unroll 1
  for (int token = query_tile.token(p, 0) + lane; token <= last; token += kLoads * kLanes) {
    std::int64_t positions[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) positions[i] = p.positions[::min(token + i * kLanes, last)];
#pragma unroll 1
    for (int i = 0; i < kLoads; ++i) {
      const TokenRange seen = visible(p, positions[0]);
#pragma unroll
      for (int k = 0; k + 1 < kLoads; ++k) positions[k] = positions[k + 1];
      if (seen.size() <= 0) continue;
      begin = ::min(begin, static_cast<int>(seen.begin));
      end = ::max(end, static_cast<int>(seen.end));
    }
  }
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    begin = ::min(begin, __shfl_xor_sync(~0u, begin, offset));
    end = ::max(end, __shfl_xor_sync(~0u, end, offset));
  }
  if (end == 0) begin = 0;
  if (lane != 0) return;
  plan.query_tiles[u] = query_tile;
  plan.first_page[u] = end > 0 ? p.lists.first_of(slot) : 0;  // the slot of padding may be anything
  plan.begin_token[u] = begin;
  plan.end_token[u] = end;
  // A query tile that sees nothing has a KV tile of no tokens, so that some block writes its zeros.
  const int kv_tiles = ::max(1, (end + kTokens - 1) / kTokens - begin / kTokens);
  plan.kv_tile_begin[u] = kv_tiles;
  atomicMin(&plan.least_kv_tiles, kv_tiles);
  atomicMax(&plan.most_kv_tiles, kv_tiles);
}

/// KV heads of a pass. Fewer heads are fewer items, which must then be of similar length, or many, or waves
/// would be uneven (16 heads of D = 192, 4096 tokens without a context: 221 us by 8 heads, 158 by all).
template <class Plan>
__device__ inline int pass_heads(const AttentionParams& p, const Plan& plan) {
  const int even_heads = 2 * plan.least_kv_tiles >= plan.most_kv_tiles
                             ? 1
                             : kWavePassWaves * static_cast<int>(gridDim.x) / p.num_query_tiles + 1;
  const std::int64_t head_bytes =
      std::int64_t{plan.most_kv_tiles} * Plan::kKvTileTokens * (p.head_dim + p.value_dim) * 2;
  int heads = p.kv_heads;
  while (heads % 2 == 0 && heads / 2 >= even_heads && heads * head_bytes > kWavePassBytes) heads /= 2;
  return heads;
}

/// KV tiles before those of `item` in the order of dealing.
template <class Plan>
__device__ inline int tiles_before(const AttentionParams& p, const Plan& plan, WaveItem item) {
  const int in_pass = item.head % plan.pass_heads;
  return (item.head - in_pass) * plan.kv_tile_begin[p.num_query_tiles] +
         plan.kv_tile_begin[item.query_tile] * plan.pass_heads + in_pass * plan.kv_tiles(item.query_tile);
}

/// Deals out whole query tiles, and the rest in shares; all threads of the block, more than kMaxWaveBlocks.
template <class Plan>
__device__ inline void plan_waves(const AttentionParams& p, Plan& plan) {
  const int block = static_cast<int>(threadIdx.x);
  const int items = p.num_query_tiles * p.kv_heads;
  const int total = plan.kv_tile_begin[p.num_query_tiles] * p.kv_heads;
  const int grid = ::min(static_cast<int>(gridDim.x), kMaxWaveBlocks);
  const int workers = ::min(grid, ::max(::min(grid, items), (total + kWaveSplitTiles - 1) / kWaveSplitTiles));
  const int even = total / workers;
  const auto add_wave = [&](int wave, int sum) {
    const int item = wave_place(wave, workers, block);
    return item < items ? sum + plan.kv_tiles(wave_item(p, plan, item).query_tile) : sum;
  };
  const int whole_waves = items / workers;
  const int all_waves = (items + workers - 1) / workers;
  if (block < workers) {
    int waves = 0;
    int sum = 0;
    for (int wave = 0; wave < all_waves; ++wave) {
      sum = add_wave(wave, sum);
      if (wave < whole_waves && sum < even) waves = wave + 1;
    }
    atomicMax(&plan.longest, sum);
    atomicMin(&plan.even_waves, waves);
  }
  __syncthreads();
  const bool are_all_whole = plan.longest <= even + ::max(kWaveSlackTiles, even / kWaveSlackPart);
  const int waves = are_all_whole ? all_waves : plan.even_waves;
  if (block < workers) {
    int sum = 0;
    for (int wave = 0; wave < waves && !are_all_whole; ++wave) sum = add_wave(wave, sum);
    plan.share_begin[block] = are_all_whole ? 0 : even - sum + (block < total - even * workers ? 1 : 0);
  }
  if (block == 0) {
    plan.workers = workers;
    plan.waves = waves;
    plan.share_begin[workers] = 0;
    const int first = ::min(items, waves * workers);
    plan.first_shared = first < items ? tiles_before(p, plan, wave_item(p, plan, first)) : total;
  }
  __syncthreads();
  if (are_all_whole) return;
  if (block < kWarp) exclusive_sum(plan.share_begin, workers);
  __syncthreads();
}

/// Fills the plan; all threads of the block, a multiple of 32.
template <class Plan>
__device__ inline void make_wave_plan(const AttentionParams& p, Plan& plan) {
  constexpr int kLanes = 4;  // lanes for a query tile
  constexpr int kLinePositions = 16;
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  // All loads are in flight together, in one trip to memory; the reads below find them in the L1 cache.
  for (int t = thread * kLinePositions; t < p.num_tokens; t += threads * kLinePositions) {
    std::int64_t ignored;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(ignored) : "l"(p.positions + p.first_token + t));
  }
  for (int b = thread; b < p.num_sequences; b += threads)
    plan.query_tile_begin[b] = (query_rows(p, b) + p.query_tile_rows - 1) / p.query_tile_rows;
  if (thread == 0) {
    plan.least_kv_tiles = INT_MAX;
    plan.most_kv_tiles = 0;
    plan.longest = 0;
    plan.even_waves = INT_MAX;
  }
  __syncthreads();
  if (thread < kWarp) exclusive_sum(plan.query_tile_begin, p.num_sequences);
  __syncthreads();
  const int padded = (p.num_query_tiles * kLanes + kWarp - 1) / kWarp * kWarp;  // whole warps shuffle
  for (int i = thread; i < padded; i += threads)
    plan_wave_tile<kLanes>(p, plan, ::min(i / kLanes, p.num_query_tiles - 1));
  __syncthreads();
  if (thread < kWarp) exclusive_sum(plan.kv_tile_begin, p.num_query_tiles);
  if (thread == kWarp) plan.pass_heads = pass_heads(p, plan);
  __syncthreads();
  plan_waves(p, plan);
}

}  // namespace helix::cuda
