// SPDX-License-Identifier: Apache-2.0
// The combine of attention over latents, in a launch after the attention kernel: the splits come from all
// blocks, and the last block to arrive would have to read megabytes alone.
//
// kShares * kCombineWarps warps take a row: a warp has kCombineColumns columns of every kShares-th split, a
// lane kPieceColumns of them. Shared memory holds the splits' max and sum of weights, and the sums of the
// shares. Bound by two trips to memory a row.
#pragma once

#include "cuda/attention/combine.cuh"
#include "cuda/attention/latent_block.cuh"
#include "cuda/attention/latent_result.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda::latent {

inline constexpr int kCombineColumns = kWarp * kPieceColumns;           ///< Columns of a warp.
inline constexpr int kCombineWarps = kLatentColumns / kCombineColumns;  ///< Warps that cover a row's columns.
inline constexpr int kTripSplits = 9;  ///< Splits that a warp reads in one trip to memory.

/// The max and the sum of weights of each split of a row, in shared memory.
struct SplitWeights {
  float max[kMaxLatentSplits];
  float sum[kMaxLatentSplits];
};

/// A row's largest max over its splits, and the sum of weights relative to it.
struct RowTotal {
  float max;
  float sum;
};

/// Totals of a row's `count` splits; one warp.
__device__ inline RowTotal total_of_splits(const SplitWeights& weights, int count) {
  float max = -kInfinity;
  float sum = 0.0f;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < count; i += kWarp) {
    const float top = fmaxf(max, weights.max[i]);
    const float pivot = top == -kInfinity ? 0.0f : top;
    sum = fmaf(sum, exp2f(max - pivot), weights.sum[i] * exp2f(weights.max[i] - pivot));
    max = top;
  }
  const float top = warp_max(max);
  return {top, warp_sum(sum * exp2f(max - (top == -kInfinity ? 0.0f : top)))};
}

using CombinedColumns = float[kPieceColumns];

/// This lane's columns of splits first, first + kStep, ... of a row: up to kTripSplits loads in one trip to
/// memory.
template <int kStep>
struct SplitTrip {
  uint4 pieces[kTripSplits];

  __device__ SplitTrip(const SplitPartials& from, int row, int first, int column) {
#pragma unroll
    for (int k = 0; k < kTripSplits; ++k) {
      pieces[k] = uint4{0, 0, 0, 0};
      if (first + k * kStep < from.splits.count)
        pieces[k] = __ldcg(partial_piece(from, first + k * kStep, row, column));
    }
  }

  /// Adds the loaded columns to `total`, with weights relative to the row's max `top`.
  __device__ void add_to(CombinedColumns& total, const SplitWeights& weights, int first, int count,
                         float top) const {
    const float pivot = top == -kInfinity ? 0.0f : top;
#pragma unroll
    for (int k = 0; k < kTripSplits; ++k) {
      if (first + k * kStep >= count) break;
      const float w = exp2f(weights.max[first + k * kStep] - pivot);
      const auto* halves = reinterpret_cast<const f16*>(&pieces[k]);
#pragma unroll
      for (int i = 0; i < kPieceColumns; ++i) total[i] = fmaf(w, to_float(halves[i]), total[i]);
    }
  }
};

/// Threads of an SM that combine at once: each has 64 registers.
inline constexpr int kCombineSmThreads = 1024;
/// Threads of a combine block: kShares warps share the splits of the same columns of a row.
template <int kShares>
inline constexpr int kCombineThreads = kShares* kCombineWarps* kWarp;

template <int kShares>
struct CombineShared {
  SplitWeights weights;
  float sums[kShares][kPieceColumns][kCombineWarps * kWarp];
};

/// Combines the splits of row `row` of a query tile; all threads of the block. Two trips to memory: the first
/// reads the number of splits, the second the splits, up to kTripSplits a warp.
template <int kShares>
__device__ __forceinline__ void combine_row(const AttentionParams& p, const SplitQueryTile& tile, int row,
                                            CombineShared<kShares>& s) {
  const int count = tile.splits.count;
  const SplitPartials from{p, tile.splits};
  const int place = static_cast<int>(threadIdx.x) % (kCombineWarps * kWarp);
  const int share = static_cast<int>(threadIdx.x) / (kCombineWarps * kWarp);
  const int column = place * kPieceColumns;
  SplitTrip<kShares> trip(from, row, share, column);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kCombineThreads<kShares>) {
    s.weights.max[i] = __ldcg(from.max(i, row));
    s.weights.sum[i] = __ldcg(from.sum(i, row));
  }
  __syncthreads();
  const RowTotal total = total_of_splits(s.weights, count);
  CombinedColumns sum = {};
  trip.add_to(sum, s.weights, share, count, total.max);
#pragma unroll 1
  for (int i = share + kTripSplits * kShares; i < count; i += kTripSplits * kShares) {
    trip = {from, row, i, column};
    trip.add_to(sum, s.weights, i, count, total.max);
  }
  if constexpr (kShares > 1) {
#pragma unroll
    for (int i = 0; i < kPieceColumns; ++i) s.sums[share][i][place] = sum[i];
    __syncthreads();
    if (share > 0) return;
#pragma unroll
    for (int k = 1; k < kShares; ++k) {
#pragma unroll
      for (int i = 0; i < kPieceColumns; ++i) sum[i] += s.sums[k][i][place];
    }
  }
  const RowWriter writer(p, tile.query_tile, 0, row, total.max, total.sum);
#pragma unroll
  for (int i = 0; i < kPieceColumns; i += kLaneColumns)
    writer.write(column + i, float4{sum[i], sum[i + 1], sum[i + 2], sum[i + 3]});
}

/// Combines this block's rows: `block_rows` of them, or one without kManyRows.
template <int kShares, bool kManyRows>
__device__ __forceinline__ void combine_rows(const AttentionParams& p, int block_rows,
                                             CombineShared<kShares>& shared) {
  const int first = static_cast<int>(blockIdx.x) * (kManyRows ? block_rows : 1);
  const SplitQueryTile tile = p.split_tiles[first / p.query_tile_rows];
  if (tile.splits.count == 1) return;
  const int row = first % p.query_tile_rows;
  if constexpr (kManyRows) {
    const int end = min(row + block_rows, tile.query_tile.num_rows);
#pragma unroll 1
    for (int r = row; r < end; ++r) {
      combine_row(p, tile, r, shared);
      __syncthreads();
    }
  } else if (row < tile.query_tile.num_rows) {
    combine_row(p, tile, row, shared);
  }
}

/// Combines the splits of all query tiles of the launch before it. A block has `block_rows` rows, or one
/// without kManyRows. In large batches most query tiles are not split, and a block takes time to find that
/// out, so fewer blocks have more rows.
template <int kShares, bool kManyRows>
__global__ __launch_bounds__(
    kCombineThreads<kShares>,
    kCombineSmThreads /
        kCombineThreads<kShares>) void combine_latent(const __grid_constant__ AttentionParams p,
                                                      int block_rows) {
  __shared__ CombineShared<kShares> shared;
  prefetch_params(p);
  follow_previous(p);
  combine_rows<kShares, kManyRows>(p, block_rows, shared);
}

}  // namespace helix::cuda::latent
