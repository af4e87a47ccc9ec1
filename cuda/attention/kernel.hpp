// SPDX-License-Identifier: Apache-2.0
// AttentionKernel: what each attention kernel says of itself, for the table in partial_attention.cu to choose
// by.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/cuda/runtime.hpp>
#include <helix/kv_format.hpp>

#include "cuda/runtime/shared_memory.hpp"

namespace helix::cuda {

struct AttentionParams;

/// Blocks that an SM holds at most: one streams on while the other ends a query tile.
inline constexpr int kBlocksPerSm = 2;
inline constexpr int kMaxQueryTiles = 256;  ///< Query tiles of one launch, unless a kernel takes more.

/// What a call of partial_attention asks of a kernel.
struct AttentionCall {
  DType dtype = DType::f32;  ///< Type of q and out.
  const KvView& kv;
  std::int64_t num_sequences = 0;
  std::int64_t most_rows = 0;   ///< Query rows of a KV head (query tokens * group) in the longest sequence.
  std::size_t q_alignment = 0;  ///< Bytes, a power of two up to 16, that divide the address of each row of q.
  std::size_t kv_alignment = 0;  ///< Bytes that likewise divide the address of each row of the cache.
  bool has_tensor_maps = false;  ///< Whether the copy engine can walk all rows of the cache.
  bool is_hopper = false;        ///< Whether code for compute capability 9.0 runs.
  SharedMemory memory;           ///< The device's.
};

/// The grid of a launch.
struct AttentionGrid {
  int blocks = 0;         ///< Of half an SM each; a kernel with larger or smaller ones takes as much room.
  bool is_whole = false;  ///< Whether it has all of the device, nothing beside it.
  /// Whether kernels of other ranks may wait beside it for this one's.
  bool shares_device = false;
  StreamHandle stream = nullptr;
};

/// One kernel as the table sees it.
struct AttentionKernel {
  bool (*fits)(const AttentionCall& call);
  /// Query rows of a query tile at most, for rows of these sizes: what AttentionParams::query_tile_rows may
  /// be.
  int (*query_tile_rows)(std::int64_t head_dim, std::int64_t value_dim);
  /// Query rows that an SM has at a time, at most, and what its blocks find of as many: twice as many split
  /// partials are kept for it. 0 for sizes that do not fit.
  int (*sm_rows)(std::int64_t head_dim, std::int64_t value_dim);
  /// Whether a query tile has room for query_tile_rows() rows even if no sequence has so many.
  bool has_fixed_query_tile;
  int most_query_tiles = kMaxQueryTiles;  ///< Of one launch.
  void (*launch)(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid);
};

/// Warp-group products of compute capability 9.0, for many query rows of a KV head: prefill, and drafts. q
/// and KV of one 16-bit type, aligned to 16 bytes, no stride of KV going back; out of any alignment.
extern const AttentionKernel kWaves;
/// Tensor cores of compute capability 9.0; q, out and KV of one 16-bit type, equal head sizes of 64, 80, 96,
/// 112, 128 or 256, rows aligned to 16 bytes. Pages hold the rows of a head one after another (Helix's own
/// format): one copy a page.
extern const AttentionKernel kTensorPages;
/// Tensor cores as kTensorPages, for rows of any strides in pages of a multiple of 8 tokens: vLLM's and
/// FlashInfer's token-major pages; and keys of 192 columns with values of 128.
extern const AttentionKernel kTensorBoxes;
/// Tensor cores as kTensorBoxes, for pages of any size: pools of page size 1.
extern const AttentionKernel kTensorRows;
/// Tensor cores as kTensorPages, for KV of e4m3 under q and out of 16 bits; pages of two tokens at least, of
/// four with a head size of 64.
extern const AttentionKernel kTensorPagesE4m3;
/// Tensor cores as kTensorPagesE4m3, for rows of any strides.
extern const AttentionKernel kTensorRowsE4m3;
/// Tensor cores of compute capability 9.0, over latents of 512 columns and 64 of rope, for up to 16 query
/// rows of a sequence while sequences and their tokens are few; q, out and KV of one 16-bit type, rows of any
/// strides aligned to 16 bytes.
extern const AttentionKernel kNarrowLatent;
/// Warp-group products of compute capability 9.0, over latents of 512 columns and 64 of rope; q and out of
/// one 16-bit type, KV of the same, of e4m3 or, under bf16, of fp8_ds_mla; rows of any strides aligned to 16
/// bytes.
extern const AttentionKernel kLatentKernel;
/// Matrix instructions of compute capability 8.0, on all devices: q and out of f16 beside KV of bf16.
extern const AttentionKernel kMmaRest;
/// Matrix instructions of compute capability 8.0, on all devices: q and out of 16 bits, KV of 16 bits or of
/// e4m3, any head sizes up to 256, strides and alignment.
extern const AttentionKernel kMma;
/// As kMmaRest and kMma, over latents of 512 columns and 64 of rope.
extern const AttentionKernel kMmaLatentRest;
/// The same with more shared memory than some devices have.
extern const AttentionKernel kWideMmaLatent;
extern const AttentionKernel kMmaLatent;
/// Any sizes up to 1024, types, strides and devices, in plain f32.
extern const AttentionKernel kPortable;

}  // namespace helix::cuda
