// SPDX-License-Identifier: Apache-2.0
// The query rows of a block that attends to latents of e4m3: how they come to shared memory, and how their
// results leave it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/latent_e4m3_softmax.cuh"
#include "cuda/attention/latent_rows.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"

namespace helix::cuda::latent_e4m3 {

/// The block's rows of one query tile; by all consumers.
template <class K>
struct QueryRows {
  using T = typename K::T;
  static constexpr int kRows = K::kRows;

  const AttentionParams& p;
  Shared<K>& s;
  const Part& part;
  float kv_scale;

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }
  static __device__ int first_row() { return block_of_item<K::kBlocks>() * kGroupRows; }

  static __device__ int group() { return static_cast<int>(threadIdx.x) / kWarpGroup; }

  /// The rows into shared memory, and what they see. Returns which KV tiles all of them see whole.
  __device__ __forceinline__ TokenRange begin() {
    group_sync(latent_e4m3::kAllConsumers, kConsumers);  // nobody reads the rows before
    copy_queries();
    find_bounds();
    fence_before_copy();
    group_sync(latent_e4m3::kAllConsumers, kConsumers);
    int low = 0;
    int high = INT32_MAX;
    for (int r = lane(); r < kRows; r += kWarp) {
      low = ::max(low, s.low[r]);
      high = ::min(high, s.high[r]);
    }
    low = ::max(__reduce_max_sync(~0u, low) - part.first_token, 0);
    high = ::max(__reduce_min_sync(~0u, high) - part.first_token, 0);
    return {(low + kLatentTileTokens - 1) / kLatentTileTokens, high / kLatentTileTokens};
  }

  /// Rows in f16, each times a power of two that makes the best of its range; columns in the order in which
  /// the keys come out of matrix loads. Rope columns of bf16 stay bf16.
  __device__ __forceinline__ void copy_queries() const {
    constexpr int kThreadsOfRow = kConsumers / kRows;
    constexpr int kParts = (kLatentColumns + kRopeColumns) / 8;
    constexpr int kThreadParts = (kParts + kThreadsOfRow - 1) / kThreadsOfRow;
    const QueryTile& tile = part.span.query_tile;
    const int r = static_cast<int>(threadIdx.x) / kThreadsOfRow;
    const int first = static_cast<int>(threadIdx.x) % kThreadsOfRow;
    const bool is_row = first_row() + r < tile.num_rows;
    const T* q = static_cast<const T*>(p.q);
    if (is_row)
      q += tile.token(p, first_row() + r) * p.q_token_stride +
           tile.query_head(p, 0, first_row() + r) * p.q_head_stride;
    uint4 parts[kThreadParts];
    float most = 0.0f;
#pragma unroll
    for (int k = 0; k < kThreadParts; ++k) {
      const int c = first + k * kThreadsOfRow;
      parts[k] = is_row && c < kParts ? *reinterpret_cast<const uint4*>(q + c * 8) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int k = 0; k < kThreadParts; ++k) {
      const T* x = reinterpret_cast<const T*>(&parts[k]);
#pragma unroll
      for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(to_float(x[i])));
    }
#pragma unroll
    for (int offset = 1; offset < kThreadsOfRow; offset *= 2)
      most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    constexpr int kTop = 127 + 13;
    const int exponent = static_cast<int>(__float_as_uint(most) >> 23);  // biased
    const int up = most > 0.0f ? ::max(1, ::min(253, 127 + kTop - exponent)) : 127;
    const float scale = __uint_as_float(static_cast<unsigned>(up) << 23);
#pragma unroll
    for (int k = 0; k < kThreadParts; ++k) {
      const int c = first + k * kThreadsOfRow;
      if (c < kParts) store_part(r, c, reinterpret_cast<const T*>(&parts[k]), scale);
    }
    if (first == 0) {
      const float inverse = __uint_as_float(static_cast<unsigned>(254 - up) << 23);
      const float factor = p.soft_cap > 0.0f ? 1.0f / p.soft_cap : kLog2E;
      s.row[r] = {p.scale * kv_scale * factor * inverse, 0.0f};
      s.is_unset[r] = true;
      if (r == 0) s.are_unset = true;
    }
  }
  /// Columns [8 * c, 8 * c + 8) of row `r`.
  __device__ __forceinline__ void store_part(int r, int c, const T* x, float scale) const {
    const unsigned chunk = at(s.queries) + static_cast<unsigned>(c / 8) * K::kQueryChunkBytes;
    const auto row = static_cast<unsigned>(r);
    const auto part_of_chunk = static_cast<unsigned>(c % 8);
    unsigned two[4];
    if (K::kIsMixed && c >= latent::kValueChunks * 8) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        two[i] = pack<bf16>(to_float(x[2 * i]) * scale, to_float(x[2 * i + 1]) * scale);
      store_shared(chunk + swizzled(row, part_of_chunk), uint4{two[0], two[1], two[2], two[3]});
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      two[i] = pack<f16>(to_float(x[2 * i]) * scale, to_float(x[2 * i + 1]) * scale);
      // Of each four columns the first two come before the others of the sixteen.
#pragma unroll
    for (unsigned k = 0; k < 2; ++k)
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(chunk + swizzled(row, (part_of_chunk & ~1u) + k) +
                                                            part_of_chunk % 2u * 8u),
                   "r"(two[k]), "r"(two[k + 2])
                   : "memory");
  }

  /// What the rows see.
  __device__ __forceinline__ void find_bounds() const {
    const QueryTile& tile = part.span.query_tile;
    const int r = static_cast<int>(threadIdx.x);
    if (r >= kRows) return;
    TokenRange seen{part.span.begin_token, part.span.end_token};
    if (first_row() + r < tile.num_rows) seen = visible(p, p.positions[tile.token(p, first_row() + r)]);
    s.low[r] = static_cast<int>(seen.begin);
    s.high[r] = static_cast<int>(seen.end);
  }

  // At the end the place of the queries holds half of a group's columns at a time.
  static constexpr int kStageColumns = kGroupColumns / 2;
  static_assert(kGroups * kRows * kStageColumns * sizeof(float) <= K::kQueryBytes);
  __device__ float* stage() const {
    return reinterpret_cast<float*>(s.queries) + group() * kRows * kStageColumns;
  }
  /// Element of the stage where four columns of row `r` begin: what a warp writes goes to different banks.
  static __device__ int staged(int r, int four) {
    return r * kStageColumns + (four ^ r / 2 % 4 * 2) * 4;
  }
  __device__ float4 staged_columns(int r) const {
    return *reinterpret_cast<const float4*>(stage() + staged(r, lane()));
  }

  /// Writes the rows: out and lse, or split partials.
  __device__ __forceinline__ void end(const Totals<K>& totals, const Sums<K>& sums) const {
    group_sync(latent_e4m3::kAllConsumers, kConsumers);  // nobody reads queries any more
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      float total = totals[i];
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2) total += __shfl_xor_sync(~0u, total, offset);
      if (lane() < 4) s.top[group()][warp()][i / 2 * 8 + lane() * 2 + i % 2] = total;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half > 0) group_sync(kOneGroup + group(), kWarpGroup);
#pragma unroll
      for (int block = 0; block < kValueBlocks / 2; ++block) {
        const int column = warp() * kPairColumns + block * 16 + lane() / 4 * 2;
#pragma unroll
        for (int i = 0; i < kRows / 4; ++i) {  // query row 8 * (i / 2) + lane % 4 * 2 + i % 2
          const int r = i / 2 * 8 + lane() % 4 * 2 + i % 2;
          const auto& from = sums[half * (kValueBlocks / 2) + block];
          *reinterpret_cast<float2*>(stage() + staged(r, column / 4) + column % 4) =
              float2{from[i / 2 * 4 + i % 2] * kv_scale, from[i / 2 * 4 + 2 + i % 2] * kv_scale};
        }
      }
      group_sync(latent_e4m3::kAllConsumers, kConsumers);
      write_stage(group() * kGroupColumns + half * kStageColumns);
    }
    if (part.is_first && first_row() == 0 && threadIdx.x == 0)
      p.split_tiles[part.query_tile] = {part.span.query_tile, part.splits};
  }

  __device__ __forceinline__ float total_of(int r) const {
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < kGroups * 4; ++k) total += s.top[k / 4][k % 4][r];
    return total;
  }
  __device__ __forceinline__ float max_of(int r, float total) const {
    return total == 0.0f ? -kInfinity : s.row[r].pivot;
  }

  /// Writes the staged columns of all rows, which begin at `column`; a warp takes a row at a time.
  __device__ __forceinline__ void write_stage(int column) const {
    const int rows = uniform(::min(kRows, part.span.query_tile.num_rows - first_row()));
    if (uniform(part.splits.count) > 1) {
      const SplitPartials partials{p, part.splits};
      const int split = scheduled_block<K::kBlocks>() - part.splits.first_block;
      latent::write_partial_columns(partials.out(split, first_row() + warp(), column) + lane(), rows,
                                    [&](int r) { return staged_columns(r); });
      const int r = static_cast<int>(threadIdx.x);
      if (column == 0 && r < rows) {
        const float total = total_of(r);
        __stcg(partials.max(split, first_row() + r), max_of(r, total));
        __stcg(partials.sum(split, first_row() + r), total);
      }
    } else {
#pragma unroll 1
      for (int r = warp(); r < rows; r += kWarpGroup / kWarp) {
        const float total = total_of(r);
        RowWriter(p, part.span.query_tile, 0, first_row() + r, max_of(r, total), total)
            .write(column + lane() * kLaneColumns, staged_columns(r));
      }
    }
  }
};

}  // namespace helix::cuda::latent_e4m3
