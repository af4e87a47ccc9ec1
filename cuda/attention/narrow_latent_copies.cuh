// SPDX-License-Identifier: Apache-2.0
// The KV tiles of the kernel over latents for few query rows: their layout in shared memory, and the ways to
// fetch them (tensor_copies.cuh). Both leave swizzled chunks of 64 columns of all of a tile's tokens, one
// after another.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda.h>

#include <helix/kv_format.hpp>

#include "cuda/attention/latent_block.cuh"
#include "cuda/attention/tensor_boxes.cuh"
#include "cuda/attention/tensor_copies.cuh"
#include "cuda/kv_cache/paged_maps.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda::narrow_latent {

inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarps * kWarp;
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

/// Fetches KV tiles by TMA, from pages that boxes of 8 tokens or more divide. Each lane of a warp issues a
/// box. They are issued one at a time, so a few large ones are better.
struct ChunkBoxes {
  using Maps = narrow_latent::Maps;
  static constexpr bool kTakesAllWarps = false;  // whether all warps of the block copy, or one
  static constexpr unsigned kArrivals = 1;       // at the mbarrier, in a phase
  BoxPlace<kTokens> box;

  static Maps maps_of(const AttentionParams& p, const KvView& kv) {
    const int box = box_tokens_of(kv.format, kTokens);
    const int chunks = box == kTokens ? kLatentColumns / kChunkColumns : 1;
    return {paged_chunks_map(p.k, kv.format.dtype, kLatentColumns, kv, box, chunks),
            paged_chunks_map(p.rope, kv.format.dtype, kRopeColumns, kv, box, 1), box, chunks};
  }
  static __device__ __forceinline__ void prefetch(const Maps& maps) {
    prefetch_map(maps.latents);
    prefetch_map(maps.ropes);
  }

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

/// Fetches KV tiles by cp.async, 16 bytes a lane and copy, from rows of any strides in pages of any size.
/// Each warp copies some rows, and kRowLanes lanes the chunks of a row one by one. Rows that the query tile
/// does not see become copies of one that it does.
struct RowCopies {
  using Maps = NoMaps;
  static constexpr bool kTakesAllWarps = true;
  static constexpr unsigned kArrivals = kThreads;
  static constexpr int kRowLanes = static_cast<int>(kRowBytes) / 16;
  static_assert(kTokens * kRowLanes == kThreads);

  bool is_seen = false;   // whether the query tile sees any row
  int in_page = 0;        // place in its page of the row that this lane copies
  std::int32_t page = 0;  // not used before it is needed, as it comes from memory

  static Maps maps_of(const AttentionParams&, const KvView&) { return {}; }
  static __device__ void prefetch(const Maps&) {}

  template <class Plan>
  __device__ __forceinline__ void look_up(const AttentionParams& p, const Maps&, const Plan& plan,
                                          const KvTileCursor& at) {
    const int begin = plan.begin_token[at.query_tile];
    const int end = plan.end_token[at.query_tile];
    const int row = plan.first_kv_tile_token(at.query_tile) + at.kv_tile * kTokens + lane_row();
    const int token = max(min(row, end - 1), begin);
    const int i = token / p.page_tokens;
    in_page = token - i * p.page_tokens;
    is_seen = begin < end;
    if (is_seen) page = p.lists.pages[plan.first_page[at.query_tile] + i];
  }

  template <int kBarriers>
  __device__ __forceinline__ void issue(const AttentionParams& p, const Maps&, const KvTileCursor&,
                                        unsigned stage, unsigned barrier) const {
    static_assert(kBarriers == 1);
    const unsigned part = threadIdx.x % kRowLanes;
    const unsigned to = stage + swizzled(static_cast<unsigned>(lane_row()), part);
    if (is_seen) {
      const std::byte* latent = p.k.at(page, 0, in_page) + part * 16u;
      const std::byte* rope = p.rope.at(page, 0, in_page) + part * 16u;
#pragma unroll
      for (unsigned c = 0; c < kChunks - 1; ++c) copy_chunk(to + c * kChunkBytes, latent + c * kRowBytes);
      copy_chunk(to + (kChunks - 1) * kChunkBytes, rope);
    }
    barrier_arrive_after_copies(barrier);
  }

 private:
  /// The row of a KV tile of which this lane copies a part of each chunk.
  static __device__ int lane_row() {
    return static_cast<int>(threadIdx.x) / kRowLanes;
  }
};

}  // namespace helix::cuda::narrow_latent
