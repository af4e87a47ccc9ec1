// SPDX-License-Identifier: Apache-2.0
// Combines the KV splits of a query tile over the blocks of a cluster, through DSMEM. That saves two trips to
// memory, which take microseconds each while the weights of the next product are streamed.
#pragma once

#include <cooperative_groups.h>

#include "cuda/attention/combine.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// This block in its cluster. If kExists is false, there are no clusters and no room for their sums.
template <bool kExists, int kRows, int kValueDim>
class BlockCluster {
 public:
  static constexpr int kStride = kValueDim + 4;  // f32, padded: rows 16 bytes apart in the banks
  static_assert(kRows % kMaxClusterBlocks == 0);

  /// All blocks' results of the rows that this block combines: every blocks-th row, from its rank on.
  struct Sums {
    alignas(16) float sums[kExists ? kRows : 1][kExists ? kStride : 1];  ///< [blocks, rows / blocks, stride]
    float max[kExists ? kRows : 1];
    float sum[kExists ? kRows : 1];
  };

  /// Called at the kernel's start by all threads, those of a warp together.
  __device__ explicit BlockCluster(Sums& mine) : mine_(mine) {
    if constexpr (!kExists) return;
    blocks_ = cluster_blocks();
    shift_ = __popc(blocks_ - 1);
    has_arrived_ = blocks_ > 1;
    if (has_arrived_) asm volatile("barrier.cluster.arrive.relaxed.aligned;");  // see await_others()
  }

  __device__ ~BlockCluster() { await_others(); }
  BlockCluster(const BlockCluster&) = delete;
  BlockCluster& operator=(const BlockCluster&) = delete;

  /// Whether these splits are those of this cluster, one a block.
  __device__ bool has(const KvSplits& splits) const {
    return kExists && blocks_ > 1 && splits.count == blocks_ && (splits.first_block & (blocks_ - 1)) == 0;
  }

  /// Waits until all blocks of the cluster have begun. Called before rows are written, because a block that
  /// has not begun may not be written to, and before a block ends, because each arrival at the barrier needs
  /// a wait.
  __device__ void await_others() {
    if constexpr (!kExists) return;
    if (has_arrived_) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    has_arrived_ = false;
  }

  /// Where this block writes its partial of row `row`: in the block that combines the row.
  __device__ PartialRow row(int row) const {
    if constexpr (!kExists) return {};
    Sums& to = *cooperative_groups::cluster_group::map_shared_rank(
        &mine_, static_cast<unsigned>(row & (blocks_ - 1)));
    const int at =
        static_cast<int>(cooperative_groups::cluster_group::block_rank()) * own_rows() + (row >> shift_);
    return {to.sums[at], &to.max[at], &to.sum[at]};
  }

  /// Waits until all blocks have written their rows, then combines this block's rows into out and lse. All
  /// threads of all blocks.
  __device__ void combine(const AttentionParams& p, const QueryTile& query_tile, int head) const {
    if constexpr (kExists) {
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      const auto rank = static_cast<int>(cooperative_groups::cluster_group::block_rank());
      const int warps = static_cast<int>(blockDim.x) / kWarp;
      const int warp = static_cast<int>(threadIdx.x) / kWarp;
      for (int row = rank + warp * blocks_; row < query_tile.num_rows; row += warps * blocks_)
        combine_row_of_blocks(p, query_tile, head, row);
    }
  }

 private:
  /// Combines row `row` into out and lse, in the order of the blocks; one warp. Its loops are not unrolled: a
  /// launch runs the code once and has to fetch it from memory.
  __device__ void combine_row_of_blocks(const AttentionParams& p, const QueryTile& query_tile, int head,
                                        int row) const {
    static_assert(kValueDim <= kWarp * kLaneColumns || !kExists);
    const int column = static_cast<int>(threadIdx.x) % kWarp * kLaneColumns;
    const int first = row >> shift_;
    float max = -kInfinity;
    float sum = 0.0f;
    float4 total{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int at = first; at < kRows; at += own_rows()) max = fmaxf(max, mine_.max[at]);
#pragma unroll 1
    for (int at = first; at < kRows; at += own_rows()) {
      const float part = mine_.sum[at];
      const float weight = part_weight(mine_.max[at], part, max);
      sum = fmaf(part, weight, sum);
      if (column >= kValueDim) continue;
      const float4 x = *reinterpret_cast<const float4*>(&mine_.sums[at][column]);
      add_weighted(total, weight, x);
    }
    const RowWriter writer(p, query_tile, head, row, max, sum);
    if (column < kValueDim) writer.write(column, total);
  }

  /// Most rows that a block combines.
  __device__ int own_rows() const {
    return kRows >> shift_;
  }

  Sums& mine_;
  bool has_arrived_ = false;
  int blocks_ = 1;  // a power of two
  int shift_ = 0;   // its logarithm
};

}  // namespace helix::cuda
