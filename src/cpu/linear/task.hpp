// SPDX-License-Identifier: Apache-2.0
// Matrix products on one thread: activation rows times some rows of a weight matrix, as the checkpoint stores
// it. Declares a task, its kernels, and the packing of activations for them.
#pragma once

#include <cstdint>

#include <helix/dtype.hpp>
#include <helix/integers.hpp>

#include "cpu/amx.hpp"

namespace helix::cpu::linear {

/// Activation rows multiplied at once; more would leave too few registers for weights.
inline constexpr std::int64_t kBlockRows = 4;
/// Activation rows of a tile.
inline constexpr std::int64_t kTileRows = amx::kRows;
/// Columns that tile registers process at once, after which sums are folded; activations of 16 f32 rows take
/// 192 KB. Hardware prefetchers follow the 32 weight rows that are read side by side: with 512 columns a core
/// reaches 85 % of its bandwidth, with 1024 92 %.
inline constexpr std::int64_t kTileChunk = 2048;
/// Bytes per column of kTileRows f32 rows when packed for tiles.
inline constexpr std::int64_t kTileBytes = 3 * kTileRows * 2;
/// Packed rows are zero-padded to a multiple of this many elements: what a kernel reads of a row at a time,
/// or a multiple.
inline constexpr std::int64_t kColumnStep = 32;

/// Rows that `num_rows` rows occupy when packed: blocks of kBlockRows, the last one of 1, 2 or kBlockRows.
constexpr std::int64_t packed_rows(std::int64_t num_rows) {
  return num_rows % kBlockRows == 3 ? num_rows + 1 : num_rows;
}

/// Columns that `cols` columns occupy when packed.
constexpr std::int64_t packed_cols(std::int64_t cols) {
  return round_up(cols, kColumnStep);
}

/// The kernel that multiplies.
enum class Kernel : std::uint8_t {
  vectors,    ///< f32 vectors; takes packed f32.
  bf16_dots,  ///< Dot products of bf16 pairs; bf16 weights; takes packed bf16.
  tiles,      ///< Tile registers; bf16 weights; takes f32 packed for them.
  bf16_tiles  ///< Tile registers; bf16 weights; takes bf16 packed for them.
};

/// How a kernel of few rows reads its weights. All ways give the same bits.
enum class Reading : std::uint8_t {
  /// Reads some rows side by side and prefetches the next ones in address order; on tile registers, only the
  /// beginnings of the next rows.
  ahead,
  ahead_pairs,  ///< As ahead, but every other line: hardware fetches its neighbour.
  plain,        ///< Some rows side by side.
  near,         ///< Runs of 64 rows in turn, each prefetched just before. Vectors only.
  /// If all activations fit in L1, reads row after row and prefetches each line some KiB ahead; else as
  /// strips. Vectors and bf16_dots.
  rows,
  /// Strips of columns, narrow enough that L1 holds two blocks of their activations. Reads a strip's weight
  /// rows two at a time and prefetches each line some rows ahead. Vectors and bf16_dots.
  strips,
  strips_ahead,  ///< As strips, but prefetches the next group of weight rows in address order.
  rows2,         ///< Row after row, two lines at a time. bf16_dots with one activation row only.
  rows4          ///< As rows2, four lines at a time.
};

/// out[r, n] = in[r] . weight[n] (+ bias[n]) (+ out[r, n]) for num_weight_rows rows n.
struct Task {
  Kernel kernel = Kernel::vectors;
  Reading reading = Reading::plain;
  const void* in = nullptr;  ///< Packed rows.
  std::int64_t num_rows = 0;
  const void* weight = nullptr;  ///< the first of the weight rows, dense
  DType dtype = DType::f32;
  std::int64_t cols = 0;
  std::int64_t num_weight_rows = 0;
  bool goes_on = false;        ///< Whether to prefetch the following rows, the thread's next task.
  const void* bias = nullptr;  ///< the first of the weight rows' biases, or null
  DType bias_dtype = DType::f32;
  float* out = nullptr;  ///< [num_rows, num_weight_rows]
  std::int64_t out_stride = 0;
  bool accumulate = false;
};

/// Computes `task`. The bits of an output depend only on its two rows and the kernel, not on where the task
/// begins or on num_rows. Allocates nothing.
void multiply(const Task& task);

/// multiply() without bias, for each kernel. cols is at least 1.
void multiply_vectors(const Task& task);
void multiply_bf16_dots(const Task& task);
void multiply_tiles(const Task& task);
void multiply_bf16_tiles(const Task& task);

/// What tile registers prefetch while they multiply weight rows [first, + count) of `task` over a chunk of
/// columns from `begin` on: the beginnings of the rows that they read next.
amx::RowsAhead next_weights(const Task& task, std::int64_t first, std::int64_t count, std::int64_t begin);

/// Whether this machine has dot products of bf16 pairs with f32 sums. HELIX_BF16_DOTS=0 in the environment
/// disables them. Decided at the first call.
bool has_bf16_dots() noexcept;

/// Packs rows [first, first + count) of `in`, a block of rows that begins at a multiple of kBlockRows, for
/// vector products with weights of type `weight`. `to`: the block's place, [packed_rows(count),
/// packed_cols(cols)].
void pack_for_vectors(DType weight, const float* in, std::int64_t in_stride, std::int64_t count,
                      std::int64_t cols, float* to);
/// As above for bf16_dots; rounds to nearest.
void pack_for_bf16_dots(const float* in, std::int64_t in_stride, std::int64_t count, std::int64_t cols,
                        bf16* to);
/// As above for tiles, in blocks of kTileRows rows that take kTileBytes per packed column.
void pack_for_tiles(const float* in, std::int64_t in_stride, std::int64_t count, std::int64_t cols, bf16* to);
/// As above for bf16_tiles, in blocks of kTileRows rows: [kTileRows, packed_cols(cols)], rounded; missing
/// rows are zeros.
void pack_for_bf16_tiles(const float* in, std::int64_t in_stride, std::int64_t count, std::int64_t cols,
                         bf16* to);

}  // namespace helix::cpu::linear
