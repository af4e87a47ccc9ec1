// SPDX-License-Identifier: Apache-2.0
// The KV tiles of the kernel over latents for few query rows: their layout in shared memory, and their
// copies.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "cuda/attention/latent_block.cuh"
#include "cuda/attention/tensor_boxes.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda::narrow_latent {

inline constexpr int kTokens = 32;  ///< Tokens of a KV tile.
inline constexpr int kColumns = kLatentKeyColumns;
inline constexpr int kChunks = kColumns / kChunkColumns;
inline constexpr unsigned kRowBytes = kChunkColumns * 2u;  ///< Bytes of a row within a chunk.
inline constexpr unsigned kChunkBytes = kTokens * kRowBytes;
inline constexpr unsigned kTileBytes = kChunks * kChunkBytes;

/// Tensor maps of the latents and of their rope columns.
struct Maps {
  CUtensorMap latents;
  CUtensorMap ropes;
  int box_tokens = 0;
  int box_chunks = 0;  ///< Chunks of latents in a box: all, if a box has all tokens of a tile, else one.
};

/// A way to fetch KV tiles (tensor_copies.cuh): by TMA boxes, as swizzled chunks of 64 columns of all of a
/// tile's tokens, one after another. Each lane of a warp issues a box. They are issued one at a time, so a
/// few large ones are better.
struct ChunkBoxes {
  using Maps = narrow_latent::Maps;
  BoxPlace<kTokens> box;

  template <class Plan>
  __device__ __forceinline__ void look_up(const AttentionParams& p, const Maps& maps, const Plan& plan,
                                          const KvTileCursor& at) {
    box.look_up(p, maps.box_tokens, plan, at);
  }

  template <int kBarriers>
  __device__ __forceinline__ void issue(const AttentionParams&, const Maps& maps, const KvTileCursor&,
                                        unsigned stage, unsigned barrier) const {
    static_assert(kBarriers == 1);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const unsigned seen = __ballot_sync(~0u, box.has_box);
    const int first = __ffs(static_cast<int>(seen)) - 1;
    const unsigned box_bytes = static_cast<unsigned>(maps.box_tokens) * kRowBytes;
    if (lane == 0) barrier_expect(barrier, static_cast<unsigned>(__popc(seen) * kChunks) * box_bytes);
    __syncwarp();
    const int parts = (kChunks - 1) / maps.box_chunks + 1;  // the last part is the rope columns
    const int copies = __popc(seen) * parts;
#pragma unroll 1
    for (int begin = 0; begin < copies; begin += kWarp) {
      const int i = begin + lane;
      const int from = min(first + i / parts, kWarp - 1);
      const int page = __shfl_sync(~0u, box.page, from);
      const int in_page = __shfl_sync(~0u, box.in_page, from);
      if (i >= copies) continue;
      const bool is_rope = i % parts == parts - 1;
      const int chunk = i % parts * maps.box_chunks;
      copy_box_once(
          stage + static_cast<unsigned>(chunk) * kChunkBytes + static_cast<unsigned>(from) * box_bytes,
          is_rope ? maps.ropes : maps.latents, 0, in_page, is_rope ? 0 : chunk, page, barrier);
    }
  }
};

}  // namespace helix::cuda::narrow_latent
