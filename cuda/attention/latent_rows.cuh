// SPDX-License-Identifier: Apache-2.0
// The query rows of a block that attends to latents: how they come to shared memory, and how their results
// leave it.
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
  float max[2];  ///< Base 2; the largest score is little above it.
  float sum[2];  ///< Of the weights that this thread has seen.
};

/// The KV tiles of a part, and which of them the rows of a warp see whole.
struct TileRange {
  int count;
  int clear_from;  ///< From this one on, and perhaps in the first one, there are tokens that no row sees.
  int whole_begin;
  int whole_end;
};

/// 16 bytes into shared memory, or zeros where not `is_there`; wait_for_parts() says when they are there.
__device__ __forceinline__ void copy_part(unsigned to, const void* from, bool is_there) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
#endif
}
__device__ __forceinline__ void wait_for_parts() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

/// Writes rows of a consumer group's columns as split partials, from where `to` leads for this thread; a warp
/// takes a row at a time. staged(r): this lane's four columns of row `r`.
template <class Staged>
__device__ __forceinline__ void write_partial_columns(float4* to, int rows, const Staged& staged) {
  constexpr int kWarpsOfGroup = kWarpGroup / kWarp;
#pragma unroll 4
  for (int r = static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; r < rows; r += kWarpsOfGroup) {
    __stcg(to, staged(r));
    to += kWarpsOfGroup * kLatentColumns / kLaneColumns;
  }
}

/// The block's rows of one query tile; by all consumers.
template <class T, int kBlocks>
struct QueryRows {
  const AttentionParams& p;
  Shared<kBlocks>& s;
  const Part& part;

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }
  static __device__ int group() { return static_cast<int>(threadIdx.x) / kWarpGroup; }
  /// The first of this thread's rows in the block.
  static __device__ int row() { return warp() * 16 + lane() / 4; }
  static __device__ int first_row() { return block_of_item<kBlocks>() * kGroupRows; }

  /// The rows into shared memory, and what they see.
  __device__ __forceinline__ void begin(Rows& rows) {
    group_sync(kAllConsumers, kConsumers);  // nobody reads the rows before
    copy_queries();
    find_bounds(rows);
    wait_for_parts();
    fence_before_copy();
    group_sync(kAllConsumers, kConsumers);
  }

  /// Four threads a row, which take its 16-byte parts in turn.
  __device__ __forceinline__ void copy_queries() const {
    constexpr int kThreadsOfRow = kConsumers / kGroupRows;
    constexpr int kPartsOfChunk = 8;
    const QueryTile& tile = part.span.query_tile;
    const int r = static_cast<int>(threadIdx.x) / kThreadsOfRow;
    const int first = static_cast<int>(threadIdx.x) % kThreadsOfRow;
    const bool is_row = first_row() + r < tile.num_rows;
    const T* q = static_cast<const T*>(p.q) + first * 8;
    if (is_row)
      q += tile.token(p, first_row() + r) * p.q_token_stride +
           tile.query_head(p, 0, first_row() + r) * p.q_head_stride;
#pragma unroll
    for (int c = 0; c < kPartsOfChunk; c += kThreadsOfRow) {
      const unsigned to =
          at(s.queries) + swizzled(static_cast<unsigned>(r), static_cast<unsigned>(first + c));
#pragma unroll
      for (unsigned chunk = 0; chunk < kChunks; ++chunk)
        copy_part(to + chunk * kChunkBytes, q + chunk * kChunkColumns + c * 8, is_row);
    }
  }

  __device__ __forceinline__ void load_held(Operand (&held)[kHeldChunks]) const {
#pragma unroll
    for (unsigned i = 0; i < kHeldChunks; ++i) {
#pragma unroll
      for (unsigned step = 0; step < kSteps; ++step)
        load_matrices(held[i][step], at(s.queries) + (kChunks - kHeldChunks + i) * kChunkBytes +
                                         swizzled(static_cast<unsigned>(warp() * 16 + lane() % 16),
                                                  step * 2u + static_cast<unsigned>(lane()) / 16u));
    }
  }

  /// What the rows of this thread see.
  __device__ __forceinline__ void find_bounds(Rows& rows) {
    const QueryTile& tile = part.span.query_tile;
    const bool is_one_token = tile.token(p, 0) == tile.token(p, tile.num_rows - 1);
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      const int r = first_row() + row() + 8 * h;
      TokenRange seen{part.span.begin_token, part.span.end_token};
      if (!is_one_token && r < tile.num_rows) seen = visible(p, p.positions[tile.token(p, r)]);
      rows.low[h] = static_cast<int>(seen.begin);
      rows.high[h] = static_cast<int>(seen.end);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.max[h] = -kInfinity;
      rows.sum[h] = 0.0f;
    }
  }

  __device__ __forceinline__ TileRange find_tiles(const Rows& rows) const {
    const int begin = __reduce_max_sync(~0u, ::max(rows.low[0], rows.low[1])) - part.first_token;
    const int end = __reduce_min_sync(~0u, ::min(rows.high[0], rows.high[1])) - part.first_token;
    return {uniform(part.count), uniform((part.span.end_token - part.first_token) / kLatentTileTokens),
            uniform((::max(begin, 0) + kLatentTileTokens - 1) / kLatentTileTokens),
            uniform(::max(end, 0) / kLatentTileTokens)};
  }

  // At the end the place of the queries holds half of a group's columns at a time, and behind them of each
  // row the sums of both groups, and the max.
  static constexpr int kStageColumns = kGroupColumns / 2;
  static constexpr unsigned kStageBytes = kGroupRows * kStageColumns * sizeof(float);
  __device__ float* stage() const {
    return reinterpret_cast<float*>(s.queries + group() * kStageBytes);
  }
  __device__ float* row_sums() const {
    return reinterpret_cast<float*>(s.queries + kGroups * kStageBytes);
  }
  __device__ float* row_max() const {
    return row_sums() + kGroups * kGroupRows;
  }
  /// Element of the stage where four columns of row `r` begin: neighbouring rows in different banks.
  static __device__ int staged(int r, int four) {
    return r * kStageColumns + (four ^ r % 4 * 2) * 4;
  }
  __device__ float4 staged_columns(int r) const {
    return *reinterpret_cast<const float4*>(stage() + staged(r, lane()));
  }

  /// Writes the rows: out and lse, or split partials.
  __device__ __forceinline__ void end(const Rows& rows, const Sums& sums) const {
    group_sync(kAllConsumers, kConsumers);  // nobody reads queries or weights any more
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = rows.sum[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane() % 4 == 0) {
        row_sums()[group() * kGroupRows + row() + 8 * h] = sum;
        row_max()[row() + 8 * h] = rows.max[h];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half > 0) group_sync(kOneGroup + group(), kWarpGroup);
#pragma unroll
      for (int k = 0; k < kStageColumns / 2; k += 2) {
        const int r = row() + k / 2 % 2 * 8;
        const int column = k / 4 * 8 + lane() % 4 * 2;
        const int i = half * (kStageColumns / 2) + k;
        *reinterpret_cast<float2*>(stage() + staged(r, column / 4) + column % 4) =
            float2{sums[i], sums[i + 1]};
      }
      group_sync(kAllConsumers, kConsumers);
      write_stage(group() * kGroupColumns + half * kStageColumns);
    }
    if (part.is_first && first_row() == 0 && threadIdx.x == 0)
      p.split_tiles[part.query_tile] = {part.span.query_tile, part.splits};
  }

  /// Writes the staged columns of all rows, which begin at `column`; a warp takes a row at a time.
  __device__ __forceinline__ void write_stage(int column) const {
    const int rows = uniform(min(kGroupRows, part.span.query_tile.num_rows - first_row()));
    if (uniform(part.splits.count) > 1) {
      const SplitPartials partials{p, part.splits};
      const int split = scheduled_block<kBlocks>() - part.splits.first_block;
      write_partial_columns(partials.out(split, first_row() + warp(), column) + lane(), rows,
                            [&](int r) { return staged_columns(r); });
      const int r = static_cast<int>(threadIdx.x);
      if (column == 0 && r < rows) {
        __stcg(partials.max(split, first_row() + r), row_max()[r]);
        __stcg(partials.sum(split, first_row() + r), row_sums()[r] + row_sums()[kGroupRows + r]);
      }
    } else {
#pragma unroll 1
      for (int r = warp(); r < rows; r += kWarpGroup / kWarp)
        write_row(first_row() + r, column, row_max()[r], row_sums()[r] + row_sums()[kGroupRows + r],
                  staged_columns(r));
    }
  }

  /// Four columns of a row of out, and lse.
  __device__ __forceinline__ void write_row(int row, int column, float max, float sum, float4 x) const {
    const QueryTile& tile = part.span.query_tile;
    const std::int64_t token = tile.token(p, row) - p.first_out_token;
    const std::int64_t head = tile.query_head(p, 0, row);
    const std::int64_t slot = sink_slot(p);
    const bool is_empty = !(max > -kInfinity) && sum == 0.0f;
    const float inverse = is_empty ? 0.0f : 1.0f / sum;
    if (column == 0 && lane() == 0)
      p.lse[slot * p.lse_slot_stride + token * p.lse_token_stride + head * p.lse_head_stride] =
          is_empty ? -kInfinity : (max + log2f(sum)) * kLn2;
    T* out = static_cast<T*>(p.out) + slot * p.out_slot_stride + token * p.out_token_stride +
             head * p.out_head_stride + column + lane() * kLaneColumns;
    const uint2 four{pack<T>(x.x * inverse, x.y * inverse), pack<T>(x.z * inverse, x.w * inverse)};
    if (p.is_out_aligned) {
      *reinterpret_cast<uint2*>(out) = four;
    } else {
      const T* from = reinterpret_cast<const T*>(&four);
#pragma unroll
      for (int k = 0; k < kLaneColumns; ++k) out[k] = from[k];
    }
  }
};

}  // namespace helix::cuda::latent
