// SPDX-License-Identifier: Apache-2.0
// The query rows of the kernel over latents: how they get into shared memory, and how their results leave it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/latent_block.cuh"
#include "cuda/attention/latent_result.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/tensor_map.cuh"

namespace helix::cuda::latent {

/// State of a thread's two rows, 8 apart: the local tokens that they see, and the running softmax.
struct Rows {
  int low[2];
  int high[2];
  float max[2];  ///< Base 2; the largest score exceeds it by at most kMaxExponent.
  float sum[2];  ///< Sum of the weights that this thread has seen.
};

/// The KV tiles of a part.
struct TileRange {
  int count;
  int clear_from;   ///< Tiles from this one on, and perhaps the first one, have tokens that no row sees.
  int plain_begin;  ///< Plain tiles: all rows of the warp see them whole, and scores have no cap.
  int plain_end;
};

/// How TMA copies the rows of q: the heads of token 0, those of token 1, and so on. Rows at one stride are a
/// run: all of them, or the heads of a token.
struct QueryBoxes {
  CUtensorMap map;  ///< Coordinates (column, row of a run, run), boxes of 64 columns.
  Divisor run_rows;
  int rows;  ///< Rows of a box; divides those of a run, if there are several, and of a block.
};

/// The block's rows of one query tile. All consumer threads call its functions.
template <class T, int kBlocks>
struct QueryRows {
  const AttentionParams& p;
  Shared<kBlocks>& s;
  const Part& part;
  const QueryBoxes& boxes;

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }
  static __device__ int group() { return static_cast<int>(threadIdx.x) / kWarpGroup; }
  /// The first of this thread's two rows in the block; the second is 8 further on.
  static __device__ int row() { return warp() * 16 + lane() / 4; }
  static __device__ int first_row() { return block_of_item<kBlocks>() * kGroupRows; }

  /// Loads the rows of the block's `number`-th part into shared memory and finds the tokens that they see.
  __device__ __forceinline__ void begin(unsigned number, Rows& rows) {
    group_sync(kAllConsumers, kConsumers);  // nobody reads the previous rows any more
    if (uniform(static_cast<int>(threadIdx.x) / kWarp) == 0) copy_queries();
    find_bounds(rows);
    barrier_wait(at(&s.queries_full), number & 1u);
  }

  /// Asks for copies of the rows to shared memory; one warp. Rows past the query tile's last may be those of
  /// another one.
  __device__ __forceinline__ void copy_queries() const {
    if (lane() == 0) {
      const QueryTile& tile = part.span.query_tile;
      const int first = tile.first_token * p.group + tile.first_row + first_row();
      const unsigned full = at(&s.queries_full);
      barrier_expect(full, kTileBytes);
#pragma unroll 1
      for (int r = 0; r < kGroupRows; r += boxes.rows) {
        const int run = (first + r) / boxes.run_rows;
        const int in_run = first + r - run * boxes.run_rows;
        const unsigned to = at(s.queries) + static_cast<unsigned>(r) * kRowBytes;
#pragma unroll
        for (unsigned chunk = 0; chunk < kChunks; ++chunk)
          copy_query_box(to + chunk * kChunkBytes, boxes.map, static_cast<int>(chunk) * kChunkColumns, in_run,
                         run, full);
      }
    }
    __syncwarp();
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

  /// Finds the tokens that this thread's rows see, and resets their softmax.
  __device__ __forceinline__ void find_bounds(Rows& rows) {
    rows.low[1] = rows.high[1] = 0;
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      const TokenRange seen = seen_by_row(p, part.span, first_row() + row() + 8 * h);
      // An index that only the loop knows would keep the bounds in local memory.
      rows.low[0] = rows.low[1];
      rows.high[0] = rows.high[1];
      rows.low[1] = static_cast<int>(seen.begin);
      rows.high[1] = static_cast<int>(seen.end);
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
            uniform(p.soft_cap > 0.0f ? 0 : ::max(end, 0) / kLatentTileTokens)};
  }

  // In the epilogue the queries' memory holds the result rows of each group's columns, then for each row both
  // groups' sums, their largest values, the max, the RowEnd and the place in out.
  static constexpr unsigned kStageRowBytes = kGroupColumns * 2u;
  static constexpr unsigned kStageBytes = kGroupRows * kStageRowBytes;
  __device__ std::byte* stage() const {
    return s.queries + group() * kStageBytes;
  }
  __device__ float* row_sums() const {
    return reinterpret_cast<float*>(s.queries + kGroups * kStageBytes);
  }
  __device__ float* row_most() const {
    return row_sums() + kGroups * kGroupRows;
  }
  __device__ float* row_max() const {
    return row_most() + kGroups * kGroupRows;
  }
  __device__ RowEnd* row_ends() const {
    return reinterpret_cast<RowEnd*>(row_max() + kGroupRows);
  }
  __device__ std::byte** row_places() const {
    return reinterpret_cast<std::byte**>(row_ends() + kGroupRows);
  }
  static_assert(kGroups * kStageBytes +
                    kGroupRows * (5 * sizeof(float) + sizeof(RowEnd) + sizeof(std::byte*)) <=
                kTileBytes);
  /// Byte offset of 16-byte piece `piece` of row `r` in the stage; neighbouring rows lie in different banks.
  static __device__ unsigned staged(int r, int piece) {
    return static_cast<unsigned>(r) * kStageRowBytes + static_cast<unsigned>(piece ^ r % 8) * 16u;
  }

  /// The RowEnd of row `r`, after all consumers have stored their sums and largest values.
  __device__ __forceinline__ RowEnd find_end(bool is_split, int r) const {
    return end_of_row(is_split, row_max()[r], row_sums()[r] + row_sums()[kGroupRows + r],
                      fmaxf(row_most()[r], row_most()[kGroupRows + r]));
  }

  /// Stores this warp's rows in the stage.
  __device__ __forceinline__ void stage_rows(bool is_split, const Sums& sums) const {
    const float factor[2] = {row_ends()[row()].factor, row_ends()[row() + 8].factor};
    const int r = warp() * 16 + lane() % 16;
#pragma unroll
    for (int step = 0; step < kGroupColumns / 16; ++step) {
      unsigned two[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        two[k] = pack_result<T>(is_split, sums[8 * step + 2 * k] * factor[k % 2],
                                sums[8 * step + 2 * k + 1] * factor[k % 2]);
      store_matrices(at(stage()) + staged(r, 2 * step + lane() / 16), two[0], two[1], two[2], two[3]);
    }
  }

  /// Writes the rows: out and lse, or split partials.
  __device__ __forceinline__ void end(const Rows& rows, const Sums& sums) const {
    group_sync(kAllConsumers, kConsumers);  // nobody reads queries or weights any more
    const bool splits = is_split(part);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = rows.sum[h];
      float most = 0.0f;  // of split partials
      if (splits) {
#pragma unroll
        for (int k = 2 * h; k < kGroupColumns / 2; k += 4)
          most = fmaxf(most, fmaxf(fabsf(sums[k]), fabsf(sums[k + 1])));
      }
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        sum += __shfl_xor_sync(~0u, sum, offset);
        most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
      }
      if (lane() % 4 == 0) {
        row_sums()[group() * kGroupRows + row() + 8 * h] = sum;
        row_most()[group() * kGroupRows + row() + 8 * h] = most;
        row_max()[row() + 8 * h] = rows.max[h];
      }
    }
    group_sync(kAllConsumers, kConsumers);
    if (const int r = static_cast<int>(threadIdx.x); r < kGroupRows) row_ends()[r] = find_end(splits, r);
    group_sync(kAllConsumers, kConsumers);
    stage_rows(splits, sums);
    group_sync(kOneGroup + group(), kWarpGroup);
    write_rows<kBlocks, kGroupRows>(p, part, row_ends(), row_places(), [&](int r) {
      return *reinterpret_cast<const uint4*>(stage() + staged(r, lane()));
    });
    fence_before_copy();  // of the next queries
  }
};

}  // namespace helix::cuda::latent
