// SPDX-License-Identifier: Apache-2.0
// The order in which packed activation rows meet weight rows, whatever multiplies them.
//
// Weights are read once. A block of them is small enough for L2, where it waits for all chunks of columns
// and blocks of activations; meanwhile the next block is asked for line by line in the order of addresses,
// which reads 95 % of what a plain stream does where blocks that are only read reach 65 to 85.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <helix/integers.hpp>

#include "cpu/linear/task.hpp"

namespace helix::cpu::linear {

/// Cache lines that a kernel asks for, step by step.
struct Ahead {
  const char* next = nullptr;
  std::int64_t line_bytes = 0;  ///< From one line that is asked for to the next.
};

/// One product of a group of weight rows with a block of activation rows over a chunk of columns.
template <class T>
struct Tile {
  const T* weight;
  std::int64_t stride;
  std::int64_t last;  ///< Index of the last weight row; further ones repeat it.
  const void* rows;   ///< Packed.
  std::int64_t cols;
  float* dots;  ///< [weight row][R]
  Ahead ahead;
};

/// Weight rows that a product of a strip takes at once.
inline constexpr int kStripGroup = 2;

/// The products of some weight rows with one or two blocks of activation rows over a strip of columns.
template <class T>
struct Strip {
  const T* weight = nullptr;
  std::int64_t stride = 0;
  std::int64_t count = 0;        ///< Weight rows.
  std::int64_t ahead_rows = 0;   ///< What is asked for meanwhile: the row so many rows on, if there is one,
  std::int64_t next_offset = 0;  ///< else the one that lies so many elements behind.
  const void* rows[2] = {};      ///< Packed, of each block.
  std::int64_t cols = 0;
  bool is_first = false;  ///< Of its chunk of columns, so that there are no sums yet.
  bool is_last = false;   ///< Of its chunk, whose dots are wanted.
  float* sums = nullptr;  ///< [count, rounded up to kStripGroup][R] vectors, between strips of a chunk.
  float* dots = nullptr;  ///< [count, rounded up to kStripGroup][R] and three more.

  /// What is asked for while weight row `n` is multiplied.
  const T* ahead(std::int64_t n) const {
    return weight + n * stride + (n + ahead_rows < count ? ahead_rows * stride : next_offset);
  }
  /// From weight row `n` to the one behind, or to itself if it is the last.
  std::int64_t second(std::int64_t n) const { return n + 1 < count ? stride : 0; }
};

/// Adds the dots of a tile to `out`, or puts them there.
template <int R>
void add_dots(const Task& task, const float* dots, std::int64_t row, std::int64_t first, std::int64_t count,
              bool is_first) {
  const auto valid = static_cast<int>(std::min<std::int64_t>(R, task.num_rows - row));
  for (int r = 0; r < valid; ++r) {
    float* out = task.out + (row + r) * task.out_stride + first;
    for (std::int64_t n = 0; n < count; ++n) out[n] = (is_first ? 0.0f : out[n]) + dots[n * R + r];
  }
}

/// Calls use.operator()<R>(row) for each packed block of activations, of R rows from `row` on.
template <class Use>
void for_each_row_block(std::int64_t num_rows, const Use& use) {
  for (std::int64_t row = 0; row < num_rows; row += kBlockRows) {
    const std::int64_t rest = num_rows - row;
    if (rest == 1) {
      use.template operator()<1>(row);
    } else if (rest == 2) {
      use.template operator()<2>(row);
    } else {
      use.template operator()<4>(row);
    }
  }
}

/// Walks one task. `Kernel` has: Weight, the stored type; Row, the packed one; kChunk, columns after which
/// sums are folded; kGroup<R>, weight rows at once; kStep, columns of a step; kSumFloats, floats of a vector
/// of sums; kReadsAhead, whether it knows Reading::ahead, Reading::rows and Reading::strips; multiply<R,
/// kLines>(Tile), which asks for kLines lines a step: 0 or, where it reads ahead, 1, kGroup<R> or
/// half of that, rounded up; multiply_row<R>(Tile, ahead), one weight row, which asks for what lies `ahead`
/// elements behind each step that it reads; and multiply_strip<R0, R1>(Strip), blocks of R0 and R1 rows.
template <class Kernel>
class BlockWalk {
  using Weight = typename Kernel::Weight;
  using Row = typename Kernel::Row;

 public:
  explicit BlockWalk(const Task& task)
      : task_(task),
        weight_(static_cast<const Weight*>(task.weight)),
        row_blocks_((task.num_rows + kBlockRows - 1) / kBlockRows) {}

  void run() {
    if constexpr (Kernel::kReadsAhead) {
      if (task_.reading == Reading::rows && are_near()) return multiply_rows();
      if (task_.reading == Reading::rows || task_.reading == Reading::strips) return multiply_strips();
    }
    const std::int64_t rows = block_weight_rows();
    for (std::int64_t first = 0; first < task_.num_weight_rows; first += rows)
      multiply_block(first, std::min(rows, task_.num_weight_rows - first), rows);
  }

 private:
  /// Blocks of activations beyond which weights take too small a part of the time to be asked for.
  static constexpr std::int64_t kMaxBlocksAhead = 16;

  /// Packed activations that stay in L1 beside the weights that pass by.
  static constexpr std::int64_t kNearBytes = 32 << 10;
  /// How long before it is read Reading::rows asks for a line.
  static constexpr std::int64_t kRowsAheadBytes = 8 << 10;
  /// Weight rows of which a strip is multiplied before the next one.
  static constexpr std::int64_t kStripRows = 48;
  /// How long before it is read Reading::strips asks for a line.
  static constexpr std::int64_t kStripAheadBytes = 12 << 10;
  /// Activations of a strip: a third of L1, through which weights and sums pass too.
  static constexpr std::int64_t kStripBytes = 16 << 10;

  /// Columns of a strip of R activation rows, a power of two of them a chunk.
  template <std::int64_t R>
  static constexpr std::int64_t strip_cols() {
    std::int64_t cols = Kernel::kChunk;
    while (cols * R * static_cast<std::int64_t>(sizeof(Row)) > kStripBytes) cols /= 2;
    return cols;
  }

  /// Up to two blocks of activations memory sets the pace, and a block of weights that is small leaves L2 to
  /// the next one; beyond, activations come from L2 too, once a block.
  std::int64_t block_weight_rows() const {
    if (task_.num_rows == 1) return Kernel::template kGroup<1>;
    if (task_.num_rows == 2) return Kernel::template kGroup<2>;
    return (row_blocks_ <= 2 ? 2 : 8) * Kernel::template kGroup<4>;
  }

  bool reads_ahead() const {
    return Kernel::kReadsAhead && row_blocks_ <= kMaxBlocksAhead &&
           (task_.reading == Reading::ahead || task_.reading == Reading::ahead_pairs);
  }

  void multiply_block(std::int64_t first, std::int64_t count, std::int64_t next) {
    if (reads_ahead() && (first + next < task_.num_weight_rows || task_.goes_on))
      ahead_.next = reinterpret_cast<const char*>(weight_ + (first + next) * task_.cols);
    else
      ahead_.next = nullptr;
    for_each_chunk([&](std::int64_t begin, std::int64_t cols) {
      for_each_row_block(task_.num_rows, [&]<int R>(std::int64_t row) {
        multiply_groups<R>(row, first, count, begin, cols);
      });
    });
  }

  /// Calls use(begin, cols) for each chunk of columns.
  template <class Use>
  void for_each_chunk(const Use& use) const {
    for (std::int64_t begin = 0; begin < task_.cols; begin += Kernel::kChunk)
      use(begin, std::min<std::int64_t>(Kernel::kChunk, task_.cols - begin));
  }

  /// Whether one block holds all activations, and L1 all of their columns.
  bool are_near() const {
    return row_blocks_ == 1 &&
           packed_rows(task_.num_rows) * packed_cols(task_.cols) * static_cast<std::int64_t>(sizeof(Row)) <=
               kNearBytes;
  }

  void multiply_rows() {
    for_each_row_block(task_.num_rows, [&]<int R>(std::int64_t) {
      for (std::int64_t n = 0; n < task_.num_weight_rows; ++n)
        for_each_chunk([&](std::int64_t begin, std::int64_t cols) { multiply_row<R>(n, begin, cols); });
    });
  }

  /// All rows of activations with weight row `n`.
  template <int R>
  void multiply_row(std::int64_t n, std::int64_t begin, std::int64_t cols) {
    constexpr std::int64_t kAhead = kRowsAheadBytes / static_cast<std::int64_t>(sizeof(Weight));
    alignas(64) float dots[kBlockRows];
    const auto* rows = static_cast<const Row*>(task_.in) + begin * R;
    Kernel::template multiply_row<R>({weight_ + n * task_.cols + begin, task_.cols, 0, rows, cols, dots, {}},
                                     kAhead);
    add_dots<R>(task_, dots, 0, n, 1, begin == 0 && !task_.accumulate);
  }

  void multiply_strips() {
    for (std::int64_t first = 0; first < task_.num_weight_rows; first += kStripRows) {
      const std::int64_t count = std::min(kStripRows, task_.num_weight_rows - first);
      for_each_chunk([&](std::int64_t begin, std::int64_t cols) {
        for (std::int64_t row = 0; row < task_.num_rows; row += 2 * kBlockRows)
          multiply_strips_of_rows(row, first, count, begin, cols);
      });
    }
  }

  /// One or two blocks of activations, from `row` on.
  void multiply_strips_of_rows(std::int64_t row, std::int64_t first, std::int64_t count, std::int64_t begin,
                               std::int64_t cols) {
    const std::int64_t num_rows = std::min(task_.num_rows - row, 2 * kBlockRows);
    if (num_rows <= kBlockRows) {
      return for_each_row_block(
          num_rows, [&]<int R0>(std::int64_t) { multiply_strips<R0, 0>(row, first, count, begin, cols); });
    }
    for_each_row_block(num_rows - kBlockRows, [&]<int R1>(std::int64_t) {
      multiply_strips<kBlockRows, R1>(row, first, count, begin, cols);
    });
  }

  template <int R0, int R1>
  void multiply_strips(std::int64_t row, std::int64_t first, std::int64_t count, std::int64_t begin,
                       std::int64_t cols) {
    constexpr std::int64_t R = R0 + R1;
    constexpr std::int64_t kCols = strip_cols<R>();
    constexpr std::int64_t kRowBytes = kCols * static_cast<std::int64_t>(sizeof(Weight));
    constexpr std::int64_t kAhead = std::max(kStripAheadBytes / kRowBytes, std::int64_t{2}) / 2 * 2;
    static_assert(kStripGroup == 2 && kAhead < kStripRows && Kernel::kChunk % kCols == 0);
    alignas(64) float sums[static_cast<std::size_t>(kStripRows * R * Kernel::kSumFloats)];
    alignas(64) float dots[static_cast<std::size_t>(kStripRows * R) + 3];
    const auto* rows = static_cast<const Row*>(task_.in) + row * packed_cols(task_.cols);
    for (std::int64_t at = begin; at < begin + cols; at += kCols) {
      const std::int64_t end = std::min(at + kCols, begin + cols);
      Strip<Weight> strip;
      strip.weight = weight_ + first * task_.cols + at;
      strip.stride = task_.cols;
      strip.count = count;
      strip.rows[0] = rows + at * R0;
      strip.rows[1] = rows + kBlockRows * packed_cols(task_.cols) + at * R1;
      strip.cols = end - at;
      strip.is_first = at == begin;
      strip.is_last = end == begin + cols;
      strip.sums = sums;
      strip.dots = dots;
      if (row == 0) {
        // Later rows find the weights in L2. Behind the last one comes the first one of the next strip, or of
        // the next rows.
        const bool is_end = end == task_.cols;
        const std::int64_t next =
            is_end ? kAhead * task_.cols - at : (kAhead - count) * task_.cols + end - at;
        const bool has_next = !is_end || first + count < task_.num_weight_rows || task_.goes_on;
        strip.ahead_rows = kAhead;
        strip.next_offset = has_next ? next : 0;
      }
      Kernel::template multiply_strip<R0, R1>(strip);
    }
    add_dots<R>(task_, dots, row, first, count, begin == 0 && !task_.accumulate);
  }

  template <int R>
  void multiply_groups(std::int64_t row, std::int64_t first, std::int64_t count, std::int64_t begin,
                       std::int64_t cols) {
    constexpr std::int64_t kGroup = Kernel::template kGroup<R>;
    constexpr std::int64_t kHalf = (kGroup + 1) / 2;
    alignas(64) float dots[static_cast<std::size_t>(kGroup * R)];
    const auto* rows = static_cast<const Row*>(task_.in) + row * packed_cols(task_.cols) + begin * R;
    const bool is_first = begin == 0 && !task_.accumulate;
    // The bytes of a step's weights, shared among the blocks of activations that pass by them.
    const std::int64_t step_bytes =
        kGroup * Kernel::kStep * static_cast<std::int64_t>(sizeof(Weight)) / row_blocks_;
    const std::int64_t lines =
        step_bytes <= 64                                                                       ? 1
        : row_blocks_ > 1 || task_.reading == Reading::ahead_pairs || step_bytes < kGroup * 64 ? kHalf
                                                                                               : kGroup;
    ahead_.line_bytes = step_bytes / lines;
    for (std::int64_t n = 0; n < count; n += kGroup) {
      const std::int64_t group = std::min(kGroup, count - n);
      const Tile<Weight> tile{
          weight_ + (first + n) * task_.cols + begin, task_.cols, group - 1, rows, cols, dots, ahead_};
      if (ahead_.next == nullptr) {
        Kernel::template multiply<R, 0>(tile);
      } else if constexpr (Kernel::kReadsAhead) {
        if (lines == kGroup) {
          Kernel::template multiply<R, kGroup>(tile);
        } else if (lines == 1) {
          Kernel::template multiply<R, 1>(tile);
        } else {
          Kernel::template multiply<R, kHalf>(tile);
        }
        ahead_.next += step_bytes * (cols / Kernel::kStep);
      }
      add_dots<R>(task_, dots, row, first + n, group, is_first);
    }
  }

  const Task& task_;
  const Weight* weight_;
  std::int64_t row_blocks_;
  Ahead ahead_;
};

}  // namespace helix::cpu::linear
