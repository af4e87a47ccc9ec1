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
/// sums are folded; kGroup<R>, weight rows at once; kStep, columns of a step; kReadsAhead, whether it knows
/// Reading::ahead and Reading::rows; multiply<R, kLines>(Tile), which asks for kLines lines a step: 0 or,
/// where it reads ahead, 1, kGroup<R> / 2 or kGroup<R>; and multiply_row<R>(Tile, ahead), one weight row,
/// which asks for what lies `ahead` elements behind each step that it reads.
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
    const std::int64_t rows = block_weight_rows();
    for (std::int64_t first = 0; first < task_.num_weight_rows; first += rows)
      multiply_block(first, std::min(rows, task_.num_weight_rows - first), rows);
  }

 private:
  /// Blocks of activations beyond which weights take too small a part of the time to be asked for.
  static constexpr std::int64_t kMostBlocksAhead = 16;

  /// Packed activations that stay in L1 beside the weights that pass by.
  static constexpr std::int64_t kNearBytes = 32 << 10;
  /// How long before it is read Reading::rows asks for a line.
  static constexpr std::int64_t kRowsAheadBytes = 8 << 10;
  /// Weights of a block that Reading::rows keeps in L2 for the second block of activations.
  static constexpr std::int64_t kRowsBlockBytes = 384 << 10;

  /// Up to two blocks of activations memory sets the pace, and a block of weights that is small leaves L2 to
  /// the next one; beyond, activations come from L2 too, once a block. Reading::rows, which does not meet the
  /// next one there, gains by blocks as large as L2 keeps.
  std::int64_t block_weight_rows() const {
    if (task_.reading == Reading::rows && row_blocks_ == 2) {
      constexpr std::int64_t kGroup = Kernel::template kGroup<4>;
      const std::int64_t row_bytes = task_.cols * static_cast<std::int64_t>(sizeof(Weight));
      return std::max(kRowsBlockBytes / row_bytes / kGroup, std::int64_t{1}) * kGroup;
    }
    if (task_.num_rows == 1) return Kernel::template kGroup<1>;
    if (task_.num_rows == 2) return Kernel::template kGroup<2>;
    return (row_blocks_ <= 2 ? 2 : 8) * Kernel::template kGroup<4>;
  }

  bool reads_ahead() const {
    return Kernel::kReadsAhead && row_blocks_ <= kMostBlocksAhead &&
           (task_.reading == Reading::ahead || task_.reading == Reading::ahead_pairs);
  }

  void multiply_block(std::int64_t first, std::int64_t count, std::int64_t next) {
    if constexpr (Kernel::kReadsAhead) {
      if (task_.reading == Reading::rows) return multiply_rows(first, count);
    }
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

  /// Reading::rows: the first block of activations takes the weights from memory row by row, the others from
  /// L2. Whole rows, if all columns of the block stay in L1.
  void multiply_rows(std::int64_t first, std::int64_t count) {
    const std::int64_t near_bytes = packed_rows(std::min(task_.num_rows, kBlockRows)) *
                                    packed_cols(task_.cols) * static_cast<std::int64_t>(sizeof(Row));
    const bool are_whole = near_bytes <= kNearBytes;
    constexpr std::int64_t kAhead = kRowsAheadBytes / static_cast<std::int64_t>(sizeof(Weight));
    const std::int64_t ahead = are_whole ? kAhead : round_up(kAhead, task_.cols);
    for_each_row_block(task_.num_rows, [&]<int R>(std::int64_t row) {
      if (row > 0) {
        for_each_chunk([&](std::int64_t begin, std::int64_t cols) {
          multiply_groups<R>(row, first, count, begin, cols);
        });
      } else if (are_whole) {
        for (std::int64_t n = first; n < first + count; ++n) {
          for_each_chunk(
              [&](std::int64_t begin, std::int64_t cols) { multiply_row<R>(n, begin, cols, ahead); });
        }
      } else {
        for_each_chunk([&](std::int64_t begin, std::int64_t cols) {
          for (std::int64_t n = first; n < first + count; ++n) multiply_row<R>(n, begin, cols, ahead);
        });
      }
    });
  }

  /// The first R rows of activations with weight row `n`.
  template <int R>
  void multiply_row(std::int64_t n, std::int64_t begin, std::int64_t cols, std::int64_t ahead) {
    alignas(64) float dots[kBlockRows];
    const auto* rows = static_cast<const Row*>(task_.in) + begin * R;
    Kernel::template multiply_row<R>({weight_ + n * task_.cols + begin, task_.cols, 0, rows, cols, dots, {}},
                                     ahead);
    add_dots<R>(task_, dots, 0, n, 1, begin == 0 && !task_.accumulate);
  }

  template <int R>
  void multiply_groups(std::int64_t row, std::int64_t first, std::int64_t count, std::int64_t begin,
                       std::int64_t cols) {
    constexpr std::int64_t kGroup = Kernel::template kGroup<R>;
    alignas(64) float dots[static_cast<std::size_t>(kGroup * R)];
    const auto* rows = static_cast<const Row*>(task_.in) + row * packed_cols(task_.cols) + begin * R;
    const bool is_first = begin == 0 && !task_.accumulate;
    // The bytes of a step's weights, shared among the blocks of activations that pass by them.
    const std::int64_t step_bytes =
        kGroup * Kernel::kStep * static_cast<std::int64_t>(sizeof(Weight)) / row_blocks_;
    const std::int64_t lines =
        step_bytes <= 64                                                                       ? 1
        : row_blocks_ > 1 || task_.reading == Reading::ahead_pairs || step_bytes < kGroup * 64 ? kGroup / 2
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
          Kernel::template multiply<R, kGroup / 2>(tile);
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
