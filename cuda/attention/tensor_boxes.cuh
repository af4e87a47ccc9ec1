// SPDX-License-Identifier: Apache-2.0
// A way to fetch KV tiles for the tensor-core kernel, beside those of tensor_copies.cuh: boxes that the copy
// engine cuts out of pages with rows of any strides.
#pragma once

#include <cstdint>

#include <helix/kv_format.hpp>

#include "cuda/attention/schedule.cuh"
#include "cuda/kv_cache/paged_maps.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

inline constexpr int kMinBoxTokens = 8;  ///< Of a box: whole ones begin at multiples of 128 bytes.

/// A lane's box of a KV tile of kTokens tokens, the lane's number in order.
template <int kTokens>
struct BoxPlace {
  bool has_box = false;   // whether some row of this lane's box is seen
  int first_row = 0;      // of the box, in the KV tile
  int in_page = 0;        // the same, in the page
  std::int32_t page = 0;  // not looked at before it is needed, for it comes from memory

  template <class Plan>
  __device__ __forceinline__ void look_up(const AttentionParams& p, int box_tokens, const Plan& plan,
                                          const KvTileCursor& at) {
    const int kv_tile = plan.first_kv_tile_token(at.query_tile) + at.kv_tile * kTokens;
    first_row = static_cast<int>(threadIdx.x) % kWarp * box_tokens;
    const int token = kv_tile + first_row;
    has_box = first_row < kTokens && token < plan.end_token[at.query_tile] &&
              token + box_tokens > plan.begin_token[at.query_tile];
    const int i = token / p.page_tokens;
    in_page = token - i * p.page_tokens;
    if (has_box) page = p.lists.pages[plan.first_page[at.query_tile] + i];
  }
};

/// What BoxTileCopies needs beside AttentionParams.
struct BoxTileMaps {
  CUtensorMap k;
  CUtensorMap v;
  int box_tokens = 0;
};

/// Rows of any strides in pages of kMinBoxTokens tokens at least, where boxes of as many divide both a page
/// and a KV tile: each lane asks for one box of K and one of V.
template <int kKeyBytes, int kValueBytes, int kTokens>
struct BoxTileCopies {
  using Maps = BoxTileMaps;
  static constexpr unsigned kArrivals = 1;        // at the barrier, a phase
  static constexpr bool kTakesLoadUnits = false;  // a copy engine moves the data
  static constexpr bool kTakesUnequalRows = true;
  static_assert(kTokens <= kMinBoxTokens * kWarp);

  BoxPlace<kTokens> box;

  static Maps maps_of(const AttentionParams& p, const KvView& kv) {
    const int box_tokens = box_tokens_of(kv.format, kTokens);
    return {paged_whole_rows_map(p.k, kv.format.dtype, p.head_dim, kv, box_tokens),
            paged_whole_rows_map(p.v, kv.format.dtype, p.value_dim, kv, box_tokens), box_tokens};
  }
  static __device__ __forceinline__ void prefetch(const Maps& maps) {
    prefetch_map(maps.k);
    prefetch_map(maps.v);
  }

  template <class Plan>
  __device__ __forceinline__ void look_up(const AttentionParams& p, const Maps& maps, const Plan& plan,
                                          const KvTileCursor& at) {
    box.look_up(p, maps.box_tokens, plan, at);
  }

  template <int kBarriers>
  __device__ __forceinline__ void issue(const AttentionParams&, const Maps& maps, const KvTileCursor& at,
                                        unsigned stage, unsigned barrier) const {
    static_assert(kBarriers == 1);  // 16 bits
    const auto tokens = static_cast<unsigned>(__popc(__ballot_sync(~0u, box.has_box)) * maps.box_tokens);
    if (threadIdx.x % kWarp == 0) barrier_expect(barrier, tokens * (kKeyBytes + kValueBytes));
    __syncwarp();
    if (box.has_box) {
      const unsigned to = stage + static_cast<unsigned>(box.first_row) * kKeyBytes;
      const unsigned to_values =
          stage + kTokens * kKeyBytes + static_cast<unsigned>(box.first_row) * kValueBytes;
      copy_box(to, maps.k, 0, box.in_page, at.head, box.page, barrier);
      copy_box(to_values, maps.v, 0, box.in_page, at.head, box.page, barrier);
    }
  }

  /// Orders this warp's writes to a KV tile before later copies over it.
  static __device__ __forceinline__ void fence() { fence_before_copy(); }
};

}  // namespace helix::cuda
