// SPDX-License-Identifier: Apache-2.0
// Dealing out whole query tiles to blocks, where there are more query tiles than blocks.
//
// Work items of equal length begin and end within query tiles, so each block has one prologue and epilogue
// more, and a combine follows. Whole query tiles save these, but some block may be late. They are dealt out
// in rounds, the longest first, in alternating direction, so that their sums are nearly equal. The list of
// the schedule then has them in the order of their blocks.
#pragma once

#include <cstdint>

#include "cuda/attention/splits.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// The place in the list of the query tile that is dealt out as number `i`, the `i`-th longest.
template <class Plan>
__device__ inline int dealt_place(const AttentionParams& p, int i) {
  const int blocks = Plan::num_blocks();
  const int round = i / blocks;
  const int last = p.num_query_tiles / blocks;  // deals out those that are left, from the first block on
  const int block = dealt_to(last - round, blocks, i - round * blocks);
  return EvenPartition(p.num_query_tiles, blocks).begin(block) + round;
}

/// Whether no block is late, if `kv_tiles` are those of whole query tiles in the order of their blocks; first
/// warp.
template <class Plan>
__device__ inline bool are_whole_tiles_even(const AttentionParams& p, const int* kv_tiles) {
  const int blocks = Plan::num_blocks();
  const EvenPartition items(p.num_query_tiles, blocks);
  int total = 0;
  int longest = 0;
#pragma unroll 1
  for (int block = static_cast<int>(threadIdx.x); block < blocks; block += kWarp) {
    int sum = 0;
#pragma unroll 1
    for (int i = items.begin(block); i < items.begin(block + 1); ++i) sum += kv_tiles[i];
    total += sum;
    longest = max(longest, sum);
  }
  return __reduce_max_sync(~0u, longest) - __reduce_add_sync(~0u, total) / blocks < Plan::Limits::kLateTiles;
}

/// Deals out the query tiles, unless some block is then late, and sets `plan.is_dealt`. `plan.kv_tile_begin`
/// has the KV tiles of each query tile, before in order of the launch, afterwards in order of the list. All
/// threads of the block, one a query tile.
template <class Plan>
__device__ inline void deal_query_tiles(const AttentionParams& p, Plan& plan) {
  constexpr int kTileBits = 8;
  static_assert(kMaxQueryTiles == 1 << kTileBits);
  const int u = static_cast<int>(threadIdx.x);
  const bool is_tile = u < p.num_query_tiles;
  const int kv_tiles = plan.kv_tile_begin[is_tile ? u : 0];
  // Orders query tiles by their length, then by their number.
  const int key = is_tile ? min(kv_tiles, INT32_MAX >> kTileBits) << kTileBits | (kMaxQueryTiles - 1 - u) : 0;
  __syncthreads();
  // After a branch here the compiler does not know any more that warps are converged, and serialises the
  // kernel's products.
  store_shared_if(u < kMaxQueryTiles, shared_at(plan.kv_tile_begin + u), key);
  __syncthreads();
  int longer = 0;  // query tiles that come before this one
#pragma unroll 2
  for (int v = 0; v < p.num_query_tiles; v += 4) {
    const int4 four = *reinterpret_cast<const int4*>(plan.kv_tile_begin + v);
    longer += (four.x > key) + (four.y > key) + (four.z > key) + (four.w > key);
  }
  const int place = dealt_place<Plan>(p, longer);
  __syncthreads();
  if (is_tile) plan.kv_tile_begin[place] = kv_tiles;
  __syncthreads();
  if (u < kWarp) {
    const bool is_dealt = are_whole_tiles_even<Plan>(p, plan.kv_tile_begin);
    if (u == 0) plan.is_dealt = is_dealt;
  }
  __syncthreads();
  if (is_tile) {
    const int chosen = plan.is_dealt ? place : u;
    plan.kv_tile_begin[chosen] = kv_tiles;
    plan.query_tile_at[chosen] = static_cast<std::uint16_t>(u);
  }
  __syncthreads();
}

}  // namespace helix::cuda
