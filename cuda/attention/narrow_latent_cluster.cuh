// SPDX-License-Identifier: Apache-2.0
// How the blocks of a cluster combine their results of a query tile, in the kernel over latents for few query
// rows.
#pragma once

#include <cstdint>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/narrow_latent_products.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda::narrow_latent {

/// A block's results of a query tile: unnormalised sums of values and, for each row, the max (base 2) and the
/// sum of weights. A block alone has them in shared memory, blocks of a cluster in the workspace: DSMEM reads
/// bring only 7 bytes a cycle.
template <int kCluster>
struct Found {
  static constexpr int kStride = kLatentColumns + (kCluster > 1 ? 0 : 4);  // padded: rows in different banks
  static constexpr int kFloats = kMmaRows * (kStride + 2);
  float* memory;

  __device__ float* sums(int row) const { return memory + row * kStride; }
  __device__ float& max(int row) const { return memory[kMmaRows * kStride + row]; }
  __device__ float& sum(int row) const { return memory[kMmaRows * (kStride + 1) + row]; }
};

/// Combines the results of a cluster's blocks for a query tile.
template <int kCluster>
class Cluster {
 public:
  /// `own`: where a block without a cluster stores its results.
  __device__ Cluster(const AttentionParams& p, float* own) : first_(own) {
    if constexpr (kCluster > 1) {
      // After the split partials of all work items: sm_rows counts these rows a second time.
      static_assert(Found<kCluster>::kFloats <= 2 * kMmaRows * partial_stride(kLatentColumns));
      const std::int64_t items = gridDim.x / kCluster;
      first_ = p.partial_out + (2 * items * p.query_tile_rows) * partial_stride(kLatentColumns) +
               latent::scheduled_block<kCluster>() * kCluster * std::int64_t{Found<kCluster>::kFloats};
    }
  }
  __device__ ~Cluster() { await_readers(); }
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  /// Waits until the other blocks have read own(): before it is written again, and before the block ends.
  __device__ void await_readers() {
    if (are_read_) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    are_read_ = false;
  }

  __device__ Found<kCluster> own() const { return of_block(latent::block_of_item<kCluster>()); }

  /// Waits until all blocks have written own(). Then calls write(row, column, max, sum, four columns) for
  /// every kCluster-th row from this block's rank on; a warp combines kWarp * kLaneColumns columns.
  template <class Write>
  __device__ __forceinline__ void combine(int num_rows, const Write& write) {
    meet();
    for_each_part(num_rows, [&](int row, int first_column) {
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      const int column = first_column + lane * kLaneColumns;
      float4 parts[kCluster];
#pragma unroll
      for (int i = 0; i < kCluster; ++i)
        parts[i] = *reinterpret_cast<const float4*>(of_block(i).sums(row) + column);
      // Lane i has the max and the sum of weights of block i.
      const Found<kCluster> of_lane = of_block(lane % kCluster);
      const float lane_max = of_lane.max(row);
      const float lane_sum = lane < kCluster ? of_lane.sum(row) : 0.0f;
      const float max = warp_max(lane_max);
      const float weight = part_weight(lane_max, lane_sum, max);
      const float sum = warp_sum(lane_sum * weight);
      float4 total{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kCluster; ++i) add_weighted(total, __shfl_sync(~0u, weight, i), parts[i]);
      write(row, column, max, sum, total);
    });
    if constexpr (kCluster > 1) {
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
      are_read_ = true;
    }
  }

  /// Calls visit(row, first column) for each of this block's rows; a warp takes kWarp * kLaneColumns columns.
  template <class Visit>
  static __device__ __forceinline__ void for_each_part(int num_rows, const Visit& visit) {
    constexpr int kPartColumns = kWarp * kLaneColumns;
    constexpr int kParts = kLatentColumns / kPartColumns;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll 1
    for (int row = latent::block_of_item<kCluster>() + warp / kParts * kCluster; row < num_rows;
         row += kWarps / kParts * kCluster)
      visit(row, warp % kParts * kPartColumns);
  }

 private:
  __device__ Found<kCluster> of_block(int rank) const {
    return {first_ + rank * Found<kCluster>::kFloats};
  }
  static __device__ void meet() {
    if constexpr (kCluster == 1) {
      __syncthreads();
    } else {
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
  }

  float* first_;
  bool are_read_ = false;  // whether other blocks may still be reading own()
};

}  // namespace helix::cuda::narrow_latent
