// SPDX-License-Identifier: Apache-2.0
// Two blocks of a cluster that have the two KV splits of a query tile, combined through shared memory: two
// trips to memory less, of which each takes microseconds while the weights of the next product stream by.
#pragma once

#include <cooperative_groups.h>

#include "cuda/attention/combine.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// This block and the other one of its cluster. kExists false: there are no pairs, nor room for their sums.
template <bool kExists, int kRows, int kValueDim>
class BlockPair {
 public:
  static constexpr int kStride = kValueDim + 4;  // f32: rows 16 bytes apart in the banks

  /// What both found, in the shared memory of the first of the two.
  struct Sums {
    alignas(16) float sums[kExists ? 2 : 1][kExists ? kRows : 1][kExists ? kStride : 1];
    float max[2][kExists ? kRows : 1];
    float sum[2][kExists ? kRows : 1];
  };

  /// At the kernel's start; all threads, those of a warp together.
  __device__ explicit BlockPair(Sums& mine) : mine_(mine) {
    if constexpr (!kExists) return;
    is_pair_ = cooperative_groups::cluster_group::num_blocks() == 2;
    if (is_pair_) asm volatile("barrier.cluster.arrive.relaxed.aligned;");  // see await_other()
  }

  /// Whether these splits are this pair's.
  __device__ bool has(const KvSplits& splits) const {
    return kExists && is_pair_ && splits.count == 2 && splits.first_block % 2 == 0;
  }

  /// Before write(), once: nobody may write to a block that has not begun.
  __device__ void await_other() const {
    if constexpr (kExists) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }

  /// Writes what this block found of rows [first_row, first_row + num_rows).
  template <int kParts>
  __device__ void write(int first_row, int num_rows, const BlockResult<kParts>& found) const {
    if constexpr (kExists) {
      const unsigned rank = cooperative_groups::cluster_group::block_rank();
      Sums& to = *cooperative_groups::cluster_group::map_shared_rank(&mine_, 0);
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      for_each_row(found, num_rows, [&](int r, const ResultRow<kParts>& result) {
        const int row = first_row + r;
        for (int column = lane * kLaneColumns; column < kValueDim; column += kWarp * kLaneColumns)
          *reinterpret_cast<float4*>(&to.sums[rank][row][column]) = result.get(column);
        if (lane == 0) {
          to.max[rank][row] = result.max;
          to.sum[rank][row] = result.sum;
        }
      });
    }
  }

  /// After write() of all rows: the first block writes out and lse. All threads of both.
  __device__ void combine(const AttentionParams& p, const QueryTile& query_tile, int head) const {
    if constexpr (kExists) {
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      if (cooperative_groups::cluster_group::block_rank() != 0) return;
      const BlockResult<2> both{&mine_.sums[0][0][0], kRows * kStride,  kStride,
                                &mine_.max[0][0],     &mine_.sum[0][0], kRows};
      for_each_row(both, query_tile.num_rows,
                   [&](int row, const ResultRow<2>& result) { write_row(p, query_tile, head, row, result); });
    }
  }

 private:
  Sums& mine_;
  bool is_pair_ = false;
};

}  // namespace helix::cuda
