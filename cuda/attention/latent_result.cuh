// SPDX-License-Identifier: Apache-2.0
// How the result rows of a part of a work item over latents leave their block: as rows of out, or as split
// partials, which a launch of its own combines.
//
// A pair of blocks writes 128 rows of 512 columns of split partials for a query tile, 17 MB a launch, which
// all go to the L2 cache at once and come back at once: in f32 that took 8 us of 45 (8 sequences of 8192
// tokens). So they are f16, relative to a max of the row that makes its largest value end below 2^15: 11
// bits, where out has 8 or 11.
#pragma once

#include <cstdint>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/latent_block.cuh"
#include "cuda/runtime/convert.cuh"

namespace helix::cuda::latent {

inline constexpr int kPieceColumns = 8;  ///< Columns of 16 bytes of 16-bit values.

/// How a row of a part ends.
struct RowEnd {
  float max;     ///< Largest score, base 2; for split partials, what sum and values are relative to.
  float sum;     ///< Sum of the weights.
  float factor;  ///< Result row = sums of weighted values * factor.
};

/// The RowEnd of a row of out.
__device__ __forceinline__ RowEnd whole_row(float max, float sum) {
  const bool is_empty = !(max > -kInfinity) && sum == 0.0f;
  return {max, sum, is_empty ? 0.0f : 1.0f / sum};
}

/// The RowEnd of a row of split partials whose largest sum of weighted values is `most`. Values and sum are
/// multiplied by 2^up, and `up` is taken off the max, which keeps their bits. `up` is at most kMaxUp, so that
/// a split whose values are all zero keeps its weight beside others.
__device__ __forceinline__ RowEnd split_row(float max, float sum, float most) {
  constexpr int kTop = 14;
  constexpr int kMaxUp = 40;
  const int exponent = static_cast<int>(__float_as_uint(most) >> 23) - 127;
  const int up = ::min(kTop - exponent, kMaxUp);
  const float factor = __uint_as_float(static_cast<unsigned>(127 + up) << 23);
  return {max - static_cast<float>(up), sum * factor, factor};
}

/// Whether the part is one of several splits of its query tile.
__device__ __forceinline__ bool is_split(const Part& part) {
  return uniform(part.splits.count) > 1;
}
__device__ __forceinline__ RowEnd end_of_row(bool is_split, float max, float sum, float most) {
  return is_split ? split_row(max, sum, most) : whole_row(max, sum);
}

/// Packs two values of a row to the type in which they leave the block. A branch around all of them took 0.5
/// us more.
template <class T>
__device__ __forceinline__ unsigned pack_result(bool is_split, float x, float y) {
  return is_split ? pack<f16>(x, y) : pack<T>(x, y);
}

/// Address of columns of a row of split `i`, in [places, query_tile_rows, kLatentColumns].
__device__ __forceinline__ uint4* partial_piece(const SplitPartials& of, int i, int row, int column) {
  return reinterpret_cast<uint4*>(reinterpret_cast<std::uint16_t*>(of.p.partial_out) +
                                  (of.place(i) * of.p.query_tile_rows + row) * kLatentColumns + column);
}

/// Address of row `row` of a query tile in out; writes its lse.
__device__ __forceinline__ std::byte* begin_row(const AttentionParams& p, const QueryTile& query_tile,
                                                int row, const RowEnd& end, const TargetPlace& place) {
  const std::int64_t token = query_tile.token(p, row) - p.first_out_token;
  const std::int64_t head = query_tile.query_head(p, 0, row);
  store_lse(p, place, token, head, end.factor == 0.0f ? -kInfinity : (end.max + log2f(end.sum)) * kLn2);
  return static_cast<std::byte*>(p.out) + out_row(p, place, token, head) * 2;
}

/// Writes this lane's kPieceColumns columns, from `column` on, of a row of out that consists of lines with
/// `count`, or is not aligned by 16 bytes.
__device__ __forceinline__ void write_pieces(const AttentionParams& p, std::byte* row, int column,
                                             uint4 piece, std::uint32_t count) {
  auto* const to = reinterpret_cast<std::uint16_t*>(row);
  if (p.sends_lines) {
    store_line(to + 2 * column, piece.x, piece.y, count);
    store_line(to + 2 * (column + kLaneColumns), piece.z, piece.w, count);
    return;
  }
  const unsigned words[] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int k = 0; k < kPieceColumns; ++k)
    to[column + k] = static_cast<std::uint16_t>(words[k / 2] >> k % 2 * 16);
}

/// Writes up to kRows rows of a part; each consumer group writes its own columns, a warp one row at a time.
/// staged(r) returns this lane's kPieceColumns columns of row `r`; `ends` are in shared memory, as is room
/// for the addresses of rows. The block that has the query tile's first KV tile also records the tile for the
/// combine's launch.
template <int kBlocks, int kRows, class Staged>
__device__ __forceinline__ void write_rows(const AttentionParams& p, const Part& part, const RowEnd* ends,
                                           std::byte** places, const Staged& staged) {
  constexpr int kWarpsOfGroup = kWarpGroup / kWarp;
  constexpr int kPieceBytes = sizeof(uint4);
  const int thread = static_cast<int>(threadIdx.x);
  const int group = thread / kWarpGroup;
  const int warp = thread % kWarpGroup / kWarp;
  const int column = group * kGroupColumns + thread % kWarp * kPieceColumns;
  const int first_row = block_of_item<kBlocks>() * kGroupRows;
  const int rows = uniform(::min(kRows, part.span.query_tile.num_rows - first_row));
  if (is_split(part)) {
    const SplitPartials partials{p, part.splits};
    const int split = scheduled_block<kBlocks>() - part.splits.first_block;
    uint4* to = partial_piece(partials, split, first_row + warp, column);
#pragma unroll 4
    for (int r = warp; r < rows; r += kWarpsOfGroup) {
      __stcg(to, staged(r));
      to += kWarpsOfGroup * kLatentColumns / kPieceColumns;
    }
    if (thread < rows) {
      const RowEnd end = ends[thread];
      __stcg(partials.max(split, first_row + thread), end.max);
      __stcg(partials.sum(split, first_row + thread), end.sum);
    }
  } else {
    const TargetPlace target = read_target_place(p);  // no shared memory is left for target_place()
    if (thread < rows)
      places[thread] = begin_row(p, part.span.query_tile, first_row + thread, ends[thread], target);
    group_sync(kAllConsumers, kConsumers);
    if (!p.sends_lines && p.out_alignment == kPieceBytes) {
#pragma unroll 2
      for (int r = warp; r < rows; r += kWarpsOfGroup)
        *reinterpret_cast<uint4*>(places[r] + column * 2) = staged(r);
    } else {
#pragma unroll 1
      for (int r = warp; r < rows; r += kWarpsOfGroup)
        write_pieces(p, places[r], column, staged(r), target.count);
    }
  }
  __syncwarp();  // without it the compiler synchronises the warps before each product of the loops
  if (part.is_first && block_of_item<kBlocks>() == 0 && threadIdx.x == 0)
    p.split_tiles[part.query_tile] = {part.span.query_tile, part.splits};
}

}  // namespace helix::cuda::latent
