// SPDX-License-Identifier: Apache-2.0
// AttentionKernel: what each attention kernel declares about itself, for the table in partial_attention.cu to
// choose from.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/cuda/runtime.hpp>
#include <helix/kv_format.hpp>

#include "cuda/runtime/shared_memory.hpp"

namespace helix::cuda {

struct AttentionParams;

/// Most blocks of an SM: one keeps reading KV while the other runs the epilogue of a query tile.
inline constexpr int kBlocksPerSm = 2;
inline constexpr int kMaxQueryTiles = 256;  ///< Most query tiles of a launch, unless a kernel takes more.

/// What a call of partial_attention asks of a kernel.
struct AttentionCall {
  DType dtype = DType::f32;  ///< Type of q and out.
  const KvView& kv;
  std::int64_t num_sequences = 0;
  std::int64_t most_rows = 0;   ///< Query rows of a KV head (query tokens * group) in the longest sequence.
  std::size_t q_alignment = 0;  ///< Bytes, a power of two up to 16, that divide the address of each row of q.
  bool has_query_map = false;   ///< Whether a tensor map can step through the heads and tokens of q.
  /// Bytes, a power of two up to 16, that divide the address of each row of the cache.
  std::size_t kv_alignment = 0;
  bool has_tensor_maps = false;  ///< Whether tensor maps (TMA) can address all rows of the cache.
  bool is_hopper = false;        ///< Whether code for compute capability 9.0 runs.
  SharedMemory memory;           ///< Shared memory of the device.
};

/// The grid of a launch.
struct AttentionGrid {
  /// Blocks of half an SM each. A kernel whose blocks are larger or smaller launches as many as fill the same
  /// space.
  int blocks = 0;
  bool is_whole = false;  ///< Whether the grid may fill the device, with no room left for kernels beside it.
  /// Whether kernels of other ranks may share the GPU and wait for this launch.
  bool shares_device = false;
  StreamHandle stream = nullptr;
};

/// One entry of the table of kernels.
struct AttentionKernel {
  bool (*fits)(const AttentionCall& call);
  /// Most query rows of a query tile for these head sizes: the upper bound of
  /// AttentionParams::query_tile_rows.
  int (*query_tile_rows)(std::int64_t head_dim, std::int64_t value_dim);
  /// Most query rows that the blocks of an SM hold at a time; the workspace has two split partials for each.
  /// A kernel whose clusters combine through the workspace counts its rows twice. 0 for sizes that do not
  /// fit.
  int (*sm_rows)(std::int64_t head_dim, std::int64_t value_dim);
  /// Whether query tiles have query_tile_rows() rows even if no sequence has that many.
  bool has_fixed_query_tile;
  int most_query_tiles = kMaxQueryTiles;  ///< Most query tiles of a launch.
  /// If not 0: sequences with fewer query rows of a KV head are launched apart, by the kernel that fits them,
  /// because it reads their KV faster.
  std::int64_t least_rows = 0;
  void (*launch)(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid);
};

/// wgmma of compute capability 9.0, for many query rows of a KV head: prefill and drafts. q and KV have one
/// 16-bit type and are aligned to 16 bytes, strides of KV are not negative, out has any alignment.
extern const AttentionKernel kWaves;
/// Like kWaves, for e4m3 KV with q and out of 16 bits, and for rows of any strides.
extern const AttentionKernel kWavesE4m3;
/// mma.sync and bulk copies of compute capability 9.0. q, out and KV have one 16-bit type and equal head
/// sizes of 64, 80, 96, 112, 128 or 256; q and KV are aligned to 16 bytes, out has any alignment. A page
/// holds the rows of a head one after another (Helix's own format), so one copy brings them.
extern const AttentionKernel kTensorPages;
/// Like kTensorPages, for rows of any strides that TMA takes (not negative) in pages of a multiple of 8
/// tokens: the token-major pages of vLLM and FlashInfer. Also keys of 192 columns with values of 128.
extern const AttentionKernel kTensorBoxes;
/// Like kTensorBoxes, for rows of any strides and pages of any size: pools of page size 1.
extern const AttentionKernel kTensorRows;
/// Like kTensorPages, for e4m3 KV with q and out of 16 bits. Pages have two tokens at least, with a head size
/// of 64 at least four, of 256 at least one.
extern const AttentionKernel kTensorPagesE4m3;
/// Like kTensorPagesE4m3, for rows of any strides.
extern const AttentionKernel kTensorRowsE4m3;
/// mma.sync of compute capability 9.0 over latents of 512 columns and 64 rope columns, for up to 16 query
/// rows of a sequence while sequences and their tokens are few. q, out and KV have one 16-bit type; rows of
/// KV have any strides, in pages of a multiple of 8 tokens those that TMA takes; q and KV are aligned to 16
/// bytes.
extern const AttentionKernel kNarrowLatent;
/// wgmma of compute capability 9.0 over latents of 512 columns and 64 rope columns. q and out have one 16-bit
/// type; KV has the same type, e4m3 or, with bf16 q, fp8_ds_mla. Rows of KV have any strides, in pages of a
/// multiple of 8 tokens those that TMA takes; those of q too, if KV has its type. q and KV are aligned to 16
/// bytes.
extern const AttentionKernel kLatentKernel;
/// mma.sync of compute capability 8.0, for all devices: q and out of f16 with KV of bf16.
extern const AttentionKernel kMmaRest;
/// mma.sync of compute capability 8.0, for all devices: q and out of 16 bits, KV of 16 bits or of e4m3, any
/// head sizes up to 256, any strides and alignment.
extern const AttentionKernel kMma;
/// Like kMmaRest, over latents of 512 columns and 64 rope columns.
extern const AttentionKernel kMmaLatentRest;
/// Like kMmaLatent, with more shared memory than some devices have.
extern const AttentionKernel kWideMmaLatent;
/// Like kMma, over latents of 512 columns and 64 rope columns.
extern const AttentionKernel kMmaLatent;
/// Plain f32 for any types, strides and devices, head sizes up to 1024.
extern const AttentionKernel kPortable;

}  // namespace helix::cuda
