// SPDX-License-Identifier: Apache-2.0
// The producer of a block that attends to latents: one warp walks along the block's work item, tells the
// consumers of its parts and fills the places of KV tiles as they become free, unit by unit, by the copy
// engine.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "cuda/attention/latent_block.cuh"
#include "cuda/runtime/tensor_map.cuh"

namespace helix::cuda::latent {

/// One warp: asks for KV tiles as their places become free.
template <int kBlocks>
struct Producer {
  const AttentionParams& p;
  Shared<kBlocks>& s;
  const CUtensorMap& latents;
  const CUtensorMap& ropes;
  int box_tokens;
  unsigned uses[2] = {0, 0};

  /// Pages of boxes `lane` and `lane` + kWarp of a KV tile.
  struct Pages {
    std::int32_t of[2];
  };
  __device__ Pages pages_of(const QueryTileSpan& span, int token) const {
    Pages pages{};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int begin = token + (static_cast<int>(threadIdx.x) % kWarp + k * kWarp) * box_tokens;
      if (begin < min(span.end_token, token + kLatentTileTokens) && begin + box_tokens > span.begin_token)
        pages.of[k] = p.lists.pages[span.first_page + begin / p.page_tokens];
    }
    return pages;
  }

  /// Walks along the block's work item and tells the consumers of its parts.
  __device__ void run() {
    const Schedule schedule(p, s.plan);
    const WorkItem item = schedule.work_item(scheduled_block<kBlocks>());
    KvTileCursor at_tile = item.start;
    unsigned number = 0;  // of the part
    for (int done = 0, count = 0; done < item.count; done += count) {
      count = min(item.count - done, at_tile.num_kv_tiles - at_tile.kv_tile);
      Part part;
      part.span = span_of_tile(p, s.plan, at_tile.query_tile);
      part.splits = schedule.splits_of(at_tile.query_tile, at_tile.head);
      part.query_tile = at_tile.query_tile;
      part.first_token = (part.span.begin_token / kLatentTileTokens + at_tile.kv_tile) * kLatentTileTokens;
      part.count = count;
      part.is_first = at_tile.kv_tile == 0;
      tell(part, number++);
      Pages pages = pages_of(part.span, part.tile_token(0));
      for (int i = 0; i < count; ++i) {
        const Pages next = i + 1 < count ? pages_of(part.span, part.tile_token(i + 1)) : Pages{};
        copy_tile(part.span, part.tile_token(i), pages, i % 2);
        pages = next;
      }
      at_tile.advance(p, s.plan, count);
    }
    tell(Part{}, number);
  }

  __device__ void tell(const Part& part, unsigned number) {
    const unsigned place = number % 2;
    barrier_wait(at(&s.part_empty[place]), (number / 2 & 1u) ^ 1u);
    if (threadIdx.x % kWarp == 0) {
      s.parts[place] = part;
      barrier_arrive(at(&s.part_full[place]));
    }
    __syncwarp();
  }

  /// A lane's box, tokens of one page and 64 columns, in each unit of a KV tile.
  struct Box {
    unsigned to;  // in the tile, of the first unit
    int column;   // in the first unit
    int in_page;
    int page;
    bool is_seen;
  };
  /// Boxes that hold a token which is seen: [first, last) of a KV tile.
  struct Boxes {
    int first;
    int last;
    __device__ int count() const { return max(0, last - first); }
  };
  __device__ Boxes boxes_of(const QueryTileSpan& span, int token) const {
    return {max(0, span.begin_token - token) / box_tokens,
            (min(kLatentTileTokens, max(0, span.end_token - token)) + box_tokens - 1) / box_tokens};
  }
  __device__ Box make_box(const Boxes& boxes, const Pages& pages, int token, int box, int chunk) const {
    const int low = __shfl_sync(~0u, pages.of[0], box % kWarp);
    const int high = __shfl_sync(~0u, pages.of[1], box % kWarp);
    return {static_cast<unsigned>(chunk) * kChunkBytes + static_cast<unsigned>(box * box_tokens) * kRowBytes,
            chunk % kValueChunks * kChunkColumns, (token + box * box_tokens) % p.page_tokens,
            box < kWarp ? low : high, box >= boxes.first && box < boxes.last};
  }

  /// All that can be is computed before the waits: a tile's place is free for as short as this warp is
  /// fast.
  __device__ void copy_tile(const QueryTileSpan& span, int token, const Pages& pages, int buffer) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const unsigned parity = (uses[buffer]++ & 1u) ^ 1u;
    const Boxes boxes = boxes_of(span, token);
    const auto bytes = static_cast<unsigned>(boxes.count() * box_tokens) * kRowBytes;
    const Box values = make_box(boxes, pages, token, lane / kUnitChunks, lane % kUnitChunks);
    const Box rope = make_box(boxes, pages, token, lane, kValueChunks);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const unsigned full = at(&s.full[buffer][unit]);
      barrier_wait(at(&s.empty[buffer][unit]), parity);
      if (lane == 0) barrier_expect(full, unit == kRopeUnit ? bytes : kUnitChunks * bytes);
      __syncwarp();
      if (!asks_for<kBlocks>(unit)) continue;
      copy(unit == kRopeUnit ? rope : values, unit, buffer, full);
      copy_small_boxes(boxes, pages, token, unit, buffer, full);
    }
  }

  /// The boxes that are more than a lane each.
  __device__ void copy_small_boxes(const Boxes& boxes, const Pages& pages, int token, int unit, int buffer,
                                   unsigned full) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int chunks = unit == kRopeUnit ? 1 : kUnitChunks;
#pragma unroll 1
    for (int first = kWarp; first < boxes.last * chunks; first += kWarp) {
      const Box box = unit == kRopeUnit
                          ? make_box(boxes, pages, token, first + lane, kValueChunks)
                          : make_box(boxes, pages, token, (first + lane) / kUnitChunks, lane % kUnitChunks);
      copy(box, unit, buffer, full);
    }
  }

  __device__ void copy(const Box& box, int unit, int buffer, unsigned full) const {
    if (!box.is_seen) return;
    const bool is_rope = unit == kRopeUnit;
    const CUtensorMap& map = is_rope ? ropes : latents;
    const int column = is_rope ? 0 : box.column + unit * kUnitColumns;
    const unsigned to =
        at(s.kv[buffer]) + box.to + (is_rope ? 0 : static_cast<unsigned>(unit * kUnitChunks) * kChunkBytes);
    if constexpr (kBlocks == 1) {
      copy_box(to, map, column, box.in_page, 0, box.page, full);
    } else {
      copy_box_to_blocks(to, map, column, box.in_page, 0, box.page, full, (1u << kBlocks) - 1u);
    }
  }
};

}  // namespace helix::cuda::latent
