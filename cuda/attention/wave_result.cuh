// SPDX-License-Identifier: Apache-2.0
// The epilogue of the kernel for many query rows: writes the sums in the registers of warp groups to out and
// lse, or to the workspace as split partials, which the last block to arrive combines, or a later launch.
#pragma once

#include <cstdint>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/wave_schedule.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp_groups.cuh"

namespace helix::cuda {

/// A thread's results of two query rows, 8 apart. d[4 * j + 2 * h + i] is the unnormalised sum of column 8 *
/// j + lane % 4 * 2 + i of row h. In the epilogue all lanes of a row have the same max (base 2) and sum.
template <int kValueDim>
struct RowSums {
  float d[kValueDim / 2];
  float max[2];
  float sum[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) d[i] = 0.0f;
    max[0] = max[1] = -kInfinity;
    sum[0] = sum[1] = 0.0f;
  }
  /// Whether row `h` saw nothing.
  __device__ __forceinline__ bool is_empty(int h) const {
    return !(max[h] > -kInfinity) && sum[h] == 0.0f;
  }
  /// Zeroes rows that saw nothing: they have multiplied values of other rows, even infinite ones, by 0.
  __device__ __forceinline__ void clear_empty() {
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) d[i] = is_empty(i / 2 % 2) ? 0.0f : d[i];
  }
};

/// Transposes the 4 x 4 words that four neighbouring lanes have in x[0..3].
__device__ __forceinline__ void transpose_words(unsigned (&x)[4]) {
  const bool is_odd = threadIdx.x % 2 != 0;
  const bool is_high = threadIdx.x % 4 >= 2;
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    const unsigned other = __shfl_xor_sync(~0u, is_odd ? x[k] : x[k + 1], 1);
    (is_odd ? x[k] : x[k + 1]) = other;
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const unsigned other = __shfl_xor_sync(~0u, is_high ? x[k] : x[k + 2], 2);
    (is_high ? x[k] : x[k + 2]) = other;
  }
}

/// Writes rows `row` and row + 8 of the query tile to out and lse; whole warps.
template <class T, int kValueDim>
__device__ __forceinline__ void write_rows(const AttentionParams& p, const QueryTile& query_tile, int head,
                                           int row, RowSums<kValueDim>& found) {
  // Blocks of 8 columns, which are stored four at a time; the last time, two if kValueDim is no multiple
  // of 32.
  constexpr int kBlocks = kValueDim / 8;
  constexpr int kFours = (kBlocks + 3) / 4;
  static_assert(kBlocks % 2 == 0);
  const int quarter = static_cast<int>(threadIdx.x) % 4;
  T* to[2];
  bool is_row[2];
  float inverse[2];
  const bool is_empty[2] = {found.is_empty(0), found.is_empty(1)};
  if (__any_sync(~0u, is_empty[0] || is_empty[1])) found.clear_empty();
  const TargetPlace place = target_place();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    is_row[h] = row + 8 * h < query_tile.num_rows;
    inverse[h] = is_empty[h] ? 0.0f : __fdividef(1.0f, found.sum[h]);
    const int r = ::min(row + 8 * h, query_tile.num_rows - 1);
    const std::int64_t token = query_tile.token(p, r) - p.first_out_token;
    const std::int64_t query_head = query_tile.query_head(p, head, r);
    to[h] = static_cast<T*>(p.out) + out_row(p, place, token, query_head);
    if (is_row[h] && quarter == 0) {
      store_lse(p, place, token, query_head,
                is_empty[h] ? -kInfinity : (found.max[h] + __log2f(found.sum[h])) * kLn2);
    }
  }
  const auto pairs_of = [&](int h, int four, unsigned(&words)[4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      words[k] = 0;
      if (four * 4 + k >= kBlocks) continue;
      const float* pair = &found.d[4 * (four * 4 + k) + 2 * h];
      words[k] = pack<T>(pair[0] * inverse[h], pair[1] * inverse[h]);
    }
  };
  const std::uint64_t addresses =
      reinterpret_cast<std::uint64_t>(to[0]) | reinterpret_cast<std::uint64_t>(to[1]);
  const auto store_rows = [&](const auto& store) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int four = 0; four < kFours; ++four) {
        unsigned words[4];
        pairs_of(h, four, words);
        transpose_words(words);
        const int column = (four * 4 + quarter) * 8;
        if (is_row[h] && (kBlocks % 4 == 0 || column < kValueDim)) store(to[h], column, words);
      }
    }
  };
  if (__all_sync(~0u, addresses % 16 == 0)) {  // addresses of lines are
    if (p.sends_lines) {
      store_rows([&](T* row, int column, const unsigned(&words)[4]) {
        store_line(row + 2 * column, words[0], words[1], place.count);
        store_line(row + 2 * column + 8, words[2], words[3], place.count);
      });
    } else {
      store_rows([](T* row, int column, const unsigned(&words)[4]) {
        *reinterpret_cast<uint4*>(row + column) = uint4{words[0], words[1], words[2], words[3]};
      });
    }
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      unsigned words[4];
      pairs_of(h, four, words);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        auto* at = reinterpret_cast<std::uint16_t*>(to[h]) + (four * 4 + k) * 8 + quarter * 2;
        if (is_row[h] && four * 4 + k < kBlocks) {
          at[0] = static_cast<std::uint16_t>(words[k]);
          at[1] = static_cast<std::uint16_t>(words[k] >> 16);
        }
      }
    }
  }
}

/// Writes rows `row` and row + 8 of this block's KV split to the workspace.
template <int kValueDim>
__device__ __forceinline__ void write_partials(const SplitPartials& to, int row, int num_rows,
                                               const RowSums<kValueDim>& found) {
  const int quarter = static_cast<int>(threadIdx.x) % 4;
  const int i = static_cast<int>(blockIdx.x) - to.splits.first_block;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + 8 * h;
    if (r >= num_rows) continue;
    auto* out = reinterpret_cast<float2*>(to.out(i, r, 0)) + quarter;
#pragma unroll
    for (int j = 0; j < kValueDim / 8; ++j)
      __stcg(out + 4 * j, float2{found.d[4 * j + 2 * h], found.d[4 * j + 2 * h + 1]});
    if (quarter == 0) {
      __stcg(to.max(i, r), found.max[h]);
      __stcg(to.sum(i, r), found.sum[h]);
    }
  }
}

inline constexpr int kWarpRows = 2;    ///< Rows of which a warp combines the splits at a time.
inline constexpr int kWarpSplits = 4;  ///< Splits that it loads at a time; there are seldom more.

/// Combines the split partials of rows [first_row, first_row + kWarpRows) into out and lse; one warp. Row by
/// row (combine_row) a warp would wait for memory more often.
__device__ inline void combine_rows(const SplitPartials& from, const QueryTile& query_tile, int head,
                                    int first_row) {
  const AttentionParams& p = from.p;
  const int count = from.splits.count;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int last_row = query_tile.num_rows - 1;
  // Lane i * kWarpRows + r looks after row r of split i.
  const int lane_row = ::min(first_row + lane % kWarpRows, last_row);
  const int lane_split = lane / kWarpRows;
  float top = -kInfinity;
  for (int i = lane_split; i < count; i += kWarp / kWarpRows) top = fmaxf(top, __ldcg(from.max(i, lane_row)));
#pragma unroll 1
  for (int first = 0; first < p.value_dim; first += kWarp * kLaneColumns) {
    const int column = first + lane * kLaneColumns;
    float4 totals[kWarpRows] = {};
    float sum = 0.0f;
#pragma unroll 1
    for (int c = 0; c < count; c += kWarpSplits) {
      float4 parts[kWarpRows][kWarpSplits];
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
        for (int i = 0; i < kWarpSplits; ++i)
          parts[r][i] = __ldcg(from.out(::min(c + i, count - 1), ::min(first_row + r, last_row),
                                        column < p.value_dim ? column : 0));
      }
      const bool is_split = lane_split < kWarpSplits && c + lane_split < count;
      const float lane_max = is_split ? __ldcg(from.max(c + lane_split, lane_row)) : -kInfinity;
      const float lane_sum = is_split ? __ldcg(from.sum(c + lane_split, lane_row)) : 0.0f;
#pragma unroll
      for (int offset = kWarpRows; offset < kWarp; offset *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
      const float weight = exp2f(lane_max - (top == -kInfinity ? 0.0f : top));
      sum = fmaf(weight, lane_sum, sum);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
        for (int i = 0; i < kWarpSplits; ++i)
          add_weighted(totals[r], __shfl_sync(~0u, weight, i * kWarpRows + r), parts[r][i]);
      }
    }
#pragma unroll
    for (int offset = kWarpRows; offset < kWarp; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      if (first_row + r > last_row) break;
      const RowWriter<> writer(p, query_tile, head, first_row + r, __shfl_sync(~0u, top, r),
                               __shfl_sync(~0u, sum, r));
      if (column < p.value_dim) writer.write(column, totals[r]);
    }
  }
}

/// combine_splits() for many rows.
template <class Flag, class Meet>
__device__ __forceinline__ void combine_wave_splits(const SplitPartials& all, const QueryTile& query_tile,
                                                    int u, int head, int thread, int threads, Flag& is_last,
                                                    const Meet& meet) {
  count_split(
      all, [&] { return all.counter(u, head); }, thread, is_last, meet);
  if (!is_last) return;
#pragma unroll 1
  for (int row = thread / kWarp * kWarpRows; row < query_tile.num_rows; row += threads / kWarp * kWarpRows)
    combine_rows(all, query_tile, head, row);
}

/// Combines the splits of one row that attend_waves() left, by one warp.
template <int kThreads>
__device__ __forceinline__ void combine_row_later(const AttentionParams& p) {
  const int warp = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) / kWarp;
  const int row = warp % p.query_tile_rows;
  const int item = warp / p.query_tile_rows;
  if (item >= p.num_query_tiles * p.kv_heads) return;
  const SplitQueryTile tile = p.split_tiles[item];
  if (tile.splits.count == 1 || row >= tile.query_tile.num_rows) return;
  combine_row({p, tile.splits}, tile.query_tile, item % p.kv_heads, row, 0, p.value_dim);
}

/// Combines the splits of all rows, a warp a row, for launches of few query tiles and heads: one block for
/// each of these would wait for memory row by row.
template <int kThreads>
__global__ __launch_bounds__(kThreads) void combine_waves_later(const __grid_constant__ AttentionParams p) {
  follow_previous(p);
  __syncthreads();
  combine_row_later<kThreads>(p);
}

}  // namespace helix::cuda
