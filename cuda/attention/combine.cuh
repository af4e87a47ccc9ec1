// SPDX-License-Identifier: Apache-2.0
// The epilogue of a query tile: merges the partial results of a block's warps, and those of the KV splits,
// into out and lse.
//
// Part i of a row has a max m_i (base 2), a sum of weights s_i and an unnormalised sum of values v_i. With m
// the largest m_i: out = sum(2^(m_i - m) v_i) / sum(2^(m_i - m) s_i), lse = ln 2 (m + log2(sum(2^(m_i - m)
// s_i))).
//
// A block whose KV split is the query tile's only one writes out and lse. Otherwise each block writes split
// partials to the workspace, and the last block to arrive combines them in the order of the splits. Out and
// lse thus come from one launch, with the same bits each time. A warp processes a whole row and a lane four
// columns at a time, so only the count of finished splits needs a barrier.
#pragma once

#include <cstdint>

#include "cuda/attention/block_result.cuh"
#include "cuda/attention/schedule.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

inline constexpr int kLaneColumns = 4;  ///< Columns that a lane takes at a time.

/// Writes one row of out, and its lse; the lanes of a warp call write() for all columns. kMayBeF32: whether
/// out may be f32. 16-bit kernels leave that code out, because each launch would fetch it from memory.
template <bool kMayBeF32 = false>
struct RowWriter {
  const AttentionParams& p;
  std::int64_t at;
  std::uint32_t count;  // exchange number that lines carry
  float inverse;
  bool is_empty;

  __device__ RowWriter(const AttentionParams& params, const QueryTile& query_tile, int head, int row,
                       float max, float sum, const TargetPlace& place = target_place())
      : p(params), count(place.count) {
    const std::int64_t token = query_tile.token(p, row) - p.first_out_token;
    const std::int64_t query_head = query_tile.query_head(p, head, row);
    at = out_row(p, place, token, query_head);
    is_empty = !(max > -kInfinity) && sum == 0.0f;
    inverse = is_empty ? 0.0f : 1.0f / sum;
    if (threadIdx.x % kWarp == 0)
      store_lse(p, place, token, query_head, is_empty ? -kInfinity : (max + log2f(sum)) * kLn2);
  }

  __device__ void write(int column, float4 x) const {
    const float4 result = is_empty ? float4{0.0f, 0.0f, 0.0f, 0.0f}
                                   : float4{x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse};
    if (kMayBeF32 && p.dtype == DType::f32) return write_floats(column, result);
    const auto pair = [is_bf16 = p.dtype == DType::bf16](float low, float high) {
      return is_bf16 ? pack<bf16>(low, high) : pack<f16>(low, high);
    };
    write_bits(column, uint2{pair(result.x, result.y), pair(result.z, result.w)});
  }

 private:
  __device__ void write_bits(int column, uint2 four) const {
    if (p.sends_lines) {
      store_line(static_cast<std::uint16_t*>(p.out) + at + 2 * column, four.x, four.y, count);
    } else {
      store<std::uint16_t>(column, four);
    }
  }
  __device__ void write_floats(int column, float4 four) const {
    if (!p.sends_lines) return store<float>(column, four);
    float* const line = static_cast<float*>(p.out) + at + 2 * column;
    store_line(line, __float_as_uint(four.x), __float_as_uint(four.y), count);
    if (column + 2 < p.value_dim)
      store_line(line + 4, __float_as_uint(four.z), __float_as_uint(four.w), count);
  }
  /// Stores those of the four columns that the row has.
  template <class T, class Four>
  __device__ void store(int column, const Four& four) const {
    T* to = static_cast<T*>(p.out) + at + column;
    const int left = p.value_dim - column;
    if (p.out_alignment >= static_cast<int>(sizeof(Four)) && left >= kLaneColumns) {
      *reinterpret_cast<Four*>(to) = four;
    } else {
      const T* from = reinterpret_cast<const T*>(&four);
      for (int k = 0; k < min(left, kLaneColumns); ++k) to[k] = from[k];
    }
  }
};

/// Where the split partial of a row is written: unnormalised sum of values, max (base 2) and sum of weights.
struct PartialRow {
  float* values;
  float* max;
  float* sum;
};

/// The partials of all KV splits of one query tile and head, in the workspace.
struct SplitPartials {
  const AttentionParams& p;
  KvSplits splits;

  /// Place of split `i` in the workspace. Each block has two places, because its work item shares at most two
  /// query tiles with other blocks: one that it continues, and one that it begins.
  __device__ std::int64_t place(int i) const {
    return 2 * std::int64_t{splits.first_block + i} + (i == 0 ? 1 : 0);
  }
  __device__ float* max(int i, int row) const { return p.partial_max + place(i) * p.query_tile_rows + row; }
  __device__ float* sum(int i, int row) const { return p.partial_sum + place(i) * p.query_tile_rows + row; }
  __device__ float4* out(int i, int row, int column) const {
    return reinterpret_cast<float4*>(
        p.partial_out + (place(i) * p.query_tile_rows + row) * partial_stride(p.value_dim) + column);
  }
  /// The counter of the finished splits of query tile `u`.
  __device__ int* counter(int u, int head) const { return p.counters + u * p.kv_heads + head; }
  /// Where row `row` of this block's split is written.
  __device__ PartialRow own_row(int row) const {
    const int i = static_cast<int>(blockIdx.x) - splits.first_block;
    return {reinterpret_cast<float*>(out(i, row, 0)), max(i, row), sum(i, row)};
  }
  /// Moves `out` from split `i` to the next split.
  __device__ const float4* next(const float4* out, int i) const {
    return out + (i == 0 ? 1 : 2) * p.query_tile_rows * partial_stride(p.value_dim) / 4;
  }
};

/// Writes row `row` of a query tile to out and lse; one warp.
template <bool kMayBeF32, int kParts>
__device__ __forceinline__ void write_row(const AttentionParams& p, const QueryTile& query_tile, int head,
                                          int row, const ResultRow<kParts>& result) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const RowWriter<kMayBeF32> writer(p, query_tile, head, row, result.max, result.sum);
#pragma unroll 1
  for (int column = lane * kLaneColumns; column < p.value_dim; column += kWarp * kLaneColumns)
    writer.write(column, result.get(column));
}

/// Writes rows [first_row, first_row + num_rows) of this block's KV split. The only split of a query tile
/// goes to out and lse; any other becomes split partials at row_of(row). `found` holds these rows from index
/// 0 on; all threads of the block have written it.
template <bool kMayBeF32 = false, int kParts, class RowOf>
__device__ __forceinline__ void write_split(const SplitPartials& all, const QueryTile& query_tile, int head,
                                            int first_row, int num_rows, const BlockResult<kParts>& found,
                                            const RowOf& row_of) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for_each_row(found, num_rows, [&](int r, const ResultRow<kParts>& result) {
    const int row = first_row + r;
    if (all.splits.count == 1) {
      write_row<kMayBeF32>(all.p, query_tile, head, row, result);
    } else {
      const PartialRow to = row_of(row);
#pragma unroll 1
      for (int column = lane * kLaneColumns; column < all.p.value_dim; column += kWarp * kLaneColumns)
        *reinterpret_cast<float4*>(to.values + column) = result.get(column);
      if (lane == 0) {
        *to.max = result.max;
        *to.sum = result.sum;
      }
    }
  });
}

/// write_split() with split partials in the workspace.
template <bool kMayBeF32 = false, int kParts>
__device__ void write_split(const SplitPartials& all, const QueryTile& query_tile, int head, int first_row,
                            int num_rows, const BlockResult<kParts>& found) {
  write_split<kMayBeF32>(all, query_tile, head, first_row, num_rows, found,
                         [&](int row) { return all.own_row(row); });
}

/// Combines columns [begin, end) of one row of all split partials into out, and into lse; one warp. Up to
/// kCombineBatch loads of partial sums are in flight while the weights are computed.
template <bool kMayBeF32 = false>
__device__ inline void combine_row(const SplitPartials& from, const QueryTile& query_tile, int head, int row,
                                   int begin, int end) {
  static_assert(kWarp % kCombineBatch == 0);
  const AttentionParams& p = from.p;
  const int count = from.splits.count;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float lane_max = -kInfinity;  // max of split c / kWarp * kWarp + lane
  float lane_sum = 0.0f;
  const auto load = [&](int i) {
    lane_max = i < count ? __ldcg(from.max(i, row)) : -kInfinity;
    lane_sum = i < count ? __ldcg(from.sum(i, row)) : 0.0f;
  };
  load(lane);
  float top = lane_max;
  float sum = 0.0f;
#pragma unroll 1
  for (int first = begin; first < end; first += kWarp * kLaneColumns) {
    const int column = first + lane * kLaneColumns;
    float4 total{0.0f, 0.0f, 0.0f, 0.0f};
    float weight = 0.0f;  // rescale factor of the same split
#pragma unroll 1
    for (int c = 0; c < count; c += kCombineBatch) {
      const float4* part = from.out(c, row, column < end ? column : 0);
      float4 parts[kCombineBatch];
#pragma unroll
      for (int k = 0; k < kCombineBatch; ++k) {
        parts[k] = __ldcg(part);
        if (c + k + 1 < count) part = from.next(part, c + k);
      }
      if (first == begin && c == 0) {
        for (int i = lane + kWarp; i < count; i += kWarp) top = fmaxf(top, __ldcg(from.max(i, row)));
        top = warp_max(top);
      }
      if (c % kWarp == 0) {
        if (count > kWarp) load(c + lane);
        weight = exp2f(lane_max - (top == -kInfinity ? 0.0f : top));
        if (first == begin) sum = fmaf(weight, lane_sum, sum);
      }
#pragma unroll
      for (int k = 0; k < kCombineBatch; ++k) {
        const float w = __shfl_sync(~0u, weight, (c + k) % kWarp);
        add_weighted(total, w, parts[k]);
      }
    }
    if (first == begin) sum = warp_sum(sum);
    const RowWriter<kMayBeF32> writer(p, query_tile, head, row, top, sum);
    if (column < end) writer.write(column, total);
  }
}

/// Adds 1 to `counter` and returns its previous value. Acquire-release at GPU scope: writes that happened
/// before the call come before the count, later reads after it.
__device__ inline int count_up(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

/// Counts this block's split. Sets `is_last`, in shared memory, to whether all other splits were counted
/// before. Called by all threads that meet() joins at a barrier; this one has number `thread`. counter() is
/// zero between launches.
template <class Counter, class Flag, class Meet>
__device__ __forceinline__ void count_split(const SplitPartials& all, const Counter& counter, int thread,
                                            Flag& is_last, const Meet& meet) {
  meet();
  if (thread == 0) {
    // The block's writes come before its count, and the writes of blocks counted earlier before its reads.
    int* place = counter();
    is_last = count_up(place) == all.splits.count - 1;
    if (is_last) *place = 0;
  }
  meet();
}

/// Combines the splits of query tile `u`, if this block is the last to arrive. Called after all writes of its
/// split partials, by `threads` threads that meet() joins at a barrier; this one has number `thread`.
/// `is_last` is in shared memory.
template <bool kMayBeF32, class Flag, class Meet>
__device__ __forceinline__ void combine_splits(const SplitPartials& all, const QueryTile& query_tile, int u,
                                               int head, int thread, int threads, Flag& is_last,
                                               const Meet& meet) {
  count_split(
      all, [&] { return all.counter(u, head); }, thread, is_last, meet);
  if (!is_last) return;
  for (int row = thread / kWarp; row < query_tile.num_rows; row += threads / kWarp)
    combine_row<kMayBeF32>(all, query_tile, head, row, 0, all.p.value_dim);
}

/// combine_splits() by all threads of the block, after write_split() of all rows.
template <bool kMayBeF32 = false>
__device__ inline void combine_splits(const SplitPartials& all, const QueryTile& query_tile, int u,
                                      int head) {
  __shared__ bool is_last;
  if (all.splits.count == 1) return;
  combine_splits<kMayBeF32>(all, query_tile, u, head, static_cast<int>(threadIdx.x),
                            static_cast<int>(blockDim.x), is_last, [] { __syncthreads(); });
}

/// A query tile of one KV head, whose splits a later launch combines.
struct SplitQueryTile {
  QueryTile query_tile;
  KvSplits splits;
};

}  // namespace helix::cuda
