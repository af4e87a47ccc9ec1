// SPDX-License-Identifier: Apache-2.0
// A thread block's walk along its work in the kernel for many query rows, part by part, as planned in
// wave_schedule.cuh.
#pragma once

#include "cuda/attention/wave_schedule.cuh"

namespace helix::cuda {

/// Consecutive KV tiles of one query tile and KV head: all that a block takes of them.
struct WavePart {
  int query_tile;
  int head;
  int kv_tile;  ///< First KV tile.
  int count;
  KvSplits splits;
};

/// The parts of one block, in order. Lies in shared memory, as one thread uses it, and seldom.
struct WaveWalk {
  int wave;  ///< Next wave of whole query tiles.
  int next;  ///< Next KV tile of the list of shares.
  int end;   ///< End of this block's share.

  template <class Plan>
  __device__ void begin(const Plan& plan) {
    const int block = static_cast<int>(blockIdx.x);
    const bool has_work = block < plan.workers;
    wave = has_work ? 0 : plan.waves;
    next = has_work ? plan.share_begin[block] : 0;
    end = has_work ? plan.share_begin[block + 1] : 0;
  }

  /// Sets `part` to the next part; its count is 0 if there is none.
  template <class Plan>
  __device__ __forceinline__ void find_next(const AttentionParams& p, const Plan& plan, WavePart& part) {
    part.count = 0;
    if (wave < plan.waves) {
      const int item = wave_place(wave++, plan.workers, static_cast<int>(blockIdx.x));
      if (item < p.num_query_tiles * p.kv_heads) {
        const WaveItem whole = wave_item(p, plan, item);
        const int query_tile = plan.query_tile_at[whole.place];
        part = {query_tile, whole.head, 0, plan.kv_tiles_at(whole.place), {0, 1}};
        return;
      }
    }
    if (next >= end) return;
    const int heads = plan.pass_heads(p);
    const int listed = plan.first_shared + next;
    const int pass_tiles = plan.kv_tile_begin[p.num_query_tiles] * heads;
    const int pass = listed / pass_tiles;
    const int in_pass = listed - pass * pass_tiles;
    const int place = find_last(plan.kv_tile_begin, p.num_query_tiles, in_pass / heads);
    const int rest = in_pass - plan.kv_tile_begin[place] * heads;
    const int query_tile = plan.query_tile_at[place];
    const int tiles = plan.kv_tiles_at(place);
    const int head = pass * heads + rest / tiles;
    const int kv_tile = rest % tiles;
    const int count = ::min(tiles - kv_tile, end - next);
    const int first = find_last(plan.share_begin, plan.workers, next - kv_tile);
    const int last = find_last(plan.share_begin, plan.workers, next - kv_tile + tiles - 1);
    part = {query_tile, head, kv_tile, count, {first, last - first + 1}};
    next += count;
  }
};

}  // namespace helix::cuda
