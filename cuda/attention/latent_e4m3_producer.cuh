// SPDX-License-Identifier: Apache-2.0
// The producer warps of the kernel over latents of e4m3: they copy rows without conversion, from pages of any
// size and strides.
#pragma once

#include <cstdint>

#include "cuda/attention/latent_e4m3_block.cuh"
#include "cuda/attention/latent_producer.cuh"
#include "cuda/attention/latent_rows.cuh"
#include "cuda/runtime/async_copy.cuh"

namespace helix::cuda::latent_e4m3 {

/// Tensor maps by which TMA copies boxes of some tokens out of pages.
struct Maps {
  CUtensorMap latents;  ///< Chunks of 128 columns.
  CUtensorMap ropes;
  CUtensorMap scales;  ///< Mixed rows only.
  int box_tokens;      ///< Tokens of a box; 0: page sizes are no multiple of 8 tokens, so there are no maps.
};

/// Fills the ring of KV tiles; each producer warp copies a part of every tile. TMA copies tiles that are seen
/// whole: load units would ask the L2 cache for half as many sectors again. If some tokens of a tile are not
/// seen, or pages have no boxes, load units (cp.async) copy rows, and write zeros for tokens that are not
/// seen.
template <class K>
class Copier {
 public:
  __device__ Copier(const AttentionParams& params, Shared<K>& shared, const Maps& maps)
      : p(params), s(shared), maps_(maps) {}

  __device__ void run() {
    latent::produce_parts<K::kBlocks>(p, s, [&](const Part& part) { copy_tiles(part); });
  }

 private:
  static constexpr int kWarpTokens = kLatentTileTokens / kProducerWarps;
  static constexpr unsigned kPart = 16;  // bytes of a copy by load units
  static_assert(kWarp * kPart == kLatentColumns);
  static constexpr int kRopeLanes = K::kRopeBytes / kPart;  // lanes that copy the rope of a row
  static_assert(kProducerWarps * kTileChunkColumns == kLatentColumns);

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }

  /// Where this lane's box or row of a KV tile begins.
  struct Place {
    std::int32_t page = 0;
    int in_page = -1;  // -1: no token
  };

  __device__ __forceinline__ bool is_boxed(const QueryTileSpan& span, int token) const {
    return maps_.box_tokens > 0 && token >= span.begin_token && token + kLatentTileTokens <= span.end_token;
  }
  __device__ __forceinline__ Place place_of(const std::int32_t* pages, const QueryTileSpan& span,
                                            int tile_token) const {
    const bool boxed = is_boxed(span, tile_token);
    const int token = tile_token + (boxed ? lane() * maps_.box_tokens : warp() * kWarpTokens + lane());
    const int end = boxed ? tile_token + kLatentTileTokens : span.end_token;
    if (token < span.begin_token || token >= end || (!boxed && lane() >= kWarpTokens)) return {};
    return {pages[token / p.page_tokens], token % p.page_tokens};
  }

  /// Copies a tile by TMA: each warp copies a chunk of latents, the last one also the rope columns, the one
  /// before it the scales.
  __device__ __forceinline__ void copy_boxes(unsigned tile, unsigned full, const Place& place) const {
    const bool has_rope = warp() == kProducerWarps - 1;
    const bool has_scales = K::kIsMixed && warp() == kProducerWarps - 2;
    const unsigned bytes = kTileChunkBytes + (has_rope ? kLatentTileTokens * K::kRopeBytes : 0u) +
                           (has_scales ? kLatentTileTokens * K::kScaleBytes : 0u);
    fence_before_copy();  // load units may have written this stage before
    if (lane() == 0) {
      barrier_expect(full, bytes);
    } else {
      barrier_arrive(full);
    }
    __syncwarp();
    if (place.in_page < 0) return;
    const auto row = static_cast<unsigned>(lane() * maps_.box_tokens);
    const auto chunk = static_cast<unsigned>(warp());
    copy_box_once(tile + chunk * kTileChunkBytes + row * kTileChunkColumns, maps_.latents, 0, place.in_page,
                  warp(), place.page, full);
    if (has_rope)
      copy_box_once(tile + K::kRopeAt + row * K::kRopeBytes, maps_.ropes, 0, place.in_page, 0, place.page,
                    full);
    if (has_scales)
      copy_box_once(tile + K::kScalesAt + row * K::kScaleBytes, maps_.scales, 0, place.in_page, 0, place.page,
                    full);
  }

  static __device__ __forceinline__ const std::byte* of_lane(const std::byte* from, int lane) {
    return reinterpret_cast<const std::byte*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(from), lane));
  }
  __device__ __forceinline__ void copy(unsigned to, const std::byte* from, unsigned offset) const {
    copy_chunk_or_zeros(to, from == nullptr ? p.k.first : from + offset, from != nullptr);
  }

  /// Copies a tile by load units: each warp copies a quarter of the tokens, row after row.
  __device__ __forceinline__ void copy_rows(unsigned tile, unsigned full, const Place& place) const {
    const bool is_there = place.in_page >= 0;
    const std::byte* latent = is_there ? p.k.at(place.page, 0, place.in_page) : nullptr;
    const std::byte* rope = is_there ? p.rope.at(place.page, 0, place.in_page) : nullptr;
    const auto first = static_cast<unsigned>(warp() * kWarpTokens);
    const auto part = static_cast<unsigned>(lane());
#pragma unroll 1
    for (unsigned k = 0; k < kWarpTokens; ++k)
      copy(tile + part / 8u * kTileChunkBytes + swizzled(first + k, part % 8u),
           of_lane(latent, static_cast<int>(k)), part * kPart);
    constexpr unsigned kRopeRows = kWarp / kRopeLanes;  // rows copied at a time
    const unsigned rope_part = part % kRopeLanes;
#pragma unroll 1
    for (unsigned k = 0; k < kWarpTokens; k += kRopeRows) {
      const unsigned r = k + part / kRopeLanes;
      copy(tile + K::kRopeAt +
               (K::kIsMixed ? swizzled(first + r, rope_part) : swizzled_half(first + r, rope_part)),
           of_lane(rope, static_cast<int>(r)), rope_part * kPart);
    }
    if (K::kIsMixed && lane() < kWarpTokens)
      copy(tile + K::kScalesAt + (first + part) * K::kScaleBytes, latent, kLatentColumns);
    barrier_arrive_after_copies(full);
  }

  __device__ __forceinline__ void copy_tiles(const Part& part) {
    const QueryTileSpan span = part.span;
    const std::int32_t* pages = p.lists.pages + span.first_page;
    const int count = part.count;
    int token = part.first_token;
    Place place = place_of(pages, span, token);
#pragma unroll 1
    for (int i = 0; i < count; ++i, token += kLatentTileTokens) {
      Place next;
      if (i + 1 < count) next = place_of(pages, span, token + kLatentTileTokens);
      barrier_wait(at(&s.empty[place_.stage]), place_.parity ^ 1u);
      if (is_boxed(span, token)) {
        copy_boxes(at(s.tiles[place_.stage]), at(&s.full[place_.stage]), place);
      } else {
        copy_rows(at(s.tiles[place_.stage]), at(&s.full[place_.stage]), place);
      }
      place_.advance();
      place = next;
    }
  }

  const AttentionParams& p;
  Shared<K>& s;
  const Maps& maps_;
  StagePlace<K> place_{0};
};

}  // namespace helix::cuda::latent_e4m3
