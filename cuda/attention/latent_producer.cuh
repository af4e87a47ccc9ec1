// SPDX-License-Identifier: Apache-2.0
// The producer warps of the kernel over latents: they walk along the block's work item, tell the consumers
// its parts, and fill the ring of KV tiles.
#pragma once

#include <climits>
#include <cstdint>

#include <cuda.h>

#include "cuda/attention/latent_block.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/tensor_map.cuh"

namespace helix::cuda::latent {

/// Calls copy(part) for each part of the block's work item; all producer warps. The first warp walks along
/// the work item and tells each part to the other warps; it must copy some of the first KV tile of each part.
/// `s` is the block's shared memory; `kBlocks` blocks share a work item.
template <int kBlocks, class BlockShared, class Copy>
__device__ __forceinline__ void produce_parts(const AttentionParams& p, BlockShared& s, const Copy& copy) {
  const bool is_first_lane = threadIdx.x % kWarp == 0;
  if (uniform(static_cast<int>(threadIdx.x) / kWarp) != kConsumers / kWarp) {
    for (unsigned number = 0;; ++number) {
      barrier_wait(at(&s.part_full[number % 2]), number / 2 & 1u);
      const Part& part = s.parts[number % 2];
      if (uniform(part.count) == 0) return;
      copy(part);
      __syncwarp();
      barrier_arrive_if(is_first_lane, at(&s.part_empty[number % 2]));
    }
  }
  unsigned number = 0;
  const auto tell = [&](const Part& part) {
    const unsigned place = number % 2;
    barrier_wait(at(&s.part_empty[place]), (number++ / 2 & 1u) ^ 1u);
    if (is_first_lane) {
      s.parts[place] = part;
      barrier_arrive(at(&s.part_full[place]));
    }
    __syncwarp();
  };
  const Schedule schedule(p, s.plan);
  const WorkItem item = schedule.work_item(scheduled_block<kBlocks>());
  KvTileCursor at_tile = item.start;
  Part part;
  for (int done = 0; done < item.count; done += part.count) {
    part.count = min(item.count - done, at_tile.num_kv_tiles - at_tile.kv_tile);
    // After the first part, weights have overwritten the spans.
    part.query_tile = s.plan.query_tile_of(p, at_tile.query_tile);
    part.span = done == 0 ? s.plan.span(part.query_tile) : span_of_tile(p, s.plan, part.query_tile);
    part.first_token = (part.span.begin_token / kLatentTileTokens + at_tile.kv_tile) * kLatentTileTokens;
    part.is_first = at_tile.kv_tile == 0;
    const unsigned place = number % 2;
    tell(part);
    // Consumers read the splits only after the first KV tile, some of which this warp copies.
    const KvSplits splits = schedule.splits_of(at_tile.query_tile, at_tile.head);
    if (is_first_lane) s.parts[place].splits = splits;
    copy(part);
    at_tile.advance(p, s.plan, part.count);
  }
  part.count = 0;
  tell(part);
}

/// The half of a KV buffer that this producer warp fills. The warp that walks along the work item has the
/// first buffer's half that is needed last.
template <int kBlocks>
struct BufferHalf {
  const AttentionParams& p;
  Shared<kBlocks>& s;
  const int buffer = uniform(static_cast<int>(threadIdx.x) / kWarp % 2);
  const int half = uniform(1 - static_cast<int>(threadIdx.x) / kWarp / 2 % 2);
  /// Tokens of the part that earlier kernels no longer write; INT_MAX: these have ended.
  int settled = p.reads_ahead ? 0 : INT_MAX;
  unsigned uses = 0;  ///< Uses of the half so far.

  __device__ unsigned address() const {
    return at(s.kv[buffer]) + static_cast<unsigned>(half * kHalfChunks) * kChunkBytes;
  }
  __device__ bool has_rope() const { return half == kHalves - 1; }
  __device__ unsigned full(int unit) const { return at(&s.full[buffer][half * kHalfUnits + unit]); }
  __device__ void begin(const Part& part) {
    if (settled < INT_MAX) settled = settled_tokens(p, part.span.query_tile);
  }
  /// Waits until the half is free. The second buffer's first copies come after those of the first one: asked
  /// for at the same time, the first KV tile would take as long as both.
  __device__ void await_place() {
    if (uses == 0 && buffer == 1) group_sync(kFirstCopies, kProducerWarps * kWarp);
    barrier_wait(at(&s.empty[buffer][half]), (uses++ & 1u) ^ 1u);
  }
  /// Called when the copies of a tile have been asked for.
  __device__ void end_copies() const {
    if (uses == 1 && buffer == 0) group_arrive(kFirstCopies, kProducerWarps * kWarp);
  }
  /// Waits until earlier kernels have written the rows of the tile at `token`.
  __device__ void await_rows(QueryTileSpan span, int token) {
    if (min(token + kLatentTileTokens, span.end_token) <= settled) return;
    wait_for_previous();
    settled = INT_MAX;
  }
};

/// Copies KV tiles by TMA, with a warp for each half of each KV buffer.
template <int kBlocks>
class BoxCopier {
 public:
  __device__ BoxCopier(const AttentionParams& params, Shared<kBlocks>& shared, const CUtensorMap& latents,
                       const CUtensorMap& ropes, int box_tokens)
      : p(params), place_{params, shared}, latents_(latents), ropes_(ropes), box_tokens_(box_tokens) {}

  __device__ void run() {
    produce_parts<kBlocks>(p, place_.s, [&](const Part& part) {
      place_.begin(part);
      if (box_tokens_ == kLatentTileTokens) {
        copy_whole_tiles(part.span, part.first_token, part.count);
      } else {
        copy_boxed_tiles(part.span, part.first_token, part.count);
      }
    });
  }

 private:
  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  /// Sets the bytes that the half's units expect: `boxes` boxes of each chunk. The copies are issued before,
  /// so that they start sooner.
  __device__ void expect(int boxes) const {
    const auto chunk_bytes = static_cast<unsigned>(boxes * box_tokens_) * kRowBytes;
    if (lane() < kHalfUnits) {
      const int chunks = kUnitChunks + (place_.has_rope() && lane() == kHalfUnits - 1 ? 1 : 0);
      barrier_expect(place_.full(lane()), static_cast<unsigned>(chunks) * chunk_bytes);
    }
    __syncwarp();
  }

  /// Copies KV tiles that lie in one page each: one box a unit. The part's fields are in registers: shared
  /// memory would be read again after each wait.
  __device__ void copy_whole_tiles(QueryTileSpan span, int first_token, int count) {
    const std::int32_t* pages = p.lists.pages + span.first_page;
    const auto page_of = [&](int i) {
      const int token = first_token + i * kLatentTileTokens;
      return i < count && token < span.end_token ? pages[token / p.page_tokens] : -1;
    };
    int page = page_of(place_.buffer);
#pragma unroll 1
    for (int i = place_.buffer; i < count; i += 2) {
      const int next = page_of(i + 2);
      const int token = first_token + i * kLatentTileTokens;
      const int in_page = token % p.page_tokens;
      const bool is_seen = token < span.end_token;
      place_.await_place();
      place_.await_rows(span, token);
      if (is_seen && lane() == 0) {
        const unsigned to = place_.address();
#pragma unroll
        for (int unit = 0; unit < kHalfUnits; ++unit)
          copy_box_once(to + static_cast<unsigned>(unit * kUnitChunks) * kChunkBytes, latents_, 0, in_page,
                        place_.half * kHalfChunks + unit * kUnitChunks, page, place_.full(unit));
        if (place_.has_rope())
          copy_box_once(to + kHalfChunks * kChunkBytes, ropes_, 0, in_page, 0, page,
                        place_.full(kHalfUnits - 1));
      }
      __syncwarp();
      place_.end_copies();
      expect(is_seen ? 1 : 0);
      page = next;
    }
  }

  /// Copies KV tiles that lie in several pages: a box is some tokens of a chunk, in one page. A lane copies
  /// the same box of several chunks.
  __device__ void copy_boxed_tiles(QueryTileSpan span, int first_token, int count) {
    const std::int32_t* pages = p.lists.pages + span.first_page;
    const int chunks = kHalfChunks + (place_.has_rope() ? 1 : 0);
#pragma unroll 1
    for (int i = place_.buffer; i < count; i += 2) {
      const int token = first_token + i * kLatentTileTokens;
      const int first = max(0, span.begin_token - token) / box_tokens_;
      const int last =
          (min(kLatentTileTokens, max(0, span.end_token - token)) + box_tokens_ - 1) / box_tokens_;
      place_.await_place();
      place_.await_rows(span, token);
#pragma unroll 1
      for (int box = first + lane(); box < last; box += kWarp) {
        const int begin = token + box * box_tokens_;
        const int page = pages[begin / p.page_tokens];
        const unsigned to = place_.address() + static_cast<unsigned>(box * box_tokens_) * kRowBytes;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
          const bool is_rope = chunk == kHalfChunks;
          copy_box_once(to + static_cast<unsigned>(chunk) * kChunkBytes, is_rope ? ropes_ : latents_, 0,
                        begin % p.page_tokens, is_rope ? 0 : place_.half * kHalfChunks + chunk, page,
                        place_.full(min(chunk / kUnitChunks, kHalfUnits - 1)));
        }
      }
      __syncwarp();
      place_.end_copies();
      expect(max(0, last - first));
    }
  }

  const AttentionParams& p;
  BufferHalf<kBlocks> place_;
  const CUtensorMap& latents_;
  const CUtensorMap& ropes_;
  const int box_tokens_;
};

}  // namespace helix::cuda::latent
