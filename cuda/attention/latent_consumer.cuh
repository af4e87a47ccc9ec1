// SPDX-License-Identifier: Apache-2.0
// The consumers of a block that attends to latents: what the lead's and the follower's warp group do alike.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/latent_block.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"

namespace helix::cuda::latent {

/// What a thread knows of its two rows, 8 apart: the local tokens that they see, and the running softmax.
struct Rows {
  int low[2];
  int high[2];
  float max[2];  ///< Base 2.
  float sum[2];  ///< Of the weights that this thread has seen.
};

__device__ __forceinline__ void pin_all(Scores& scores) {
  pin(scores);
}
__device__ __forceinline__ void pin_all(Sums& sums) {
#pragma unroll
  for (auto& unit : sums) pin(unit);
}

/// Nothing that was asked for is on its way any more. The compiler serialises products that are on their
/// way where branches of which it cannot tell that a warp takes them as one meet, so there none is.
template <class... Registers>
__device__ __forceinline__ void finish(Registers&... registers) {
  products_wait<0>();
  (pin_all(registers), ...);
}

/// What both consumer groups do alike; kGroup is 0 for the lead, 1 for the follower.
template <class T, int kBlocks, int kGroup>
struct Consumer {
  const AttentionParams& p;
  Shared<kBlocks>& s;
  float factor;      // of a score in the exponent
  float cap_factor;  // of a score in the soft cap
  unsigned uses[2] = {0, 0};
  unsigned number = 0;  // of the part
  Rows rows;
  int inner_begin;  // local tokens that all rows of the warp see
  int inner_end;
  Operand rope;     // of the queries
  Operand weights;  // of this group's tile

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }
  /// The first of this thread's rows in the block.
  static __device__ int row() { return warp() * 16 + lane() / 4; }
  static __device__ int first_row() {
    return kBlocks == 1 ? 0 : static_cast<int>(cluster_rank()) * kGroupRows;
  }
  /// Where this lane's row of the four matrices of step `step` lies in a chunk of 64 rows.
  static __device__ unsigned matrix_row(int step) {
    return swizzled(static_cast<unsigned>(warp() * 16 + lane() % 16),
                    static_cast<unsigned>(step * 2 + lane() / 16));
  }

  __device__ Consumer(const AttentionParams& params, Shared<kBlocks>& shared)
      : p(params),
        s(shared),
        factor(params.soft_cap > 0.0f ? kLog2E : params.scale * kLog2E),
        cap_factor(params.soft_cap > 0.0f ? params.scale / params.soft_cap : 0.0f) {}

  /// Calls with(part) for each query tile that the block's work item belongs to.
  template <class With>
  __device__ __forceinline__ void for_each_part(const With& with) {
    while (true) {
      const unsigned place = number % 2;
      barrier_wait(at(&s.part_full[place]), number / 2 & 1u);
      Part part = s.parts[place];
      barrier_arrive_if(lane() == 0, at(&s.part_empty[place]));
      ++number;
      part.count = uniform(part.count);
      part.first_token = uniform(part.first_token);
      if (part.count == 0) return;
      with(part);
    }
  }

  /// The block's query rows into shared memory, their rope columns into registers.
  __device__ void begin(const Part& part, Sums& sums) {
    const QueryTile& tile = part.span.query_tile;
    constexpr int kParts = kChunks * 8;  // of 16 bytes
    const T* q = static_cast<const T*>(p.q);
#pragma unroll 6
    for (int i = static_cast<int>(threadIdx.x); i < kGroupRows * kParts; i += kConsumers) {
      const int r = i / kParts;
      const int c = i % kParts;
      uint4 x{0, 0, 0, 0};
      if (first_row() + r < tile.num_rows)
        x = *reinterpret_cast<const uint4*>(q + tile.token(p, first_row() + r) * p.q_token_stride +
                                            tile.query_head(p, 0, first_row() + r) * p.q_head_stride + c * 8);
      *reinterpret_cast<uint4*>(s.queries + static_cast<unsigned>(c / 8) * kChunkBytes +
                                swizzled(static_cast<unsigned>(r), static_cast<unsigned>(c % 8))) = x;
    }
    find_bounds(part);
    fence_before_copy();
    group_sync(kAllConsumers, kConsumers);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      load_matrices(rope[step], at(s.queries) + kValueChunks * kChunkBytes + matrix_row(step));
#pragma unroll
    for (int k = 0; k < kGroupColumns / 2; ++k) sums[k / (kUnitColumns / 2)][k % (kUnitColumns / 2)] = 0.0f;
  }

  /// What the rows of this thread see, and all rows of its warp.
  __device__ void find_bounds(const Part& part) {
    const QueryTile& tile = part.span.query_tile;
    const bool is_one_token = tile.token(p, 0) == tile.token(p, tile.num_rows - 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = first_row() + row() + 8 * h;
      TokenRange seen{part.span.begin_token, part.span.end_token};
      if (!is_one_token && r < tile.num_rows) seen = visible(p, p.positions[tile.token(p, r)]);
      rows.low[h] = static_cast<int>(seen.begin);
      rows.high[h] = static_cast<int>(seen.end);
      rows.max[h] = -kInfinity;
      rows.sum[h] = 0.0f;
    }
    inner_begin = uniform(__reduce_max_sync(~0u, ::max(rows.low[0], rows.low[1])));
    inner_end = uniform(__reduce_min_sync(~0u, ::min(rows.high[0], rows.high[1])));
  }

  /// Asks for the scores of the queries and the keys of the tile that comes to `buffer`.
  __device__ void multiply_keys(int buffer, Scores& scores) {
    const unsigned parity = uses[buffer]++ & 1u;
    const unsigned kv = at(s.kv[buffer]);
    const std::uint64_t queries_at = fresh(rows_operand(at(s.queries)));
    const std::uint64_t keys_at = fresh(rows_operand(kv));
#pragma unroll
    for (int chunk = 0; chunk < kValueChunks; ++chunk) {
      if (chunk % kUnitChunks == 0) {
        barrier_wait(at(&s.full[buffer][chunk / kUnitChunks]), parity);
        products_fence();
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const unsigned offset =
            (static_cast<unsigned>(chunk) * kChunkBytes + static_cast<unsigned>(step) * 32u) / 16u;
        product<T, kLatentTileTokens, false>(scores, queries_at + offset, keys_at + offset, chunk + step > 0);
      }
    }
    barrier_wait(at(&s.full[buffer][kRopeUnit]), parity);
    products_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const unsigned offset = (kValueChunks * kChunkBytes + static_cast<unsigned>(step) * 32u) / 16u;
      product<T, kLatentTileTokens, false>(scores, rope[step], keys_at + offset, 1);
    }
    products_commit();
  }

  /// Puts zeros where tile `i` holds tokens that no row sees, and anything may lie.
  /// Not while products are on their way.
  __device__ void clear_unseen(const Part& part, int i) {
    const unsigned parity = uses[i % 2] & 1u;
    const int token = part.tile_token(i);
    const int first = ::max(0, part.span.begin_token - token);
    const int last = ::max(0, part.span.end_token - token);
    if (first == 0 && last >= kLatentTileTokens) return;
    for (int unit = 0; unit < kUnits; ++unit) barrier_wait(at(&s.full[i % 2][unit]), parity);
    for (int k = static_cast<int>(threadIdx.x) % kWarpGroup; k < kLatentTileTokens * kChunks * 8;
         k += kWarpGroup) {
      const int r = k / (kChunks * 8);
      if (r >= first && r < last) continue;
      const int c = k % (kChunks * 8);
      *reinterpret_cast<uint4*>(s.kv[i % 2] + static_cast<unsigned>(c / 8) * kChunkBytes +
                                static_cast<unsigned>(r) * kRowBytes + static_cast<unsigned>(c % 8) * 16u) =
          uint4{0, 0, 0, 0};
    }
    fence_before_copy();
    group_sync(kOneGroup + kGroup, kWarpGroup);
  }

  /// Scores of tile `i` become weights, in registers and in shared memory for the other group. Returns by
  /// what the sums so far shrink.
  __device__ void weigh(const Part& part, int i, Scores& scores, float (&shrink)[2]) {
    const int token = uniform(part.tile_token(i));
    if (p.soft_cap > 0.0f) {
#pragma unroll
      for (float& x : scores) x = p.soft_cap * fast_tanh(x * cap_factor);
    }
    if (token < inner_begin || token + kLatentTileTokens > inner_end) mask(token, scores);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -kInfinity;
#pragma unroll
      for (int j = 0; j < kLatentTileTokens / 8; ++j)
        top = fmaxf(top, fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      shrink[h] = raise_max(h, top * factor);
      const float pivot = rows.max[h] == -kInfinity ? 0.0f : rows.max[h];
      float added = 0.0f;
#pragma unroll
      for (int j = 0; j < kLatentTileTokens / 8; ++j) {
        const float x = fast_exp2(fmaf(scores[4 * j + 2 * h], factor, -pivot));
        const float y = fast_exp2(fmaf(scores[4 * j + 2 * h + 1], factor, -pivot));
        added += x + y;
        weights[j / 2][j % 2 * 2 + h] = pack<T>(x, y);
      }
      rows.sum[h] += added;
      if (lane() % 4 == 0) s.row[kGroup][row() + 8 * h] = rows.max[h];
    }
    const unsigned to = kGroup == 0 ? at(s.weights) : at(s.queries) + kValueChunks * kChunkBytes;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      store_matrices(to + matrix_row(step), weights[step][0], weights[step][1], weights[step][2],
                     weights[step][3]);
    fence_before_copy();
  }

  /// The max of row `h` is at least `top` from here on. Returns by what the sums so far shrink.
  __device__ float raise_max(int h, float top) {
    top = fmaxf(top, rows.max[h]);
    const float shrink = fast_exp2(rows.max[h] - (top == -kInfinity ? 0.0f : top));
    rows.max[h] = top;
    rows.sum[h] *= shrink;
    return shrink;
  }

  /// The other group's weights and max are in shared memory.
  __device__ void wait_for_weights() const {
    group_sync(kGroup == 0 ? kFollowersWeights : kLeadsWeights, kConsumers);
  }

  /// The other group's tile raised the max.
  __device__ void scale_to_other(Sums& sums) {
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) shrink[h] = raise_max(h, s.row[1 - kGroup][row() + 8 * h]);
    scale_sums(sums, shrink);
  }

  /// This group's weights and max are.
  __device__ void tell_weights() const {
    group_arrive(kGroup == 0 ? kLeadsWeights : kFollowersWeights, kConsumers);
  }

  /// Weighs the scores of the lead's tile `i`, tells the follower, and adds the tile's values.
  __device__ void lead_tile(const Part& part, int i, Scores& scores, Sums& sums) {
    float shrink[2];
    weigh(part, i, scores, shrink);
    tell_weights();
    scale_sums(sums, shrink);
    add_own_values(0, sums);
    release_values<0>(0);
    finish(sums);
  }

  __device__ void mask(int token, Scores& scores) const {
#pragma unroll
    for (int k = 0; k < kLatentTileTokens / 2; ++k) {
      const int column = token + k / 4 * 8 + lane() % 4 * 2 + k % 2;
      if (column < rows.low[k / 2 % 2] || column >= rows.high[k / 2 % 2]) scores[k] = -kInfinity;
    }
  }

  static __device__ void scale_sums(Sums& sums, const float (&shrink)[2]) {
    if (!__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (int k = 0; k < kGroupColumns / 2; ++k)
      sums[k / (kUnitColumns / 2)][k % (kUnitColumns / 2)] *= shrink[k / 2 % 2];
  }

  /// Asks for sums += weights values with the group's own weights, of the tile in `buffer`: a group of
  /// products for each unit.
  __device__ void add_own_values(int buffer, Sums& sums) {
    products_fence();
#pragma unroll
    for (int k = 0; k < kGroupUnits; ++k) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        product<T, kUnitColumns, true>(sums[k], weights[step], values(buffer, k, step), 1);
      products_commit();
    }
  }
  /// The same with the other group's weights.
  __device__ void add_other_values(int buffer, Sums& sums) {
    const unsigned parity = uses[buffer]++ & 1u;
#pragma unroll
    for (int k = 0; k < kGroupUnits; ++k)  // long past, but this group has not seen it
      barrier_wait(at(&s.full[buffer][kGroup * kGroupUnits + k]), parity);
    const std::uint64_t from =
        fresh(rows_operand(kGroup == 1 ? at(s.weights) : at(s.queries) + kValueChunks * kChunkBytes));
    products_fence();
#pragma unroll
    for (int k = 0; k < kGroupUnits; ++k) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        product<T, kUnitColumns, true>(sums[k], from + static_cast<unsigned>(step) * 2u,
                                       values(buffer, k, step), 1);
      products_commit();
    }
  }
  /// Unit `k` of this group's value columns, of 16 tokens.
  __device__ std::uint64_t values(int buffer, int k, int step) const {
    return fresh(columns_operand(at(s.kv[buffer]) + kGroup * kGroupUnits * kUnitChunks * kChunkBytes,
                                 kChunkBytes)) +
           static_cast<unsigned>(k) * (kUnitChunks * kChunkBytes / 16u) +
           static_cast<unsigned>(step) * (16u * kRowBytes / 16u);
  }

  /// Waits for the products that add a tile's values, of which `kAfter` groups of products were asked for
  /// later, and releases its units one after another.
  template <int kAfter>
  __device__ __forceinline__ void release_values(int buffer) {
    products_wait<kAfter + 1>();
    release(buffer, kGroup * kGroupUnits);
    products_wait<kAfter>();
    release(buffer, kGroup * kGroupUnits + 1);
    static_assert(kGroupUnits == 2);
  }

  /// This group reads a unit no more. No branch: the other products of the warp group go on.
  __device__ void release(int buffer, int unit) {
    const unsigned empty = at(&s.empty[buffer][unit]);
    const bool is_first = lane() == 0;
    barrier_arrive_if(is_first, empty);
    if constexpr (kBlocks > 1)
      barrier_arrive_at_if(is_first && !asks_for<kBlocks>(unit), empty, unit < kGroupUnits ? 0 : 1);
  }

  /// Writes the group's columns of the block's rows: out and lse, or split partials.
  __device__ void end(const Part& part, const Sums& sums) {
    group_sync(kAllConsumers, kConsumers);  // nobody needs a max any more
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.sum[h] += __shfl_xor_sync(~0u, rows.sum[h], 1);
      rows.sum[h] += __shfl_xor_sync(~0u, rows.sum[h], 2);
      if (lane() % 4 == 0) s.row[kGroup][row() + 8 * h] = rows.sum[h];
    }
    group_sync(kAllConsumers, kConsumers);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = first_row() + row() + 8 * h;
      const float sum = s.row[0][row() + 8 * h] + s.row[1][row() + 8 * h];
      if (r < part.span.query_tile.num_rows) write_row(part, r, rows.max[h], sum, sums, h);
    }
    if (kGroup == 0 && part.is_first && first_row() == 0 && threadIdx.x == 0)
      p.split_tiles[part.query_tile] = {part.span.query_tile, part.splits};
  }

  /// Writes row `r` of the query tile, which is this thread's row `h`.
  __device__ __forceinline__ void write_row(const Part& part, int r, float max, float sum, const Sums& sums,
                                            int h) const {
    const QueryTile& tile = part.span.query_tile;
    const bool is_split = part.splits.count > 1;
    const SplitPartials partials{p, part.splits};
    const int split = scheduled_block<kBlocks>() - part.splits.first_block;
    const std::int64_t token = tile.token(p, r) - p.first_out_token;
    const std::int64_t head = tile.query_head(p, 0, r);
    const bool is_empty = !(max > -kInfinity) && sum == 0.0f;
    const int column = kGroup * kGroupColumns + lane() % 4 * 2;
    const std::int64_t slot = sink_slot(p);
    T* out = static_cast<T*>(p.out) + slot * p.out_slot_stride + token * p.out_token_stride +
             head * p.out_head_stride + column;
    auto* partial = reinterpret_cast<float2*>(partials.out(split, r, 0)) + column / 2;
    const float inverse = is_split ? 1.0f : is_empty ? 0.0f : 1.0f / sum;
    if (kGroup == 0 && lane() % 4 == 0) {
      if (is_split) {
        __stcg(partials.max(split, r), max);
        __stcg(partials.sum(split, r), sum);
      } else {
        p.lse[slot * p.lse_slot_stride + token * p.lse_token_stride + head * p.lse_head_stride] =
            is_empty ? -kInfinity : (max + log2f(sum)) * kLn2;
      }
    }
#pragma unroll
    for (int j = 0; j < kGroupColumns / 8; ++j) {
      const auto& unit = sums[j / (kUnitColumns / 8)];
      const float x = unit[4 * (j % (kUnitColumns / 8)) + 2 * h] * inverse;
      const float y = unit[4 * (j % (kUnitColumns / 8)) + 2 * h + 1] * inverse;
      if (is_split) {
        __stcg(partial + 4 * j, float2{x, y});
      } else if (p.is_out_aligned) {
        *reinterpret_cast<unsigned*>(out + 8 * j) = pack<T>(x, y);
      } else {
        out[8 * j] = from_float<T>(x);
        out[8 * j + 1] = from_float<T>(y);
      }
    }
  }
};

}  // namespace helix::cuda::latent
