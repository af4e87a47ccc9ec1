// SPDX-License-Identifier: Apache-2.0
// The kernel over latents (MLA), host side: which calls it takes, and its launches of attention and combine.
#include <cstdint>
#include <numeric>

#include "cuda/attention/kernel.hpp"
#include "cuda/attention/latent.cuh"
#include "cuda/attention/latent_combine.cuh"
#include "cuda/attention/latent_e4m3.hpp"
#include "cuda/kv_cache/paged_maps.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {
namespace {

template <int kShares, bool kManyRows>
void launch_combine(const AttentionParams& p, int block_rows, StreamHandle stream) {
  const auto kernel = latent::combine_latent<kShares, kManyRows>;
  // Keep the attention kernel's split between L1 and shared memory: to change it, an SM must first become
  // empty.
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
  launch_early(kernel, static_cast<unsigned>(p.num_query_tiles * p.query_tile_rows / block_rows),
               latent::kCombineThreads<kShares>, 0, stream, true, p, block_rows);
}

template <int kShares>
void launch_combine(const AttentionParams& p, const AttentionGrid& grid) {
  const int blocks =
      grid.blocks / kBlocksPerSm * (latent::kCombineSmThreads / latent::kCombineThreads<kShares>);
  int block_rows = 1;
  while (p.num_query_tiles * p.query_tile_rows / block_rows > blocks &&
         p.query_tile_rows % (2 * block_rows) == 0)
    block_rows *= 2;
  block_rows > 1 ? launch_combine<kShares, true>(p, block_rows, grid.stream)
                 : launch_combine<kShares, false>(p, 1, grid.stream);
}

/// Combines about `splits` splits of each query tile. A second warp shares a row's splits as soon as they are
/// more than half of what one warp reads in a trip: 41.5 us against 42.5 with 8 sequences of 8192 tokens.
void launch_combine(const AttentionParams& p, int splits, const AttentionGrid& grid) {
  if (splits <= latent::kTripSplits / 2) return launch_combine<1>(p, grid);
  if (splits <= 2 * latent::kTripSplits) return launch_combine<2>(p, grid);
  if (splits <= 4 * latent::kTripSplits) return launch_combine<4>(p, grid);
  splits <= 8 * latent::kTripSplits ? launch_combine<8>(p, grid) : launch_combine<16>(p, grid);
}

/// The boxes of q. If the rows of all tokens have one stride, they are one run, and a block's rows are a box.
/// If not, the heads of a token are a run.
latent::QueryBoxes query_boxes(const AttentionParams& p) {
  const int group = p.group;
  const std::int64_t tokens = std::int64_t{p.first_token} + p.num_tokens;
  const std::int64_t row_stride = group > 1 ? p.q_head_stride : p.q_token_stride;
  const bool is_one_run = tokens == 1 || p.q_token_stride == group * row_stride;
  const int run_rows = is_one_run ? static_cast<int>(tokens * group) : group;
  const int rows = is_one_run ? kGroupRows : std::gcd(std::gcd(group, int{p.query_tile_rows}), kGroupRows);
  return {query_rows_map(p.q, p.dtype, {p.head_dim, run_rows, is_one_run ? 1 : tokens}, 2 * row_stride,
                         2 * p.q_token_stride, rows, 1),
          Divisor(run_rows), rows};
}

/// Launches attention. Returns the largest possible number of work items.
template <class T, int kBlocks>
int launch(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  constexpr int kBytes = static_cast<int>(sizeof(latent::Shared<kBlocks>));
  const int blocks = latent_blocks(grid, kBlocks);
  const auto launch_kernel = [&](auto kernel, const auto&... maps) {
    HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    launch_early(kernel, static_cast<unsigned>(blocks), latent::kThreads, kBytes, grid.stream, true, p,
                 query_boxes(p), maps...);
  };
  if (has_latent_boxes(call.kv.format)) {
    const int box = box_tokens_of(call.kv.format, kLatentTileTokens);
    const int chunks = box == kLatentTileTokens ? latent::kUnitChunks : 1;
    launch_kernel(attend_latent<T, kBlocks>,
                  paged_chunks_map(p.k, call.dtype, kLatentColumns, call.kv, box, chunks),
                  paged_chunks_map(p.rope, call.dtype, kRopeColumns, call.kv, box, 1), box);
  } else {
    launch_kernel(attend_latent_rows<T, kBlocks>);
  }
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

}  // namespace

const AttentionKernel kLatentKernel{
    .fits =
        [](const AttentionCall& call) {
          const KvFormat& format = call.kv.format;
          if (!fits_latents(call)) return false;
          return call.dtype == format.dtype
                     ? call.has_query_map
                     : format.dtype == DType::fp8_e4m3 || (format.is_mixed() && call.dtype == DType::bf16);
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
          launch_combine(p, items / p.num_query_tiles, grid);
        }};

}  // namespace helix::cuda
