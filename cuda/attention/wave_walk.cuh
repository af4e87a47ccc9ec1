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

/// The parts of one block, in order.
template <class Plan>
class WaveWalk {
 public:
  __device__ WaveWalk(const AttentionParams& p, const Plan& plan) : p_(p), plan_(plan) {
    const int block = static_cast<int>(blockIdx.x);
    if (block >= plan.workers) {
      wave_ = plan.waves;
      return;
    }
    next_ = plan.share_begin[block];
    end_ = plan.share_begin[block + 1];
  }

  /// Sets `part` to the next part. Returns false if there is none.
  __device__ __forceinline__ bool next(WavePart& part) {
    if (wave_ < plan_.waves) {
      const int item = wave_place(wave_++, plan_.workers, static_cast<int>(blockIdx.x));
      if (item < p_.num_query_tiles * p_.kv_heads) {
        const WaveItem whole = wave_item(p_, plan_, item);
        part = {plan_.query_tile_at[whole.place], whole.head, 0, plan_.kv_tiles_at(whole.place), {0, 1}};
        return true;
      }
    }
    if (next_ >= end_) return false;
    const int heads = plan_.pass_heads(p_);
    const int listed = plan_.first_shared + next_;
    const int pass_tiles = plan_.kv_tile_begin[p_.num_query_tiles] * heads;
    const int pass = listed / pass_tiles;
    const int in_pass = listed - pass * pass_tiles;
    const int place = find_last(plan_.kv_tile_begin, p_.num_query_tiles, in_pass / heads);
    const int rest = in_pass - plan_.kv_tile_begin[place] * heads;
    const int query_tile = plan_.query_tile_at[place];
    const int tiles = plan_.kv_tiles_at(place);
    const int head = pass * heads + rest / tiles;
    const int kv_tile = rest % tiles;
    const int count = ::min(tiles - kv_tile, end_ - next_);
    const int first = find_last(plan_.share_begin, plan_.workers, next_ - kv_tile);
    const int last = find_last(plan_.share_begin, plan_.workers, next_ - kv_tile + tiles - 1);
    part = {query_tile, head, kv_tile, count, {first, last - first + 1}};
    next_ += count;
    return true;
  }

 private:
  const AttentionParams& p_;
  const Plan& plan_;
  int wave_ = 0;
  int next_ = 0;
  int end_ = 0;
};

}  // namespace helix::cuda
