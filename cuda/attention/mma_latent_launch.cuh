// SPDX-License-Identifier: Apache-2.0
// The instances of the kernel of mma_latent.cuh, and their launches.
#pragma once

#include "cuda/attention/kernel.hpp"
#include "cuda/attention/mma_latent.cuh"
#include "cuda/attention/mma_launch.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {

/// Query rows of a query tile, in blocks of kWideMmaLatentBytes.
inline constexpr int kWideMmaLatentRows = 64;
inline constexpr int kMmaLatentRows = 32;  ///< Query rows of a query tile on any device.
/// Shared memory that a block may have with compute capabilities 8.0, 8.7, 9.0, 10 and 11; others allow 99
/// KiB.
inline constexpr int kWideMmaLatentBytes = 163 * 1024;

template <class KV, int kRowWarps, int kStages, bool kHasRest, int kBlocks>
__global__ __launch_bounds__(kMmaLatentWarps* kWarp,
                             kBlocks) void attend_mma_latent(const __grid_constant__ AttentionParams p,
                                                             RowAlignment alignment) {
  prefetch_params(p);
  follow_previous(p);
  MmaLatent<KV, kRowWarps, kStages, kHasRest>::attend(p, alignment);
  finish_messages(p);
}

template <class KV, int kRowWarps, int kStages, bool kHasRest, int kBlocks, int kMaxBytes>
void launch_mma_latent_tiles(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  using Kernel = MmaLatent<KV, kRowWarps, kStages, kHasRest>;
  constexpr int kBytes = static_cast<int>(sizeof(typename Kernel::Shared));
  static_assert(kBytes <= kMaxBytes);
  static_assert(kBlocks * Kernel::kRows <= kWideMmaLatentRows, "more split partials than sm_rows");
  const auto kernel = attend_mma_latent<KV, kRowWarps, kStages, kHasRest, kBlocks>;
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_early(kernel, static_cast<unsigned>(mma_blocks(call, grid, kBytes, kBlocks)), Kernel::kThreads,
               kBytes, grid.stream, call.is_hopper, p, row_alignment(p, call));
}

/// Launches with two stages, on devices that have room for them.
template <class KV>
void launch_wide_mma_latent(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  if (p.query_tile_rows > kMmaRows)
    return launch_mma_latent_tiles<KV, 4, 2, false, 1, kWideMmaLatentBytes>(p, call, grid);
  launch_mma_latent_tiles<KV, 1, 2, false, 2, kWideMmaLatentBytes>(p, call, grid);
}

/// Launches on any device: two stages for e4m3, one for 16 bits.
template <class KV>
void launch_mma_latent(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  constexpr int kStages = sizeof(KV) == 1 ? 2 : 1;
  if (p.query_tile_rows > kMmaRows)
    return launch_mma_latent_tiles<KV, 2, kStages, false, 1, kMinSharedMemory.block_bytes>(p, call, grid);
  launch_mma_latent_tiles<KV, 1, kStages, false, 2, kMinSharedMemory.block_bytes>(p, call, grid);
}

extern template void launch_wide_mma_latent<bf16>(const AttentionParams&, const AttentionCall&,
                                                  const AttentionGrid&);
extern template void launch_wide_mma_latent<f16>(const AttentionParams&, const AttentionCall&,
                                                 const AttentionGrid&);
extern template void launch_wide_mma_latent<fp8_e4m3>(const AttentionParams&, const AttentionCall&,
                                                      const AttentionGrid&);
extern template void launch_mma_latent<bf16>(const AttentionParams&, const AttentionCall&,
                                             const AttentionGrid&);
extern template void launch_mma_latent<f16>(const AttentionParams&, const AttentionCall&,
                                            const AttentionGrid&);
extern template void launch_mma_latent<fp8_e4m3>(const AttentionParams&, const AttentionCall&,
                                                 const AttentionGrid&);
extern template void launch_mma_latent_tiles<bf16, 1, 1, true, 1, kMinSharedMemory.block_bytes>(
    const AttentionParams&, const AttentionCall&, const AttentionGrid&);

}  // namespace helix::cuda
