// SPDX-License-Identifier: Apache-2.0
// Fetches KV tiles for the tensor-core kernel as TMA boxes, out of pages with rows of any strides. For other
// ways see tensor_copies.cuh.
#pragma once

#include <cstdint>

#include <helix/kv_format.hpp>

#include "cuda/attention/schedule.cuh"
#include "cuda/kv_cache/paged_maps.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// Fewest tokens of a box: boxes then begin at multiples of 128 bytes.
inline constexpr int kMinBoxTokens = 8;

/// A lane's box of a KV tile of kTokens tokens; lane i has the i-th box.
template <int kTokens>
struct BoxPlace {
  bool has_box = false;   // whether some row of this lane's box is seen
  int first_row = 0;      // first row of the box in the KV tile
  int in_page = 0;        // first row of the box in its page
  std::int32_t page = 0;  // not used before it is needed, as it comes from memory

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

/// Kernel parameters of BoxTileCopies, in addition to AttentionParams.
struct BoxTileMaps {
  CUtensorMap k;
  CUtensorMap v;
  int box_tokens = 0;
};

/// Fetches rows of any strides from pages of kMinBoxTokens tokens or more, where boxes of that many tokens
/// divide both a page and a KV tile. Each lane issues one box of K and one of V.
template <int kKeyBytes, int kValueBytes, int kTokens>
struct BoxTileCopies {
  using Maps = BoxTileMaps;
  static constexpr unsigned kArrivals = 1;        // at the mbarrier, in a phase
  static constexpr bool kTakesLoadUnits = false;  // TMA moves the data
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
