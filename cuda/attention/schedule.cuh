// SPDX-License-Identifier: Apache-2.0
// Which thread block of an attention kernel multiplies which keys and values.
//
// Query rows are cut into query tiles, and the local tokens that any row of a query tile sees into KV tiles
// of a size that the kernel chooses. The work of a launch is the list of all KV tiles, ordered by query tile,
// then by KV head. Each block of a persistent grid takes one work item, consecutive KV tiles of that list;
// its KV tiles of one query tile and KV head are a KV split. So one sequence of a million tokens is cut into
// as many splits as there are blocks, and a ragged batch fills the GPU as well. Each block computes the
// schedule itself from device memory.
//
// Work items of equal length differ by at most one KV tile. But such an item may end one query tile and begin
// another, and a query tile's epilogue takes as long as some KV tiles. If there are enough blocks for the
// query tiles, each work item is therefore a single split, unless the longest split would exceed an equal
// share by more than an epilogue. If there are more query tiles than blocks, some kernels deal them out whole
// (dealing.cuh), unless some block would then be late.
//
// In some kernels several blocks share a work item: "block" below then means all of them.
#pragma once

#include <cstdint>

#include "cuda/attention/plan.cuh"
#include "cuda/runtime/prefix_sums.cuh"

namespace helix::cuda {

/// A place in the list of KV tiles.
struct KvTileCursor {
  int query_tile;  ///< By its place in the list, where Plan::kDeals.
  int head;
  int kv_tile;       ///< KV tile, counted in the query tile and head.
  int num_kv_tiles;  ///< KV tiles that the query tile and head have.

  /// Moves on by `count` KV tiles. At the end of the list it stays past the last query tile.
  template <class Plan>
  __device__ void advance(const AttentionParams& p, const Plan& plan, int count) {
    kv_tile += count;
    while (kv_tile >= num_kv_tiles && query_tile < p.num_query_tiles) {
      kv_tile -= num_kv_tiles;
      if (++head == Plan::kv_heads(p)) {
        head = 0;
        ++query_tile;
        if (query_tile < p.num_query_tiles) num_kv_tiles = plan.kv_tiles(p, query_tile);
      }
    }
  }
};

/// A block's share of the list: consecutive KV tiles, which form one KV split of each query tile and head
/// that they belong to. Splits of a cluster may be empty.
struct WorkItem {
  KvTileCursor start;
  int count;  ///< KV tiles.

  __device__ bool is_none() const { return start.num_kv_tiles == 0; }
};

/// The KV splits of one query tile and KV head: block first_block + i takes split i.
struct KvSplits {
  int first_block;
  int count;
};

/// Assigns the KV tiles of the list to blocks.
template <class Plan>
class Schedule {
 public:
  __device__ Schedule(const AttentionParams& p, const Plan& plan)
      : p_(p), plan_(plan), padding_(Plan::padding_tiles(p)) {}

  __device__ WorkItem work_item(int block) const {
    if (plan_.is_one_split_each) {
      if (block >= plan_.split_begin[p_.num_query_tiles] * Plan::kv_heads(p_)) return {};
      const int u = find_last(plan_.split_begin, p_.num_query_tiles, block / Plan::kv_heads(p_));
      const int splits = plan_.splits(u);
      const int rest = block - plan_.split_begin[u] * Plan::kv_heads(p_);
      const int head = rest / splits;
      const EvenPartition ranges(plan_.listed_tiles(u), splits);
      const int split = rest - head * splits;
      const int first = ranges.begin(split);
      return {{u, head, first, plan_.listed_tiles(u)}, ranges.begin(split + 1) - first};
    }
    if (plan_.is_dealt) {
      const EvenPartition items(p_.num_query_tiles, Plan::num_blocks());
      const int first = items.begin(block);
      const int end = items.begin(block + 1);
      const int listed = plan_.kv_tile_begin[end] - plan_.kv_tile_begin[first];
      return {{first, 0, 0, plan_.kv_tiles(p_, first)}, listed - (end - first) * padding_};
    }
    const EvenPartition items = even_items();
    if (block >= items.parts) return {};
    const int first = items.begin(block);
    const int end = items.begin(block + 1);
    KvTileCursor start = cursor_at(first);
    if (padding_ == 0) return {start, end - first};
    const int count = tiles_before(cursor_at(end)) - tiles_before(start);
    start.advance(p_, plan_, 0);  // moves out of the padding
    return {start, count};
  }

  __device__ KvSplits splits_of(int u, int head) const {
    if (plan_.is_one_split_each) {
      const int splits = plan_.splits(u);
      return {plan_.split_begin[u] * Plan::kv_heads(p_) + head * splits, splits};
    }
    if (plan_.is_dealt) return {0, 1};
    const EvenPartition items = even_items();
    const int begin = listed_before(u, head);
    const int first = items.part_of(begin);
    return {first, items.part_of(begin + plan_.kv_tiles(p_, u) - 1) - first + 1};
  }

 private:
  __device__ EvenPartition even_items() const {
    const int total = plan_.kv_tile_begin[p_.num_query_tiles] * Plan::kv_heads(p_);
    return {total, plan_.even_items};
  }
  /// KV tiles of the list before a query tile and head. kv_tile_begin counts those of one head; all heads
  /// have equally many.
  __device__ int listed_before(int u, int head) const {
    return plan_.kv_tile_begin[u] * Plan::kv_heads(p_) + head * plan_.listed_tiles(u);
  }
  /// The cursor at place `listed` of the list. A place in padding means the end of the KV tiles before it;
  /// the end of the list means one head past the last one of the last query tile.
  __device__ KvTileCursor cursor_at(int listed) const {
    const int u = find_last(plan_.kv_tile_begin, p_.num_query_tiles, listed / Plan::kv_heads(p_));
    const int rest = listed - listed_before(u, 0);
    const int head = rest / plan_.listed_tiles(u);
    const int kv_tiles = plan_.kv_tiles(p_, u);
    return {u, head, min(rest - head * plan_.listed_tiles(u), kv_tiles), kv_tiles};
  }
  /// KV tiles before `at`, without padding.
  __device__ int tiles_before(const KvTileCursor& at) const {
    const int padded = at.query_tile * Plan::kv_heads(p_) + at.head;
    return listed_before(at.query_tile, at.head) - padded * padding_ + at.kv_tile;
  }

  const AttentionParams& p_;
  const Plan& plan_;
  const int padding_;
};

}  // namespace helix::cuda
