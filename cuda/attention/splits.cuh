// SPDX-License-Identifier: Apache-2.0
// Into how many KV splits an attention kernel cuts the KV tiles of a query tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/params.cuh"
#include "cuda/runtime/prefix_sums.cuh"
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
  /// KV tiles of a query tile at most, for each block of a cluster, that are cut for the blocks of one
  /// cluster.
  static constexpr int kClusterTiles = 0;
  /// KV tiles of no tokens that each query tile counts for behind its own where query tiles are more than
  /// blocks: its beginning and its epilogue take as long, and work items that hold many short ones would not
  /// take as long as those of a few long ones.
  static constexpr int kPaddingTiles = 0;
};

inline constexpr int kMaxClusterBlocks = 8;  ///< Of a cluster that combines the KV splits of a query tile.
/// Tokens for each block of such a cluster, at most. Beyond, more splits read faster.
inline constexpr int kClusterBlockTokens = 320;

/// The same for blocks that have an SM of their own, for KV tiles of kTokens tokens: their warps read several
/// KV tiles at a time, so that few tokens take less time than a trip to memory to combine splits, and a few
/// more are better cut for the blocks of a cluster, which need no trip. Decode steps of 8 layers: one
/// sequence of 330 tokens whole 1.198 ms, in two 1.190; eight of 512 whole 1.287, in two 1.257 (H200).
template <int kTokens>
struct WholeSmLimits : ShortTileLimits {
  static constexpr int kWholeTiles = 256 / kTokens;
  static constexpr int kClusterTiles = kClusterBlockTokens / kTokens;
};

/// Blocks of a cluster of this launch.
__device__ inline int cluster_blocks() {
#if __CUDA_ARCH__ >= 900
  int blocks;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  return blocks;
#else
  return 1;
#endif
}

/// KV splits that `kv_tiles` KV tiles are worth. Those of a cluster's blocks may be more than there are KV
/// tiles: in its shared memory even splits of nothing combine faster than through the device's.
template <class Limits>
__device__ inline int max_splits(int kv_tiles) {
  if (kv_tiles <= Limits::kWholeTiles) return 1;
  if constexpr (Limits::kClusterTiles > 0) {
    const int cluster = cluster_blocks();
    if (cluster > 1 && kv_tiles <= cluster * Limits::kClusterTiles) return cluster;
  }
  return kv_tiles <= kCombineBatch * Limits::kShortSplitTiles
             ? (kv_tiles + Limits::kShortSplitTiles - 1) / Limits::kShortSplitTiles
             : max(kCombineBatch, (kv_tiles + Limits::kSplitTiles - 1) / Limits::kSplitTiles);
}

/// Work items of equal length, of a KV tile at least, into which a list of `kv_tiles` KV tiles is cut.
template <class Plan>
__device__ inline int even_work_items(int kv_tiles) {
  return min(min(Plan::num_blocks(), kv_tiles), max_splits<typename Plan::Limits>(kv_tiles));
}

/// KV splits for a query tile of one KV head, in proportion to its KV tiles: at least one, and not more in
/// all than one for each query tile and `spare` beside. `total` is the KV tiles of all.
template <class Limits>
__device__ inline int splits_for(int kv_tiles, int spare, int total) {
  const int shift = max(0, 9 - __clz(total));  // so that the product fits
  const unsigned part = static_cast<unsigned>(kv_tiles >> shift) * static_cast<unsigned>(spare);
  const int splits = 1 + static_cast<int>(part / static_cast<unsigned>(total >> shift));
  const int most = max_splits<Limits>(kv_tiles);
  return splits < most ? min(splits, kv_tiles) : most;
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
    const int splits = splits_for<typename Plan::Limits>(plan.listed_tiles(u), spare, total);
    plan.split_begin[u] = static_cast<Count>(splits);
    longest = max(longest, (plan.listed_tiles(u) + splits - 1) / splits);
  }
  longest = __reduce_max_sync(~0u, longest);
  const bool is_one_split_each = spare >= 0 && are_splits_short<Plan>(p, longest, total);
  if (lane == 0) plan.is_one_split_each = is_one_split_each;
  __syncwarp();
  if (is_one_split_each) exclusive_sum(plan.split_begin, p.num_query_tiles);
}

}  // namespace helix::cuda
