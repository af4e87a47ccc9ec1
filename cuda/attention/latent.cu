// SPDX-License-Identifier: Apache-2.0
// The kernel over latents (MLA): what it fits, and its two launches.
#include <algorithm>
#include <cstdint>

#include "cuda/attention/kernel.hpp"
#include "cuda/attention/latent.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {
namespace {

constexpr int kCombineThreads = 256;
constexpr int kCombineColumns = kWarp * kLaneColumns;            ///< Of a warp.
constexpr int kCombineWarps = kLatentColumns / kCombineColumns;  ///< Of a row.

/// Combines the splits of all query tiles of the launch before it, a warp for each part of a row.
__global__ __launch_bounds__(kCombineThreads) void combine_latent(const __grid_constant__ AttentionParams p) {
  prefetch_params(p);
  follow_previous();
  const int warp = static_cast<int>(blockIdx.x * kCombineThreads + threadIdx.x) / kWarp;
  const int row = warp / kCombineWarps % p.query_tile_rows;
  const int u = warp / kCombineWarps / p.query_tile_rows;
  if (u >= p.num_query_tiles) return;
  const SplitQueryTile tile = p.split_tiles[u];
  if (tile.splits.count == 1 || row >= tile.query_tile.num_rows) return;
  const int begin = warp % kCombineWarps * kCombineColumns;
  combine_row({p, tile.splits}, tile.query_tile, 0, row, begin, begin + kCombineColumns);
}

/// Tokens of the boxes that the copy engine takes out of pages: as many as lie in one page wherever a KV tile
/// begins.
int box_tokens(int page_tokens) {
  return std::min(page_tokens & -page_tokens, kLatentTileTokens);
}

template <class T, int kBlocks>
void launch(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  constexpr int kBytes = static_cast<int>(sizeof(latent::Shared<kBlocks>));
  const auto kernel = attend_latent<T, kBlocks>;
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const int box = box_tokens(p.page_tokens);
  const CUtensorMap latents = paged_rows_map(p.k, call.dtype, kLatentColumns, call.kv, box);
  const CUtensorMap ropes = paged_rows_map(p.rope, call.dtype, kRopeColumns, call.kv, box);
  const int blocks = std::max(1, grid.blocks / kBlocksPerSm / kBlocks) * kBlocks;
  launch_early(kernel, blocks, latent::kThreads, kBytes, grid.stream, true, p, latents, ropes, box);
  // The same division of the SM's memory as before: another would wait until the SM is empty.
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(combine_latent, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
  const int warps = p.num_query_tiles * p.query_tile_rows * kCombineWarps;
  launch_early(combine_latent, ceil_div(warps, kCombineThreads / kWarp), kCombineThreads, 0, grid.stream,
               true, p);
}

template <class T>
void launch_rows(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  return p.query_tile_rows > kGroupRows ? launch<T, 2>(p, call, grid) : launch<T, 1>(p, call, grid);
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
                 call.dtype == format.dtype && size_bytes(call.dtype) == 2 && call.q_alignment == 16 &&
                 call.kv_alignment == 16;
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
          return call.dtype == DType::bf16 ? launch_rows<bf16>(p, call, grid)
                                           : launch_rows<f16>(p, call, grid);
        }};

}  // namespace helix::cuda
