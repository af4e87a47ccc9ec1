// SPDX-License-Identifier: Apache-2.0
// The instances of the tensor-core kernel, and their launches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "cuda/attention/kernel.hpp"
#include "cuda/attention/tensor.cuh"
#include "cuda/attention/tensor_boxes.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {

/// A grid of clusters.
struct ClusterGrid {
  int blocks;
  int cluster;  ///< Blocks of a cluster.
};

/// Chooses the grid. If one cluster can split each sequence, takes the largest clusters that all fit at once
/// with some SMs to spare, and leaves the other SMs to the next kernel. Otherwise takes all `blocks`, in
/// pairs. Decode steps of 8 layers, one sequence, clusters of 4 and of 8 (H200): 560 tokens 1.151 and 1.145
/// ms, 800 tokens 1.165 and 1.156. If other ranks share the device, only pairs are sure to find room beside
/// their waiting kernels.
inline ClusterGrid cluster_grid(const AttentionParams& p, const KvView& kv, int blocks, bool shares_device) {
  const std::int64_t tokens = page_list_tokens(kv);
  const int parts = p.num_query_tiles * p.kv_heads;
  for (int cluster = shares_device ? 1 : kMaxClusterBlocks; cluster > 1; cluster /= 2) {
    if (tokens <= cluster * kClusterBlockTokens && 4 * cluster * parts <= 3 * blocks)
      return {cluster * parts, cluster};
  }
  return {blocks, blocks % 2 == 0 ? 2 : 1};
}

/// Launches the kernel of these sizes with a block an SM if it has eight warps, else two.
template <template <int, int, int> class Copies, class KV, int kDim, int kValueDim, int kMTiles, int kWarps,
          int kTokens, int kStages, int kStepTokens>
void launch_tensor(const AttentionParams& p, const KvView& kv, const AttentionGrid& grid) {
  using Kernel = Tensor<KV, kDim, kValueDim, kMTiles, kWarps, kTokens, kStages, Copies, kStepTokens>;
  constexpr int kBytes = static_cast<int>(sizeof(typename Kernel::Shared));
  constexpr int kOther = 1024 + 64;  // the system's, and static variables
  static_assert(Kernel::kBlocks * (kBytes + kOther) <= 228 * 1024);
  const auto kernel =
      attend_tensor<KV, kDim, kValueDim, kMTiles, kWarps, kTokens, kStages, Copies, kStepTokens>;
  const int blocks = std::max(1, grid.blocks * Kernel::kBlocks / kBlocksPerSm);
  const ClusterGrid clusters =
      Kernel::kHasClusters ? cluster_grid(p, kv, blocks, grid.shares_device) : ClusterGrid{blocks, 1};
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_with(LaunchAttributes().early().clusters(clusters.cluster), kernel,
              static_cast<unsigned>(clusters.blocks), Kernel::kThreads, kBytes, grid.stream, p,
              Kernel::TileCopies::maps_of(p, kv));
}

/// launch_tensor() with one or two m16 tiles in a query tile, as this launch needs.
template <template <int, int, int> class Copies, class KV, int kDim, int kWarps, int kTokens, int kStages,
          int kNarrowStep, int kWideStep, int kValueDim = kDim>
void launch_rows(const AttentionParams& p, const KvView& kv, const AttentionGrid& grid) {
  if (p.query_tile_rows > kMmaRows) {
    launch_tensor<Copies, KV, kDim, kValueDim, 2, kWarps, kTokens, kStages, kWideStep>(p, kv, grid);
  } else {
    launch_tensor<Copies, KV, kDim, kValueDim, 1, kWarps, kTokens, kStages, kNarrowStep>(p, kv, grid);
  }
}

/// Whether a launch splits each query tile over many SMs. Its epilogue then decides the time, and blocks that
/// fill an SM leave half as many splits to combine.
inline bool has_many_splits(const AttentionParams& p, const AttentionGrid& grid) {
  return grid.is_whole && 2 * p.num_query_tiles * p.kv_heads <= grid.blocks / kBlocksPerSm;
}

/// Whether a call has what every way to fetch KV tiles needs: the device, q of 16 bits, aligned rows, no
/// latents.
inline bool fits_tensor(const AttentionCall& call) {
  return call.is_hopper && !call.kv.format.is_latent && size_bytes(call.dtype) == 2 &&
         call.q_alignment == 16 && call.kv_alignment == 16;
}

/// Whether K and V lie at the same places of their pools, the rows of a head follow one another in a page,
/// and a KV tile has no more pages than a warp has lanes.
inline bool fits_page_copies(const KvFormat& format, std::int64_t kv_tile_tokens) {
  return format.k == format.v && format.k.token == format.head_dim && format.head_dim == format.value_dim &&
         format.page_tokens * kWarp >= kv_tile_tokens;
}

/// Whether boxes divide pages and the KV tiles of any kernel.
inline bool fits_boxes(const AttentionCall& call) {
  return call.kv.format.page_tokens % kMinBoxTokens == 0 && call.has_tensor_maps;
}

/// Whether K and V have rows of one of the equal sizes that are built.
inline bool is_tensor_shape(std::int64_t head_dim, std::int64_t value_dim) {
  constexpr std::int64_t kDims[] = {64, 80, 96, 112, 128, 256};
  return head_dim == value_dim && std::find(std::begin(kDims), std::end(kDims), head_dim) != std::end(kDims);
}
inline bool fits_tensor_dims(const KvFormat& format) {
  return is_tensor_shape(format.head_dim, format.value_dim);
}

/// Whether K and V have rows of the unequal sizes that are built.
inline bool is_unequal_tensor_shape(std::int64_t head_dim, std::int64_t value_dim) {
  return head_dim == 192 && value_dim == 128;
}

/// Whether KV has q's 16-bit type and rows of a size that is built where K and V may be unequal.
inline bool fits_unequal_rows_16(const AttentionCall& call) {
  const KvFormat& format = call.kv.format;
  return fits_tensor(call) && format.dtype == call.dtype &&
         (fits_tensor_dims(format) || is_unequal_tensor_shape(format.head_dim, format.value_dim));
}

/// Rows of a query tile: as many as registers hold.
inline int tensor_query_tile_rows(std::int64_t, std::int64_t value_dim) {
  return value_dim > 128 ? kMmaRows : 2 * kMmaRows;
}

inline int tensor_sm_rows(std::int64_t head_dim, std::int64_t value_dim) {
  if (!is_tensor_shape(head_dim, value_dim) && !is_unequal_tensor_shape(head_dim, value_dim)) return 0;
  return kBlocksPerSm * tensor_query_tile_rows(head_dim, value_dim);
}

/// Tokens of a KV tile of 16 bits. With page copies a warp looks up the pages of a tile, one a lane.
inline constexpr int kTileTokens16 = kWarp;

/// Launches for 16-bit KV and q of the same type. Measured on H200: eight warps an SM hide each other's
/// latencies; more stages add nothing.
template <class T, template <int, int, int> class Copies>
void launch_tensor_16(const AttentionParams& p, const KvView& kv, const AttentionGrid& grid) {
  if constexpr (Copies<16, 16, kWarp>::kTakesUnequalRows) {
    if (p.head_dim != p.value_dim)
      return launch_rows<Copies, T, 192, 8, kTileTokens16, 1, 32, 32, 128>(p, kv, grid);
  }
  switch (p.head_dim) {
    case 64:
      return launch_rows<Copies, T, 64, 4, kTileTokens16, 2, 32, 32>(p, kv, grid);
    case 80:
      return launch_rows<Copies, T, 80, 4, kTileTokens16, 2, 32, 32>(p, kv, grid);
    case 96:
      return launch_rows<Copies, T, 96, 4, kTileTokens16, 1, 32, 32>(p, kv, grid);
    case 112:
      return launch_rows<Copies, T, 112, 4, kTileTokens16, 1, 32, 32>(p, kv, grid);
    case 128:
      return has_many_splits(p, grid) ? launch_rows<Copies, T, 128, 8, kTileTokens16, 1, 32, 32>(p, kv, grid)
                                      : launch_rows<Copies, T, 128, 4, kTileTokens16, 1, 32, 32>(p, kv, grid);
    default:
      return launch_tensor<Copies, T, 256, 256, 1, 2, kTileTokens16, 1, 32>(p, kv, grid);
  }
}

/// launch_tensor_16() for the type of q.
template <template <int, int, int> class Copies>
void launch_tensor_16_bits(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  call.dtype == DType::bf16 ? launch_tensor_16<bf16, Copies>(p, call.kv, grid)
                            : launch_tensor_16<f16, Copies>(p, call.kv, grid);
}

/// Whether a launch has more query tiles and heads than SMs, none with many tokens. Blocks of half an SM then
/// hide each other's prologues and epilogues. Over e4m3, with 8 KV heads (H200), by blocks of a whole SM and
/// of half of one: 32 sequences of 256 tokens 22.7 and 10.4 us, 256 of 256 101 and 76, 256 of 1024 169 and
/// 149; 64 of 8192, where heads have 8 queries, 255.8 and 260.2.
inline bool has_many_short_tiles(const AttentionParams& p, const KvView& kv, const AttentionGrid& grid) {
  constexpr std::int64_t kShortTokens = 2048;
  return p.num_query_tiles * p.kv_heads > grid.blocks / kBlocksPerSm && page_list_tokens(kv) <= kShortTokens;
}

/// Tokens of an e4m3 KV tile. Bulk copies, which bring tiles page by page, are best large, copies by load
/// units best issued early. With rows of 64 bytes, two stages of half as many tokens reach 4 % less
/// bandwidth.
constexpr int e4m3_tile_tokens(std::int64_t head_dim, bool is_paged) {
  if (head_dim == 256) return 32;
  if (!is_paged) return head_dim <= 80 ? 64 : 32;
  return head_dim == 64 ? 128 : 64;
}

/// Launches for e4m3 KV and q of bf16 or f16.
template <template <int, int, int> class Copies>
void launch_tensor_e4m3(const AttentionParams& p, const KvView& kv, const AttentionGrid& grid) {
  using KV = fp8_e4m3;
  constexpr bool kIsPaged = !Copies<16, 16, kWarp>::kTakesLoadUnits;
  constexpr int kStages = kIsPaged ? 1 : 2;
  const auto launch = [&]<int kDim, int kWarps, int kNarrowStep, int kWideStep>() {
    launch_rows<Copies, KV, kDim, kWarps, e4m3_tile_tokens(kDim, kIsPaged), kStages, kNarrowStep, kWideStep>(
        p, kv, grid);
  };
  constexpr int kStep = kIsPaged ? 64 : 32;
  switch (p.head_dim) {
    case 64:
      return launch.template operator()<64, 4, 64, 64>();
    case 80:
      return launch.template operator()<80, 4, 64, 32>();
    case 96:
      return launch.template operator()<96, 8, kStep, 32>();
    case 112:
      return launch.template operator()<112, 8, kStep, 32>();
    case 128:
      return has_many_short_tiles(p, kv, grid) ? launch.template operator()<128, 4, kStep, 32>()
                                               : launch.template operator()<128, 8, kStep, 32>();
    default:
      return launch_tensor<Copies, KV, 256, 256, 1, 2, e4m3_tile_tokens(256, kIsPaged), 2, 32>(p, kv, grid);
  }
}

}  // namespace helix::cuda
