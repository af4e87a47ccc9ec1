// SPDX-License-Identifier: Apache-2.0
// Matrix products on one thread: activation rows against some rows of a weight matrix as the checkpoint
// stores it. One task; its kernels; how they want the activations.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/dtype.hpp>

#include "cpu/amx.hpp"

namespace helix::cpu::linear {

/// Activation rows that meet weights at once: more would leave too few registers for weights.
inline constexpr std::int64_t kBlockRows = 4;
/// Activation rows that a tile takes.
inline constexpr std::int64_t kTileRows = amx::kRows;
/// Bytes that a column of kTileRows rows of f32 takes when packed for tiles.
inline constexpr std::int64_t kTileBytes = 3 * kTileRows * 2;
/// Elements to which packed rows are padded with zeros: what a kernel takes of a row at a time, or a
/// multiple.
inline constexpr std::int64_t kColumnStep = 32;

/// Rows that `num_rows` take when packed: blocks of kBlockRows, the last one of 1, 2 or kBlockRows.
constexpr std::int64_t packed_rows(std::int64_t num_rows) {
  return num_rows % kBlockRows == 3 ? num_rows + 1 : num_rows;
}

/// Columns that `cols` take when packed.
constexpr std::int64_t packed_cols(std::int64_t cols) {
  return (cols + kColumnStep - 1) / kColumnStep * kColumnStep;
}

/// What multiplies.
enum class Kernel : std::uint8_t {
  vectors,    ///< f32 vectors; takes packed f32.
  bf16_dots,  ///< Dot products of bf16 pairs; bf16 weights; takes packed bf16.
  tiles,      ///< Tile registers; bf16 weights; takes f32 packed for them.
  bf16_tiles  ///< Tile registers; bf16 weights; takes bf16 packed for them.
};

/// How a kernel of few rows reads its weights. All ways give the same bits.
enum class Reading : std::uint8_t {
  /// Some rows side by side, while the next ones are asked for in the order of their addresses; on tile
  /// registers, while the beginnings of the next ones are.
  ahead,
  ahead_pairs,  ///< As ahead, every other cache line: hardware brings its neighbour.
  plain,        ///< Some rows side by side.
  near,         ///< Short runs of 64 rows in turn, each asked for shortly before. Vectors only.
  /// Row after row, each line asked for some KiB before it is read, where L1 holds all activations; else as
  /// strips. Vectors and bf16_dots.
  rows,
  /// Strips of columns, each so narrow that L1 holds two blocks of its activations: of one strip weight rows
  /// two at a time, each line asked for some rows before. Vectors and bf16_dots.
  strips,
  rows2,  ///< Row after row, two lines at a time. bf16_dots with one activation row only.
  rows4   ///< The same, four lines at a time.
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
  bool goes_on = false;  ///< Whether the rows behind these are asked for at the end: the thread's next ones.
  const void* bias = nullptr;  ///< the first of the weight rows' biases, or null
  DType bias_dtype = DType::f32;
  float* out = nullptr;  ///< [num_rows, num_weight_rows]
  std::int64_t out_stride = 0;
  bool accumulate = false;
};

/// Computes `task`. The bits of an output depend on its two rows and the kernel alone, neither on where the
/// task begins nor on num_rows. Allocates nothing.
void multiply(const Task& task);

/// The same without bias, each on its own kernel. cols is at least 1.
void multiply_vectors(const Task& task);
void multiply_bf16_dots(const Task& task);
void multiply_tiles(const Task& task);
void multiply_bf16_tiles(const Task& task);

/// What tile registers ask for while they multiply weight rows [first, + count) of `task` over columns from
/// `begin` on, `chunk` at a time: how each row of what they read next begins.
amx::Ahead next_weights(const Task& task, std::int64_t first, std::int64_t count, std::int64_t begin,
                        std::int64_t chunk);

/// Whether this machine multiplies pairs of bf16 into f32 sums. HELIX_BF16_DOTS=0 in the environment says no.
/// Decided at the first call.
bool has_bf16_dots() noexcept;

/// Packs rows [first, first + count) of `in`, a block of `in`'s rows from a multiple of kBlockRows on, for
/// the vectors' products with weights of type `weight`. `to`: the place of the block, [packed_rows(count),
/// packed_cols(cols)].
void pack_for_vectors(DType weight, const float* in, std::int64_t in_stride, std::int64_t count,
                      std::int64_t cols, float* to);
/// The same for bf16_dots, which rounds to the nearest.
void pack_for_bf16_dots(const float* in, std::int64_t in_stride, std::int64_t count, std::int64_t cols,
                        bf16* to);
/// The same for tiles, for blocks of kTileRows rows that take kTileBytes a packed column.
void pack_for_tiles(const float* in, std::int64_t in_stride, std::int64_t count, std::int64_t cols, bf16* to);
/// The same for bf16_tiles, for blocks of kTileRows rows: [kTileRows, packed_cols(cols)], rounded, of missing
/// rows zeros.
void pack_for_bf16_tiles(const float* in, std::int64_t in_stride, std::int64_t count, std::int64_t cols,
                         bf16* to);

}  // namespace helix::cpu::linear
