// SPDX-License-Identifier: Apache-2.0
// The kernel over latents (MLA): what it fits, and its two launches.
#include <cstdint>

#include "cuda/attention/kernel.hpp"
#include "cuda/attention/latent.cuh"
#include "cuda/attention/latent_e4m3.hpp"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {
namespace {

constexpr int kCombineColumns = kWarp * kLaneColumns;            ///< Of a warp.
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

/// Four columns of splits first, first + kStep, ... of a row, as many as one trip to memory brings.
template <int kStep>
struct SplitTrip {
  float4 parts[kTripSplits];

  __device__ SplitTrip(const SplitPartials& from, int row, int first, int column) {
#pragma unroll
    for (int k = 0; k < kTripSplits; ++k) {
      parts[k] = float4{0.0f, 0.0f, 0.0f, 0.0f};
      if (first + k * kStep < from.splits.count) parts[k] = __ldcg(from.out(first + k * kStep, row, column));
    }
  }

  /// Adds them to `total`, with weights that are relative to the row's max `top`.
  __device__ void add_to(float4& total, const SplitWeights& weights, int first, int count, float top) const {
    const float pivot = top == -kInfinity ? 0.0f : top;
#pragma unroll
    for (int k = 0; k < kTripSplits; ++k) {
      if (first + k * kStep >= count) break;
      const float w = exp2f(weights.max[first + k * kStep] - pivot);
      total.x = fmaf(w, parts[k].x, total.x);
      total.y = fmaf(w, parts[k].y, total.y);
      total.z = fmaf(w, parts[k].z, total.z);
      total.w = fmaf(w, parts[k].w, total.w);
    }
  }
};

/// Combines the splits of all query tiles of the launch before it: a block for each row, in which kShares
/// warps share the splits of some columns. Two trips to memory: what tells the splits, and the splits, of
/// which up to kTripSplits a warp. 64 registers, so that rows of 8 query tiles of 128 run all at once.
template <int kShares>
__global__ __launch_bounds__(kShares* kCombineWarps* kWarp,
                             1024 / (kShares * kCombineWarps *
                                     kWarp)) void combine_latent(const __grid_constant__ AttentionParams p) {
  __shared__ SplitWeights weights;
  __shared__ float4 shared[kShares][kCombineWarps * kWarp];
  prefetch_params(p);
  follow_previous();
  const int row = static_cast<int>(blockIdx.x) % p.query_tile_rows;
  const SplitQueryTile tile = p.split_tiles[static_cast<int>(blockIdx.x) / p.query_tile_rows];
  const int count = tile.splits.count;
  if (count == 1 || row >= tile.query_tile.num_rows) return;
  const SplitPartials from{p, tile.splits};
  const int place = static_cast<int>(threadIdx.x) % (kCombineWarps * kWarp);
  const int share = static_cast<int>(threadIdx.x) / (kCombineWarps * kWarp);
  const int column = place * kLaneColumns;
  SplitTrip<kShares> trip(from, row, share, column);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kShares * kCombineWarps * kWarp) {
    weights.max[i] = __ldcg(from.max(i, row));
    weights.sum[i] = __ldcg(from.sum(i, row));
  }
  __syncthreads();
  const RowTotal total = total_of_splits(weights, count);
  float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
  trip.add_to(sum, weights, share, count, total.max);
#pragma unroll 1
  for (int i = share + kTripSplits * kShares; i < count; i += kTripSplits * kShares) {
    trip = {from, row, i, column};
    trip.add_to(sum, weights, i, count, total.max);
  }
  if constexpr (kShares > 1) {
    shared[share][place] = sum;
    __syncthreads();
    if (share > 0) return;
#pragma unroll
    for (int k = 1; k < kShares; ++k) {
      const float4 x = shared[k][place];
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
  }
  RowWriter(p, tile.query_tile, 0, row, total.max, total.sum).write(column, sum);
}

template <int kShares>
void launch_combine(const AttentionParams& p, StreamHandle stream) {
  const auto kernel = combine_latent<kShares>;
  // The same division of the SM's memory as before: another would wait until the SM is empty.
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
  launch_early(kernel, static_cast<unsigned>(p.num_query_tiles * p.query_tile_rows),
               kShares * kCombineWarps * kWarp, 0, stream, true, p);
}

/// Combines about `splits` splits of each query tile.
void launch_combine(const AttentionParams& p, int splits, StreamHandle stream) {
  if (splits <= kTripSplits) return launch_combine<1>(p, stream);
  if (splits <= 2 * kTripSplits) return launch_combine<2>(p, stream);
  splits <= 4 * kTripSplits ? launch_combine<4>(p, stream) : launch_combine<8>(p, stream);
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
