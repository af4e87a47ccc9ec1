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
//
// `u` is a query tile of the launch, counted backwards from the last one of the batch, because the last ones
// of a sequence see most. In a batch of prompts that order is not by length, so query tiles are put in an
// order of their own: eight prompts of 1024 tokens (32 / 8 heads) take 180 us, 257 in the order of the batch.
//
// A block's code comes from the instruction caches at some ten cycles an instruction when it starts, so the
// plan takes as long as its code: little of it is unrolled.
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
/// Lengths that order the query tiles of a batch: four for each power of two of KV tiles. Query tiles of one
/// length stay in the order of their sequences, whose keys and values the L2 cache then holds.
inline constexpr int kWaveLengths = 4 * 28;
static_assert(kMaxLocalTokens / kMinKvTileTokens < 1 << 27);

/// The schedule, in shared memory, for KV tiles of kTokens tokens.
template <int kTokens>
struct WavePlan {
  static constexpr int kKvTileTokens = kTokens;
  static_assert(kTokens >= kMinKvTileTokens);

  std::int64_t first_page[kMaxWaveQueryTiles];  ///< Index of the sequence's first page in the page lists.
  QueryTile query_tiles[kMaxWaveQueryTiles];
  int begin_token[kMaxWaveQueryTiles];              ///< Local token where the query tile's keys begin.
  int end_token[kMaxWaveQueryTiles];                ///< Local token where the query tile's keys end.
  std::uint16_t query_tile_at[kMaxWaveQueryTiles];  ///< The query tile at each place in the order of dealing.
  int kv_tile_begin[kMaxWaveQueryTiles + 1];        ///< KV tiles of one KV head before each place.
  int length_begin[kWaveLengths + 1];  ///< Next place of a query tile of each length, the longest first.
  /// First query tile of each sequence, in order of the batch.
  int query_tile_begin[kMaxLaunchSequences + 1];
  int share_begin[kMaxWaveBlocks + 1];  ///< KV tiles of the list of shares before each block's.
  int least_kv_tiles;                   ///< Fewest KV tiles of a query tile.
  int most_kv_tiles;                    ///< Most KV tiles of a query tile.
  int pass_shift;                       ///< There are 2^pass_shift passes of as many heads each.
  int workers;                          ///< Blocks that have work.
  int longest;                          ///< Most KV tiles of a block if all query tiles stay whole.
  int even_waves;                       ///< Waves after which no block has more than its even share.
  int waves;                            ///< Whole query tiles and heads that each block takes.
  int first_shared;                     ///< KV tiles of all passes before the list of shares.

  __device__ int first_kv_tile_token(int u) const { return begin_token[u] / kTokens * kTokens; }
  /// KV tiles of a query tile. One that sees nothing has a KV tile of no tokens, so that some block writes
  /// its zeros.
  static __device__ int kv_tiles_of(int begin_token, int end_token) {
    return ::max(1, (end_token + kTokens - 1) / kTokens - begin_token / kTokens);
  }
  __device__ int kv_tiles(int u) const { return kv_tiles_of(begin_token[u], end_token[u]); }
  __device__ int kv_tiles_at(int place) const { return kv_tile_begin[place + 1] - kv_tile_begin[place]; }
  __device__ int pass_heads(const AttentionParams& p) const { return p.kv_heads >> pass_shift; }
};

/// The length in [0, kWaveLengths) of a query tile with `kv_tiles` KV tiles; the longest have the lowest.
__device__ __forceinline__ int wave_length(int kv_tiles) {
  // A float's exponent, and the first two bits of its fraction.
  const int from_one = (__float_as_int(static_cast<float>(kv_tiles)) - __float_as_int(1.0f)) >> 21;
  return kWaveLengths - 1 - from_one;
}

/// A place in the order of dealing, and a KV head.
struct WaveItem {
  int place;
  int head;
};

/// Item `item` of all: by pass, then by place, then by head.
template <class Plan>
__device__ inline WaveItem wave_item(const AttentionParams& p, const Plan& plan, int item) {
  const int heads = plan.pass_heads(p);
  int pass = 0;
  if (plan.pass_shift > 0) {  // a division takes long
    pass = item / (p.num_query_tiles * heads);
    item -= pass * p.num_query_tiles * heads;
  }
  const int place = (item << plan.pass_shift) / p.kv_heads;
  return {place, pass * heads + item - place * heads};
}

/// The item of worker `block` in a wave.
__device__ inline int wave_place(int wave, int workers, int block) {
  return wave * workers + dealt_to(wave, workers, block);
}

/// Local tokens that any of the query tokens [first, last] sees, by kLanes neighbouring lanes, each of which
/// reads some of their positions; {0, 0} for none.
template <int kLanes>
__device__ inline TokenRange seen_by_tokens(const AttentionParams& p, int first, int last) {
  constexpr int kLoads = 32 / kLanes;  // positions that a lane loads at once
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  std::int64_t most = -1;  // position
  std::int64_t begin = INT64_MAX;
  std::int64_t end = 0;
#pragma unroll 1
  for (int token = first + lane; token <= last; token += kLoads * kLanes) {
    std::int64_t positions[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      positions[i] = -1;
      if (token + i * kLanes <= last) positions[i] = p.positions[token + i * kLanes];
    }
    if (p.window == 0) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) most = ::max(most, positions[i]);
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < kLoads; ++i) {
      const TokenRange seen = visible(p, positions[0]);
#pragma unroll
      for (int k = 0; k + 1 < kLoads; ++k) positions[k] = positions[k + 1];
      if (seen.size() <= 0) continue;
      begin = ::min(begin, seen.begin);
      end = ::max(end, seen.end);
    }
  }
  if (p.window == 0) {
    begin = 0;
    end = p.layout.length(most + 1, p.kvp_rank);
  }
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    begin = ::min(begin, __shfl_xor_sync(~0u, begin, offset));
    end = ::max(end, __shfl_xor_sync(~0u, end, offset));
  }
  return {end > 0 ? begin : 0, end};
}

/// Fills in query tile `u`, by kLanes neighbouring lanes. Returns its number of KV tiles. Past the last query
/// tile it only returns that one's.
template <int kLanes, class Plan>
__device__ inline int plan_wave_tile(const AttentionParams& p, Plan& plan, int u) {
  const int in_batch = p.first_query_tile + ::max(p.num_query_tiles - 1 - u, 0);
  const int b = find_last(plan.query_tile_begin, p.num_sequences, in_batch);
  const std::int32_t slot = p.sequence_slots[b];
  const int row = (in_batch - plan.query_tile_begin[b]) * p.query_tile_rows;
  const QueryTile query_tile{p.query_offsets[b], row,
                             ::min(static_cast<int>(p.query_tile_rows), query_rows(p, b) - row)};
  const TokenRange seen =
      seen_by_tokens<kLanes>(p, query_tile.token(p, 0), query_tile.token(p, query_tile.num_rows - 1));
  const int begin = static_cast<int>(seen.begin);
  const int end = static_cast<int>(seen.end);
  const int kv_tiles = Plan::kv_tiles_of(begin, end);
  if (threadIdx.x % kLanes == 0 && u < p.num_query_tiles) {
    plan.query_tiles[u] = query_tile;
    plan.first_page[u] = end > 0 ? p.lists.first_of(slot) : 0;  // the slot of padding may be anything
    plan.begin_token[u] = begin;
    plan.end_token[u] = end;
    atomicAdd(&plan.length_begin[wave_length(kv_tiles)], 1);
  }
  return kv_tiles;
}

/// Puts the query tiles in the order of dealing, and counts the KV tiles before each; one warp.
template <class Plan>
__device__ inline void order_query_tiles(const AttentionParams& p, Plan& plan) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int count = p.num_query_tiles;
  // Those of one sequence are in order already, and lengths of at most a factor of two even out in any order.
  if (p.num_sequences == 1 || 2 * plan.least_kv_tiles >= plan.most_kv_tiles) {
#pragma unroll 1
    for (int u = lane; u < count; u += kWarp) {
      plan.query_tile_at[u] = static_cast<std::uint16_t>(u);
      plan.kv_tile_begin[u] = plan.kv_tiles(u);
    }
  } else {
    exclusive_sum<4>(plan.length_begin, kWaveLengths);
#pragma unroll 1
    for (int u = lane; u - lane < count; u += kWarp) {
      const int kv_tiles = u < count ? plan.kv_tiles(u) : 0;
      const int length = u < count ? wave_length(kv_tiles) : kWaveLengths;
      const unsigned alike = __match_any_sync(~0u, length);
      const int place = plan.length_begin[length] + __popc(alike & ((1u << lane) - 1));
      __syncwarp();
      if (u < count) {
        plan.query_tile_at[place] = static_cast<std::uint16_t>(u);
        plan.kv_tile_begin[place] = kv_tiles;
        if ((alike >> lane) == 1) plan.length_begin[length] = place + 1;
      }
      __syncwarp();
    }
  }
  __syncwarp();
  exclusive_sum<4>(plan.kv_tile_begin, count);
}

/// Sets WavePlan::pass_shift. Fewer heads are fewer items, which must then be of similar length, or many, or
/// waves would be uneven (16 heads of D = 192, 4096 tokens without a context: 221 us by 8 heads, 158 by all).
template <class Plan>
__device__ inline int wave_pass_shift(const AttentionParams& p, const Plan& plan) {
  const int even_heads = 2 * plan.least_kv_tiles >= plan.most_kv_tiles
                             ? 1
                             : kWavePassWaves * static_cast<int>(gridDim.x) / p.num_query_tiles + 1;
  const std::int64_t head_bytes =
      std::int64_t{plan.most_kv_tiles} * Plan::kKvTileTokens * (p.head_dim + p.value_dim) * 2;
  int shift = 0;
  for (int heads = p.kv_heads;
       heads % 2 == 0 && heads / 2 >= even_heads && heads * head_bytes > kWavePassBytes; heads /= 2) {
    ++shift;
  }
  return shift;
}

/// KV tiles before those of `item` in the order of dealing.
template <class Plan>
__device__ inline int tiles_before(const AttentionParams& p, const Plan& plan, WaveItem item) {
  const int heads = plan.pass_heads(p);
  const int in_pass = item.head % heads;
  return (item.head - in_pass) * plan.kv_tile_begin[p.num_query_tiles] +
         plan.kv_tile_begin[item.place] * heads + in_pass * plan.kv_tiles_at(item.place);
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
    return item < items ? sum + plan.kv_tiles_at(wave_item(p, plan, item).place) : sum;
  };
  const int whole_waves = items / workers;
  const int all_waves = (items + workers - 1) / workers;
  if (block < workers) {
    int waves = 0;
    int sum = 0;
#pragma unroll 1
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
#pragma unroll 1
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
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int i = thread; i < kWaveLengths; i += threads) plan.length_begin[i] = 0;
#pragma unroll 1
  for (int b = thread; b < p.num_sequences; b += threads)
    plan.query_tile_begin[b] = (query_rows(p, b) + p.query_tile_rows - 1) / p.query_tile_rows;
  if (thread == 0) {
    plan.least_kv_tiles = INT_MAX;
    plan.most_kv_tiles = 0;
    plan.longest = 0;
    plan.even_waves = INT_MAX;
  }
  __syncthreads();
  if (thread < kWarp) exclusive_sum<4>(plan.query_tile_begin, p.num_sequences);
  __syncthreads();
  const int lane = thread % kWarp;
  int least = INT_MAX;
  int most = 0;
#pragma unroll 1
  for (int i = thread; i - lane < p.num_query_tiles * kLanes; i += threads) {  // whole warps
    const int kv_tiles = plan_wave_tile<kLanes>(p, plan, i / kLanes);
    least = ::min(least, kv_tiles);
    most = ::max(most, kv_tiles);
  }
  least = __reduce_min_sync(~0u, least);
  most = __reduce_max_sync(~0u, most);
  if (lane == 0) {
    atomicMin(&plan.least_kv_tiles, least);
    atomicMax(&plan.most_kv_tiles, most);
  }
  __syncthreads();
  if (thread < kWarp) order_query_tiles(p, plan);
  if (thread == kWarp) plan.pass_shift = wave_pass_shift(p, plan);
  __syncthreads();
  plan_waves(p, plan);
}

}  // namespace helix::cuda
