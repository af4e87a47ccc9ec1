// SPDX-License-Identifier: Apache-2.0
// The consumer warp groups of the kernel over latents: the steps that lead and follower have in common.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/latent_block.cuh"
#include "cuda/attention/latent_rows.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/wgmma_product.cuh"

namespace helix::cuda::latent {

/// The steps of a consumer warp group; kGroup is 0 for the lead, 1 for the follower.
template <class T, int kBlocks, int kGroup>
struct Consumer {
  const AttentionParams& p;
  Shared<kBlocks>& s;
  Rows& rows;
  const Operand (&held)[kHeldChunks];  // query chunks
  TileRange tiles;
  unsigned (&uses)[2];  // tiles that came to each KV buffer
  Operand weights;      // weights of this group's tile

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }
  /// The first of this thread's two rows in the block; the second is 8 further on.
  static __device__ int row() { return warp() * 16 + lane() / 4; }
  /// Shared-memory address of a group's weights.
  __device__ unsigned weights_of(int group) const {
    return group == 0 ? at(s.weights) : at(s.queries) + kValueChunks * kChunkBytes;
  }

  /// Issues scores = queries keys^T for the tile that arrives in this group's buffer.
  __device__ __forceinline__ void multiply_keys(Scores& scores) {
    multiply_keys(scores, [] {});
  }
  /// multiply_keys(scores) that calls after_first() once the first unit's products are in flight, committed
  /// as a group of their own.
  template <class AfterFirst>
  __device__ __forceinline__ void multiply_keys(Scores& scores, const AfterFirst& after_first) {
    const unsigned parity = uses[kGroup] & 1u;
    const OperandPlace queries(rows_operand(at(s.queries)));
    const OperandPlace keys(rows_operand(at(s.kv[kGroup])));
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      barrier_wait(at(&s.full[kGroup][unit]), parity);
      products_fence();
#pragma unroll
      for (int chunk = unit * kUnitChunks; chunk < (unit == kUnits - 1 ? kChunks : (unit + 1) * kUnitChunks);
           ++chunk) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const unsigned offset =
              static_cast<unsigned>(chunk) * kChunkBytes + static_cast<unsigned>(step) * 32u;
          const int adds = chunk + step > 0;
          if (chunk < kChunks - kHeldChunks) {
            product<T, kLatentTileTokens, false>(scores, queries.at(offset), keys.at(offset), adds);
          } else {
            product<T, kLatentTileTokens, false>(scores, held[max(chunk - (kChunks - kHeldChunks), 0)][step],
                                                 keys.at(offset), 1);
          }
        }
      }
      if (unit == 0) {
        products_commit();
        after_first();
      }
    }
    products_commit();
  }

  /// Zeroes the rows of tile `i` that no query row sees: they may hold anything. No products may be in
  /// flight.
  __device__ __forceinline__ void clear_unseen(const Part& part, int i) const {
    const int token = uniform(part.tile_token(i));
    const int first = ::max(0, part.span.begin_token - token);
    const int last = ::max(0, part.span.end_token - token);
    if (first == 0 && last >= kLatentTileTokens) return;
    for (int unit = 0; unit < kUnits; ++unit) barrier_wait(at(&s.full[kGroup][unit]), uses[kGroup] & 1u);
#pragma unroll 1
    for (int k = static_cast<int>(threadIdx.x) % kWarpGroup; k < kLatentTileTokens * kChunks * 8;
         k += kWarpGroup) {
      const int r = k / (kChunks * 8);
      if (r >= first && r < last) continue;
      const int c = k % (kChunks * 8);
      *reinterpret_cast<uint4*>(s.kv[kGroup] + static_cast<unsigned>(c / 8) * kChunkBytes +
                                static_cast<unsigned>(r) * kRowBytes + static_cast<unsigned>(c % 8) * 16u) =
          uint4{0, 0, 0, 0};
    }
    fence_before_copy();
    group_sync(kOneGroup + kGroup, kWarpGroup);
  }

  /// Caps and masks the scores of tile `i`, and finds the largest one (base 2) of each of this thread's rows.
  __device__ __forceinline__ void find_top(const Part& part, int i, Scores& scores, float (&top)[2]) const {
    if (i < tiles.plain_begin || i >= tiles.plain_end) {
      if (p.soft_cap > 0.0f) {
        const float cap_factor = p.scale / p.soft_cap;
#pragma unroll
        for (float& x : scores) x = p.soft_cap * fast_tanh(x * cap_factor);
      }
      mask(part.tile_token(i), scores);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = -kInfinity;
#pragma unroll
      for (int j = 0; j < kLatentTileTokens / 8; ++j)
        top[h] = fmaxf(top[h], fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
      top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
      top[h] *= factor();
    }
  }
  __device__ __forceinline__ void mask(int token, Scores& scores) const {
    const int first = token + lane() % 4 * 2;
    const int low[2] = {rows.low[0] - first, rows.low[1] - first};
    const int high[2] = {rows.high[0] - first, rows.high[1] - first};
#pragma unroll
    for (int k = 0; k < kLatentTileTokens / 2; ++k) {
      const int column = k / 4 * 8 + k % 2;
      const int h = k / 2 % 2;
      scores[k] = low[h] <= column && column < high[h] ? scores[k] : -kInfinity;
    }
  }
  /// Factor of a score in the exponent.
  __device__ float factor() const {
    return p.soft_cap > 0.0f ? kLog2E : p.scale * kLog2E;
  }

  /// Sets the running max of row `h` to `max` and rescales its sum of weights. Returns the rescale factor of
  /// its sums of values.
  __device__ float raise_max(int h, float max) {
    const float shrink = fast_exp2(rows.max[h] - (max == -kInfinity ? 0.0f : max));
    rows.max[h] = max;
    rows.sum[h] *= shrink;
    return shrink;
  }
  /// Raises the running max of this thread's rows where a score exceeds it by more than kMaxExponent, and
  /// tells it to the other group. Sets `shrink` to the rescale factors of the sums of values.
  __device__ __forceinline__ void raise(const float (&top)[2], float (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      shrink[h] =
          raise_max(h, top[h] > rows.max[h] + kMaxExponent<T> ? top[h] - kTopExponent<T> : rows.max[h]);
      if (lane() % 4 == 0) s.row[kGroup][row() + 8 * h] = rows.max[h];
    }
  }
  /// Raises the running max to that of the other group; sets `shrink` as raise() does.
  __device__ __forceinline__ void follow_max(float (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) shrink[h] = raise_max(h, s.row[1 - kGroup][row() + 8 * h]);
  }

  /// Turns scores into weights, in registers for this group and in shared memory for the other.
  __device__ __forceinline__ void weigh(const Scores& scores) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float pivot = rows.max[h] == -kInfinity ? 0.0f : rows.max[h];
      float added = 0.0f;
#pragma unroll
      for (int j = 0; j < kLatentTileTokens / 8; ++j) {
        const float x = fast_exp2(fmaf(scores[4 * j + 2 * h], factor(), -pivot));
        const float y = fast_exp2(fmaf(scores[4 * j + 2 * h + 1], factor(), -pivot));
        added += x + y;
        weights[j / 2][j % 2 * 2 + h] = pack<T>(x, y);
      }
      rows.sum[h] += added;
    }
    const unsigned to = weights_of(kGroup) + swizzled(static_cast<unsigned>(warp() * 16 + lane() % 16), 0);
#pragma unroll
    for (unsigned step = 0; step < kSteps; ++step) {
      const unsigned part = step * 2u + static_cast<unsigned>(lane()) / 16u;
      store_matrices((to & ~127u) + ((part ^ (static_cast<unsigned>(lane()) % 8u)) * 16u), weights[step][0],
                     weights[step][1], weights[step][2], weights[step][3]);
    }
    fence_before_copy();
  }

  static __device__ __forceinline__ void scale_sums(Sums& sums, const float (&shrink)[2]) {
    if (!__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (int k = 0; k < kGroupColumns / 2; ++k) sums[k] *= shrink[k / 2 % 2];
  }

  /// Issues sums += weights values for this group's tile, with weights from registers.
  __device__ __forceinline__ void add_own_values(Sums& sums) {
    const OperandPlace from = values(kGroup);
    products_fence();
#pragma unroll
    for (unsigned step = 0; step < kSteps; ++step)
      product<T, kGroupColumns, true>(sums, weights[step], from.at(step * kStepBytes), 1);
    products_commit();
  }
  /// Issues sums += weights values for steps [kFrom, kTo) of the other group's tile, with its weights from
  /// shared memory.
  template <unsigned kFrom = 0, unsigned kTo = kSteps>
  __device__ __forceinline__ void add_other_values(Sums& sums) {
    constexpr int kOther = 1 - kGroup;
    if constexpr (kFrom == 0) {
      const unsigned parity = uses[kOther]++ & 1u;
#pragma unroll
      for (int unit = kGroup * kHalfUnits; unit < (kGroup + 1) * kHalfUnits; ++unit)
        // completed long ago, but this group has not seen it
        barrier_wait(at(&s.full[kOther][unit]), parity);
    }
    const OperandPlace others(rows_operand(weights_of(kOther)));
    const OperandPlace from = values(kOther);
    products_fence();
#pragma unroll
    for (unsigned step = kFrom; step < kTo; ++step)
      product<T, kGroupColumns, true>(sums, others.at(step * 32u), from.at(step * kStepBytes), 1);
    products_commit();
  }
  /// Operand of this group's value columns of the tile in `buffer`.
  __device__ OperandPlace values(int buffer) const {
    return OperandPlace(columns_operand(at(s.kv[buffer]) + kGroup * kHalfChunks * kChunkBytes, kChunkBytes));
  }
  static constexpr unsigned kStepBytes = kProductDepth * kRowBytes;

  /// Releases this group's half of a tile. Has no branch, because products of the warp group may be in
  /// flight.
  __device__ __forceinline__ void release(int buffer) const {
    barrier_arrive_if(lane() == 0, at(&s.empty[buffer][kGroup]));
  }
};

}  // namespace helix::cuda::latent
