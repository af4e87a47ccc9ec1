// SPDX-License-Identifier: Apache-2.0
// The instances of the kernel of mma.cuh, and their launches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/attention/kernel.hpp"
#include "cuda/attention/mma.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {

inline constexpr int kMmaTileRows = 64;           ///< Most query rows of a query tile.
inline constexpr std::int64_t kMmaColumns = 256;  ///< Most columns of a row.

/// Alignment of the rows. A latent row's two parts may lie apart, and no copied piece may cross from one to
/// the other.
inline RowAlignment row_alignment(const AttentionParams& p, const AttentionCall& call) {
  const std::size_t split = p.key_columns < p.head_dim
                                ? static_cast<std::size_t>(p.key_columns * call.kv.format.element_bytes())
                                : 0;
  return {static_cast<int>(std::min(call.kv_alignment, common_alignment({split}))),
          static_cast<int>(call.q_alignment)};
}

/// Blocks to launch, as many as the SMs hold: a block has `bytes` of shared memory, and registers allow
/// `most` an SM.
inline int mma_blocks(const AttentionCall& call, const AttentionGrid& grid, int bytes, int most) {
  constexpr int kSystemBytes = 1024;  // shared memory that the system takes a block
  const int held = std::clamp(call.memory.sm_bytes / (bytes + kSystemBytes), 1, most);
  const int blocks = std::max(1, grid.blocks * held / kBlocksPerSm);
  return grid.is_whole ? blocks : std::min(blocks, grid.blocks);
}

template <class KV, int kDim, int kValueDim, int kRowWarps, int kTokens, int kStages, bool kHasRest,
          int kBlocks>
void launch_mma_tiles(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid,
                      const RowAlignment& alignment) {
  using Kernel = Mma<KV, kDim, kValueDim, kRowWarps, kTokens, kStages, kHasRest>;
  constexpr int kBytes = static_cast<int>(sizeof(typename Kernel::Shared));
  static_assert(kBytes <= kMinSharedMemory.block_bytes);
  static_assert(kBlocks * Kernel::kRows <= 2 * kMmaTileRows, "more split partials than sm_rows");
  const auto kernel = attend_mma<KV, kDim, kValueDim, kRowWarps, kTokens, kStages, kHasRest, kBlocks>;
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_early(kernel, static_cast<unsigned>(mma_blocks(call, grid, kBytes, kBlocks)), Kernel::kThreads,
               kBytes, grid.stream, call.is_hopper, p, alignment);
}

/// Stages of the ring, a half-tile each: as many as leave room for two blocks an SM on devices with the most
/// shared memory, and for one everywhere.
template <class KV, int kDim, int kRowWarps>
inline constexpr int kMmaStages = sizeof(KV) == 1 || kDim <= 64   ? 4
                                  : kDim <= 128                   ? 3
                                  : kDim <= 192 || kRowWarps == 1 ? 2
                                                                  : 3;

template <class KV, int kDim, int kValueDim, bool kHasRest>
void launch_mma_rows(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid,
                     const RowAlignment& alignment) {
  if constexpr (!kHasRest) {
    if (p.query_tile_rows > kMmaRows)
      return launch_mma_tiles<KV, kDim, kValueDim, 4, (kDim > 192 ? 32 : 64), kMmaStages<KV, kDim, 4>, false,
                              2>(p, call, grid, alignment);
  }
  launch_mma_tiles<KV, kDim, kValueDim, 1, 64, kMmaStages<KV, kDim, 1>, kHasRest,
                   (kDim > 128  ? 2
                    : kDim > 64 ? 3
                                : 4)>(p, call, grid, alignment);
}

/// Launches the instance for the smallest row sizes that hold the rows; shared memory is filled up with
/// zeros.
template <class KV, bool kHasRest>
void launch_mma(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  const RowAlignment alignment = row_alignment(p, call);
  const int widest = std::max(p.head_dim, p.value_dim);
  if (widest <= 64) return launch_mma_rows<KV, 64, 64, kHasRest>(p, call, grid, alignment);
  if (widest <= 128) return launch_mma_rows<KV, 128, 128, kHasRest>(p, call, grid, alignment);
  if (widest <= 192 && p.value_dim <= 128)
    return launch_mma_rows<KV, 192, 128, kHasRest>(p, call, grid, alignment);
  launch_mma_rows<KV, 256, 256, kHasRest>(p, call, grid, alignment);
}

extern template void launch_mma<bf16, false>(const AttentionParams&, const AttentionCall&,
                                             const AttentionGrid&);
extern template void launch_mma<bf16, true>(const AttentionParams&, const AttentionCall&,
                                            const AttentionGrid&);
extern template void launch_mma<f16, false>(const AttentionParams&, const AttentionCall&,
                                            const AttentionGrid&);
extern template void launch_mma<fp8_e4m3, false>(const AttentionParams&, const AttentionCall&,
                                                 const AttentionGrid&);

}  // namespace helix::cuda
