// SPDX-License-Identifier: Apache-2.0
// The kernel over latents (MLA): what it fits, and its two launches.
#include <cstdint>

#include "cuda/attention/kernel.hpp"
#include "cuda/attention/latent.cuh"
#include "cuda/attention/latent_e4m3.hpp"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {
namespace {

constexpr int kCombineColumns = kWarp * latent::kPieceColumns;   ///< Of a warp.
constexpr int kCombineWarps = kLatentColumns / kCombineColumns;  ///< Of a row, for some of its splits.
constexpr int kTripSplits = 9;  ///< Splits that a warp reads in one trip to memory.

/// The max of each split of a row and their sums of weights, in shared memory.
struct SplitWeights {
  float max[kMaxLatentSplits];
  float sum[kMaxLatentSplits];
};

/// What a row's splits come to: the largest max, and the sum of weights.
struct RowTotal {
  float max;
  float sum;
};

/// By one warp.
__device__ RowTotal total_of_splits(const SplitWeights& weights, int count) {
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

using CombinedColumns = float[latent::kPieceColumns];

/// Some columns of splits first, first + kStep, ... of a row, as many as one trip to memory brings.
template <int kStep>
struct SplitTrip {
  uint4 pieces[kTripSplits];

  __device__ SplitTrip(const SplitPartials& from, int row, int first, int column) {
#pragma unroll
    for (int k = 0; k < kTripSplits; ++k) {
      pieces[k] = uint4{0, 0, 0, 0};
      if (first + k * kStep < from.splits.count)
        pieces[k] = __ldcg(latent::partial_piece(from, first + k * kStep, row, column));
    }
  }

  /// Adds them to `total`, with weights that are relative to the row's max `top`.
  __device__ void add_to(CombinedColumns& total, const SplitWeights& weights, int first, int count,
                         float top) const {
    const float pivot = top == -kInfinity ? 0.0f : top;
#pragma unroll
    for (int k = 0; k < kTripSplits; ++k) {
      if (first + k * kStep >= count) break;
      const float w = exp2f(weights.max[first + k * kStep] - pivot);
      const auto* halves = reinterpret_cast<const f16*>(&pieces[k]);
#pragma unroll
      for (int i = 0; i < latent::kPieceColumns; ++i) total[i] = fmaf(w, to_float(halves[i]), total[i]);
    }
  }
};

/// The threads of a block of the combine, in which kShares warps share the splits of some columns of a row.
template <int kShares>
constexpr int kCombineThreads = kShares* kCombineWarps* kWarp;

template <int kShares>
struct CombineShared {
  SplitWeights weights;
  float sums[kShares][latent::kPieceColumns][kCombineWarps * kWarp];
};

/// Combines the splits of row `row` of a query tile; all threads of the block. Two trips to memory: what
/// tells the splits, and the splits, of which up to kTripSplits a warp.
template <int kShares>
__device__ __forceinline__ void combine_row(const AttentionParams& p, const SplitQueryTile& tile, int row,
                                            CombineShared<kShares>& s) {
  const int count = tile.splits.count;
  const SplitPartials from{p, tile.splits};
  const int place = static_cast<int>(threadIdx.x) % (kCombineWarps * kWarp);
  const int share = static_cast<int>(threadIdx.x) / (kCombineWarps * kWarp);
  const int column = place * latent::kPieceColumns;
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
    for (int i = 0; i < latent::kPieceColumns; ++i) s.sums[share][i][place] = sum[i];
    __syncthreads();
    if (share > 0) return;
#pragma unroll
    for (int k = 1; k < kShares; ++k) {
#pragma unroll
      for (int i = 0; i < latent::kPieceColumns; ++i) sum[i] += s.sums[k][i][place];
    }
  }
  const RowWriter writer(p, tile.query_tile, 0, row, total.max, total.sum);
#pragma unroll
  for (int i = 0; i < latent::kPieceColumns; i += kLaneColumns)
    writer.write(column + i, float4{sum[i], sum[i + 1], sum[i + 2], sum[i + 3]});
}

/// Combines the splits of all query tiles of the launch before it, a block `block_rows` rows, one if not
/// kManyRows: most query tiles of large batches are not split, and blocks that find so take time. 64
/// registers, so that rows of 8 query tiles of 128 run all at once.
template <int kShares, bool kManyRows>
__global__ __launch_bounds__(kCombineThreads<kShares>, 1024 / kCombineThreads<kShares>) void combine_latent(
    const __grid_constant__ AttentionParams p, int block_rows) {
  __shared__ CombineShared<kShares> shared;
  prefetch_params(p);
  follow_previous();
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

template <int kShares, bool kManyRows>
void launch_combine(const AttentionParams& p, int block_rows, StreamHandle stream) {
  const auto kernel = combine_latent<kShares, kManyRows>;
  // The same division of the SM's memory as before: another would wait until the SM is empty.
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
  launch_early(kernel, static_cast<unsigned>(p.num_query_tiles * p.query_tile_rows / block_rows),
               kCombineThreads<kShares>, 0, stream, true, p, block_rows);
}

template <int kShares>
void launch_combine(const AttentionParams& p, StreamHandle stream) {
  constexpr int kMostBlocks = 132 * 1024 / kCombineThreads<kShares>;  // that run at once
  int block_rows = 1;
  while (p.num_query_tiles * p.query_tile_rows / block_rows > kMostBlocks &&
         p.query_tile_rows % (2 * block_rows) == 0)
    block_rows *= 2;
  block_rows > 1 ? launch_combine<kShares, true>(p, block_rows, stream)
                 : launch_combine<kShares, false>(p, 1, stream);
}

/// Combines about `splits` splits of each query tile. A warp for half of what one could read in a trip is
/// faster: 41.5 us for 42.5 with 8 sequences of 8192 tokens.
void launch_combine(const AttentionParams& p, int splits, StreamHandle stream) {
  if (splits <= kTripSplits / 2) return launch_combine<1>(p, stream);
  if (splits <= 2 * kTripSplits) return launch_combine<2>(p, stream);
  if (splits <= 4 * kTripSplits) return launch_combine<4>(p, stream);
  splits <= 8 * kTripSplits ? launch_combine<8>(p, stream) : launch_combine<16>(p, stream);
}

/// Returns the work items that there are at most.
template <class T, int kBlocks>
int launch(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  constexpr int kBytes = static_cast<int>(sizeof(latent::Shared<kBlocks>));
  const int blocks = latent_blocks(grid, kBlocks);
  const auto kernel = attend_latent<T, kBlocks>;
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const int box = latent_box_tokens(p.page_tokens);
  const int chunks = box == kLatentTileTokens ? latent::kUnitChunks : 1;
  launch_early(kernel, static_cast<unsigned>(blocks), latent::kThreads, kBytes, grid.stream, true, p,
               paged_chunks_map(p.k, call.dtype, kLatentColumns, call.kv, box, chunks),
               paged_chunks_map(p.rope, call.dtype, kRopeColumns, call.kv, box, 1), box);
  return blocks / kBlocks;
}

template <class T>
int launch_rows(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  return p.query_tile_rows > kGroupRows ? launch<T, 2>(p, call, grid) : launch<T, 1>(p, call, grid);
}

int launch_attention(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  if (call.kv.format.dtype != call.dtype) return launch_latent_e4m3(p, call, grid);
  return call.dtype == DType::bf16 ? launch_rows<bf16>(p, call, grid) : launch_rows<f16>(p, call, grid);
}

bool is_latent_shape(std::int64_t head_dim, std::int64_t value_dim) {
  return head_dim == kLatentColumns + kRopeColumns && value_dim == kLatentColumns;
}

}  // namespace

const AttentionKernel kLatentKernel{
    .fits =
        [](const AttentionCall& call) {
          const KvFormat& format = call.kv.format;
          return call.is_hopper && format.is_latent && is_latent_shape(format.head_dim, format.value_dim) &&
                 (call.dtype == format.dtype || format.dtype == DType::fp8_e4m3 ||
                  (format.is_mixed() && call.dtype == DType::bf16)) &&
                 size_bytes(call.dtype) == 2 && call.q_alignment == 16 && call.kv_alignment == 16 &&
                 call.has_tensor_maps;
        },
    .query_tile_rows =
        [](std::int64_t head_dim, std::int64_t value_dim) {
          return is_latent_shape(head_dim, value_dim) ? 2 * kGroupRows : 0;
        },
    .sm_rows = [](std::int64_t head_dim,
                  std::int64_t value_dim) { return is_latent_shape(head_dim, value_dim) ? kGroupRows : 0; },
    .has_fixed_query_tile = false,
    .launch =
        [](const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
          const int items = launch_attention(p, call, grid);
          launch_combine(p, items / p.num_query_tiles, grid.stream);
        }};

}  // namespace helix::cuda
