// SPDX-License-Identifier: Apache-2.0
// Into how many KV splits an attention kernel cuts the KV tiles of a query tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/params.cuh"
#include "cuda/runtime/prefix_sums.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// Divides the numbers 0 .. total - 1 into `parts` ranges, the first ones longer by one.
struct EvenPartition {
  int parts;
  int length;
  int longer;  ///< Number of ranges that are longer by one.

  __device__ EvenPartition(int total, int the_parts)
      : parts(the_parts), length(total / the_parts), longer(total - length * the_parts) {}
  __device__ int begin(int part) const { return part * length + min(part, longer); }
  __device__ int part_of(int i) const {
    const int in_longer = longer * (length + 1);
    return i < in_longer ? i / (length + 1) : longer + (i - in_longer) / length;
  }
};

/// The block that gets item `i` of a round, if items of falling length are dealt out to `blocks` blocks in
/// rounds that alternate in direction, so that sums are nearly equal. Also the reverse.
__device__ inline int dealt_to(int round, int blocks, int i) {
  return round % 2 == 0 ? i : blocks - 1 - i;
}

inline constexpr int kCombineBatch = 16;  ///< Split partials that are combined in one trip to memory.

/// How finely KV is split, for KV tiles of 32 tokens and query tiles of up to 32 rows.
struct ShortTileLimits {
  static constexpr int kEpilogueTiles = 8;  ///< KV tiles read in the time of a query tile's epilogue.
  /// Fewest KV tiles of a split, where up to kCombineBatch splits share a query tile. More splits read faster
  /// but take longer to combine: one KV head of 2048 tokens takes 8.3 us in 16 splits of 4 KV tiles and 8.7
  /// in 8 splits of 8; 8192 tokens take 10.3 us in 32 splits of 8 and 11.8 in 64 splits of 4 (H200).
  static constexpr int kShortSplitTiles = 4;
  static constexpr int kSplitTiles = 8;  ///< Fewest KV tiles of a split, where there are more splits.
  static constexpr int kWholeTiles = 0;  ///< Most KV tiles of a query tile that is not split.
  /// Most KV tiles, for each block of a cluster, of a query tile that is split over the blocks of one
  /// cluster.
  static constexpr int kClusterTiles = 0;
  /// Empty KV tiles that the list adds to each query tile where there are more query tiles than blocks. They
  /// stand for the time of its prologue and epilogue: without them, work items of many short query tiles
  /// would take longer than those of a few long ones.
  static constexpr int kPaddingTiles = 0;
};

/// Most blocks of a cluster that combines a query tile's splits.
inline constexpr int kMaxClusterBlocks = 8;
/// Most tokens for each block of such a cluster. Beyond that, more splits read faster.
inline constexpr int kClusterBlockTokens = 320;

/// Limits for blocks that have an SM of their own, for KV tiles of kTokens tokens. Their warps read several
/// KV tiles at a time: attending to few tokens takes less time than the trip to memory that combining splits
/// costs. Somewhat more tokens are best split over the blocks of a cluster, which need no such trip. Decode
/// steps of 8 layers, whole and in two splits: one sequence of 330 tokens 1.198 and 1.190 ms, eight of 512
/// tokens 1.287 and 1.257 ms (H200).
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

/// Most KV splits that `kv_tiles` KV tiles are worth. A cluster may have more splits than there are KV tiles:
/// even empty splits combine faster through its shared memory than splits do through device memory.
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

/// Number of work items of equal length, at least one KV tile, into which the launch's list of `kv_tiles` KV
/// tiles is cut. Short query tiles are as many items as there are blocks: what limits the splits of one query
/// tile would leave most blocks without any of 256 sequences of 64 tokens.
template <class Plan>
__device__ inline int even_work_items(const AttentionParams& p, int kv_tiles) {
  const int most = max(max_splits<typename Plan::Limits>(kv_tiles), p.num_query_tiles * Plan::kv_heads(p));
  return min(min(Plan::num_blocks(), kv_tiles), most);
}

/// KV splits of a query tile of one KV head, in proportion to its KV tiles: at least one, and over all query
/// tiles no more than one each plus `spare`, which is below 1024. `total` is the number of KV tiles of all
/// query tiles.
template <class Limits>
__device__ inline int splits_for(int kv_tiles, int spare, int total) {
  const int shift = max(0, 10 - __clz(total));  // so that the product fits
  const unsigned part = static_cast<unsigned>(kv_tiles >> shift) * static_cast<unsigned>(spare);
  const int splits = 1 + static_cast<int>(part / static_cast<unsigned>(total >> shift));
  const int most = max_splits<Limits>(kv_tiles);
  return splits < most ? min(splits, kv_tiles) : most;
}

/// Whether splits of up to `longest` KV tiles exceed `items` work items of equal length, `all` KV tiles in
/// sum, by no more than kEpilogueTiles.
template <class Plan>
__device__ inline bool are_splits_short(int longest, int items, int all) {
  return std::int64_t{longest - Plan::Limits::kEpilogueTiles - 1} * items <
         all;  // longest - kEpilogueTiles <= all / items, rounded up
}

/// Blocks for each KV head in excess of one a query tile; negative if there are too few.
template <class Plan>
__device__ inline int spare_blocks(const AttentionParams& p) {
  return Plan::num_blocks() / Plan::kv_heads(p) - p.num_query_tiles;
}

/// Cuts each query tile into KV splits of one block each, if that keeps them short; first warp.
template <class Plan>
__device__ inline void assign_splits(const AttentionParams& p, Plan& plan) {
  using Count = std::remove_reference_t<decltype(plan.split_begin[0])>;
  const int lane = static_cast<int>(threadIdx.x);
  const int total = plan.kv_tile_begin[p.num_query_tiles];
  const int even = even_work_items<Plan>(p, total * Plan::kv_heads(p));
  const int spare = spare_blocks<Plan>(p);
  int longest = 0;
#pragma unroll 1
  for (int u = lane; u < p.num_query_tiles && spare >= 0; u += kWarp) {
    const int splits = splits_for<typename Plan::Limits>(plan.listed_tiles(u), spare, total);
    plan.split_begin[u] = static_cast<Count>(splits);
    longest = max(longest, (plan.listed_tiles(u) + splits - 1) / splits);
  }
  longest = __reduce_max_sync(~0u, longest);
  const bool is_one_split_each =
      spare >= 0 && are_splits_short<Plan>(longest, even, total * Plan::kv_heads(p));
  if (lane == 0) {
    plan.is_one_split_each = is_one_split_each;
    plan.even_items = even;
  }
  __syncwarp();
  if (is_one_split_each) exclusive_sum(plan.split_begin, p.num_query_tiles);
}

}  // namespace helix::cuda
