// SPDX-License-Identifier: Apache-2.0
// The order in which packed activation rows are multiplied with weight rows, for any kernel.
//
// Weights are read from memory once. A block of weights is small enough for L2 and stays there for all chunks
// of columns and blocks of activations. Meanwhile the next block is prefetched line by line in address order,
// which reaches 95 % of a plain stream's bandwidth; blocks that are only read reach 65 to 85.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <helix/integers.hpp>

#include "cpu/linear/task.hpp"

namespace helix::cpu::linear {

/// Cache lines that a kernel prefetches, step by step.
struct LinesAhead {
  const char* next = nullptr;
  std::int64_t line_bytes = 0;  ///< Bytes between consecutive prefetches.
};

/// The product of a group of weight rows with a block of activation rows over a chunk of columns.
template <class T>
struct Tile {
  const T* weight;
  std::int64_t stride;
  std::int64_t last;  ///< Index of the last weight row; further ones repeat it.
  const void* rows;   ///< Packed.
  std::int64_t cols;
  float* dots;  ///< [weight row][R]
  LinesAhead ahead;
};

/// Weight rows that the product of a strip multiplies at once.
inline constexpr int kStripGroup = 2;

/// The products of some weight rows with one or two blocks of activation rows over a strip of columns.
template <class T>
struct Strip {
  const T* weight = nullptr;
  std::int64_t stride = 0;
  std::int64_t count = 0;        ///< Weight rows.
  const T* next = nullptr;       ///< Prefetch this in address order; if null,
  std::int64_t ahead_rows = 0;   ///< the row this many rows ahead, if there is one,
  std::int64_t next_offset = 0;  ///< else what is this many elements after the current row.
  const void* rows[2] = {};      ///< Packed rows of each block.
  std::int64_t cols = 0;
  bool is_first = false;  ///< First strip of its chunk: there are no sums yet.
  bool is_last = false;   ///< Last strip of its chunk: write the dots.
  float* sums = nullptr;  ///< [count, rounded up to kStripGroup][R] vectors, between strips of a chunk.
  float* dots = nullptr;  ///< [count, rounded up to kStripGroup][R] and three more.

  /// What is prefetched while weight row `n` is multiplied.
  const T* ahead(std::int64_t n) const {
    if (next != nullptr) return next + n * cols;
    return weight + n * stride + (n + ahead_rows < count ? ahead_rows * stride : next_offset);
  }
  /// Elements from weight row `n` to the next one, or 0 if it is the last.
  std::int64_t second(std::int64_t n) const { return n + 1 < count ? stride : 0; }
  /// As second(), for what is prefetched.
  std::int64_t second_ahead(std::int64_t n) const { return next == nullptr ? second(n) : cols; }
};

/// Adds the dots of a tile to `out`, or stores them if `is_first`.
template <int R>
void add_dots(const Task& task, const float* dots, std::int64_t row, std::int64_t first, std::int64_t count,
              bool is_first) {
  const auto valid = static_cast<int>(std::min<std::int64_t>(R, task.num_rows - row));
  for (int r = 0; r < valid; ++r) {
    float* out = task.out + (row + r) * task.out_stride + first;
    for (std::int64_t n = 0; n < count; ++n) out[n] = (is_first ? 0.0f : out[n]) + dots[n * R + r];
  }
}

/// Calls use.operator()<R>(row) for each packed block of activations, with R rows starting at `row`.
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

/// Executes one task. `Arithmetic` provides: Weight, the stored type; Row, the packed type; kChunk, columns
/// after which sums are folded; kGroup<R>, weight rows at once; kStep, columns per step; kSumFloats, floats
/// of a vector of sums; kReadsAhead, whether it supports other readings than Reading::plain; kStripRows,
/// weight rows per strip, before the next strip; kStripAheadBytes, how far ahead Reading::strips prefetches;
/// multiply<R, kLines>(Tile), which prefetches kLines lines per step (0, or if it reads ahead 1, kGroup<R> or
/// half of that, rounded up); multiply_row<R>(Tile, ahead) for one weight row, which prefetches `ahead`
/// elements after each step that it reads; and multiply_strip<R0, R1>(Strip), for blocks of R0 and R1 rows.
template <class Arithmetic>
class BlockWalk {
  using Weight = typename Arithmetic::Weight;
  using Row = typename Arithmetic::Row;

 public:
  explicit BlockWalk(const Task& task)
      : task_(task),
        weight_(static_cast<const Weight*>(task.weight)),
        row_blocks_(ceil_div(task.num_rows, kBlockRows)) {}

  void run() {
    if constexpr (Arithmetic::kReadsAhead) {
      if (task_.reading == Reading::rows && are_near()) return multiply_rows();
      if (task_.reading == Reading::rows || task_.reading == Reading::strips ||
          task_.reading == Reading::strips_ahead)
        return multiply_strips();
    }
    const std::int64_t rows = block_weight_rows();
    for (std::int64_t first = 0; first < task_.num_weight_rows; first += rows)
      multiply_block(first, std::min(rows, task_.num_weight_rows - first), rows);
  }

 private:
  /// With more blocks of activations, reading weights takes too small a part of the time for prefetching.
  static constexpr std::int64_t kMaxBlocksAhead = 16;

  /// Most bytes of packed activations that stay in L1 while weights stream past.
  static constexpr std::int64_t kNearBytes = 32 << 10;
  /// How far ahead Reading::rows prefetches a line.
  static constexpr std::int64_t kRowsAheadBytes = 8 << 10;
  static constexpr std::int64_t kStripRows = Arithmetic::kStripRows;
  /// Bytes of a strip's activations: a third of a 48 KiB L1, which weights and sums use too.
  static constexpr std::int64_t kStripBytes = 16 << 10;

  /// Columns of a strip of R activation rows; a chunk has a power of two of strips.
  template <std::int64_t R>
  static constexpr std::int64_t strip_cols() {
    std::int64_t cols = Arithmetic::kChunk;
    while (cols * R * static_cast<std::int64_t>(sizeof(Row)) > kStripBytes) cols /= 2;
    return cols;
  }

  /// Up to two blocks of activations memory is the limit, and a small block of weights leaves room in L2 for
  /// the next one; beyond, activations come from L2 too, once per block of weights.
  std::int64_t block_weight_rows() const {
    if (task_.num_rows == 1) return Arithmetic::template kGroup<1>;
    if (task_.num_rows == 2) return Arithmetic::template kGroup<2>;
    return (row_blocks_ <= 2 ? 2 : 8) * Arithmetic::template kGroup<4>;
  }

  bool reads_ahead() const {
    return Arithmetic::kReadsAhead && row_blocks_ <= kMaxBlocksAhead &&
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
    for (std::int64_t begin = 0; begin < task_.cols; begin += Arithmetic::kChunk)
      use(begin, std::min<std::int64_t>(Arithmetic::kChunk, task_.cols - begin));
  }

  /// Whether all activations are one block, and all of their columns fit in L1.
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

  /// Multiplies all rows of activations with weight row `n`.
  template <int R>
  void multiply_row(std::int64_t n, std::int64_t begin, std::int64_t cols) {
    constexpr std::int64_t kAhead = kRowsAheadBytes / static_cast<std::int64_t>(sizeof(Weight));
    alignas(64) float dots[kBlockRows];
    const auto* rows = static_cast<const Row*>(task_.in) + begin * R;
    Arithmetic::template multiply_row<R>(
        {weight_ + n * task_.cols + begin, task_.cols, 0, rows, cols, dots, {}}, kAhead);
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

  /// Multiplies one or two blocks of activations, starting at `row`.
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
    constexpr std::int64_t kAhead =
        std::max(Arithmetic::kStripAheadBytes / kRowBytes, std::int64_t{2}) / 2 * 2;
    static_assert(kStripGroup == 2 && kAhead < kStripRows && Arithmetic::kChunk % kCols == 0);
    alignas(64) float sums[static_cast<std::size_t>(kStripRows * R * Arithmetic::kSumFloats)];
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
      if (row == 0) {  // later activation rows find the weights in L2
        if (task_.reading == Reading::strips_ahead) {
          prefetch_next_rows(first, at, strip);
        } else {
          prefetch_strip<kAhead>(first, at, strip);
        }
      }
      Arithmetic::template multiply_strip<R0, R1>(strip);
    }
    add_dots<R>(task_, dots, row, first, count, begin == 0 && !task_.accumulate);
  }

  /// Lets `strip`, columns from `at` on of weight rows from `first` on, prefetch rows kAhead further on.
  /// After the last weight row comes the first one of the next strip, or of the next group of rows.
  template <std::int64_t kAhead>
  void prefetch_strip(std::int64_t first, std::int64_t at, Strip<Weight>& strip) const {
    const std::int64_t end = at + strip.cols;
    const bool is_end = end == task_.cols;
    const std::int64_t next =
        is_end ? kAhead * task_.cols - at : (kAhead - strip.count) * task_.cols + strip.cols;
    const bool has_next = !is_end || first + strip.count < task_.num_weight_rows || task_.goes_on;
    strip.ahead_rows = kAhead;
    strip.next_offset = has_next ? next : 0;
  }

  /// Lets `strip`, as above, prefetch its share of the next group of rows.
  void prefetch_next_rows(std::int64_t first, std::int64_t at, Strip<Weight>& strip) const {
    const std::int64_t next = first + strip.count;
    const std::int64_t count =
        task_.goes_on ? kStripRows : std::min(kStripRows, task_.num_weight_rows - next);
    const std::int64_t offset = at * strip.count;
    if (offset + strip.cols * strip.count <= count * task_.cols)
      strip.next = weight_ + next * task_.cols + offset;
  }

  template <int R>
  void multiply_groups(std::int64_t row, std::int64_t first, std::int64_t count, std::int64_t begin,
                       std::int64_t cols) {
    constexpr std::int64_t kGroup = Arithmetic::template kGroup<R>;
    constexpr std::int64_t kHalf = (kGroup + 1) / 2;
    alignas(64) float dots[static_cast<std::size_t>(kGroup * R)];
    const auto* rows = static_cast<const Row*>(task_.in) + row * packed_cols(task_.cols) + begin * R;
    const bool is_first = begin == 0 && !task_.accumulate;
    // Prefetching a step's bytes of weights is divided among the blocks of activations.
    const std::int64_t step_bytes =
        kGroup * Arithmetic::kStep * static_cast<std::int64_t>(sizeof(Weight)) / row_blocks_;
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
        Arithmetic::template multiply<R, 0>(tile);
      } else if constexpr (Arithmetic::kReadsAhead) {
        if (lines == kGroup) {
          Arithmetic::template multiply<R, kGroup>(tile);
        } else if (lines == 1) {
          Arithmetic::template multiply<R, 1>(tile);
        } else {
          Arithmetic::template multiply<R, kHalf>(tile);
        }
        ahead_.next += step_bytes * (cols / Arithmetic::kStep);
      }
      add_dots<R>(task_, dots, row, first + n, group, is_first);
    }
  }

  const Task& task_;
  const Weight* weight_;
  std::int64_t row_blocks_;
  LinesAhead ahead_;
};

}  // namespace helix::cpu::linear
