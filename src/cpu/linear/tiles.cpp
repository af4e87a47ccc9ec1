// SPDX-License-Identifier: Apache-2.0
// Products of bf16 weights on tile registers (cpu/amx.hpp).
#include <algorithm>
#include <cstdint>

#include "cpu/amx.hpp"
#include "cpu/linear/task.hpp"

namespace helix::cpu::linear {
namespace {

/// Columns whose activations, 192 KB for 16 rows, are split at once. Hardware prefetchers follow the 32 rows
/// that are read side by side: with 512 columns a core draws 85 % of its bandwidth, with 1024 92 %.
constexpr std::int64_t kChunk = 2048;
/// Weight rows that are multiplied at once.
constexpr std::int64_t kWeightRows = amx::kMaxRows;

/// Up to 16 rows of activations, split, over columns [begin, begin + cols).
struct SplitRows {
  const bf16* parts;
  std::int64_t rows;
  std::int64_t begin;
  std::int64_t cols;
};

/// `count` <= kWeightRows weight rows times split rows of activations. dots: [weight row][padded rows].
void multiply_weights(const Task& task, std::int64_t first, std::int64_t count, const SplitRows& in,
                      float* dots) {
  const auto* weights = static_cast<const bf16*>(task.weight) + first * task.cols + in.begin;
  const std::int64_t row_bytes = task.cols * static_cast<std::int64_t>(sizeof(bf16));
  const std::int64_t whole_rows = count / amx::kRows * amx::kRows;
  const std::int64_t steps = in.cols / amx::kStep;
  if (whole_rows > 0) {
    amx::multiply_rows(weights, row_bytes, whole_rows / amx::kRows, in.parts, in.rows, steps, dots, false);
  }
  // A tile reads 16 rows of 32 columns: what is short of that is padded with zeros in a copy.
  const auto multiply_copy = [&](std::int64_t row, std::int64_t column, bool add) {
    alignas(64) bf16 copy[amx::kRows * amx::kStep] = {};
    const std::int64_t width = std::min(amx::kStep, in.cols - column);
    for (std::int64_t r = row; r < std::min(row + amx::kRows, count); ++r)
      std::copy_n(weights + r * task.cols + column, width, copy + (r - row) * amx::kStep);
    amx::multiply_rows(copy, amx::kStep * static_cast<std::int64_t>(sizeof(bf16)), 1,
                       in.parts + column / amx::kStep * amx::step_elements(in.rows), in.rows, 1,
                       dots + row * amx::padded_rows(in.rows), add);
  };
  if (in.cols % amx::kStep != 0) {
    for (std::int64_t row = 0; row < whole_rows; row += amx::kRows)
      multiply_copy(row, steps * amx::kStep, steps > 0);
  }
  for (std::int64_t column = 0; whole_rows < count && column < in.cols; column += amx::kStep) {
    multiply_copy(whole_rows, column, column > 0);
  }
}

}  // namespace

void multiply_tiles(const Task& task) {
  const auto* in = static_cast<const float*>(task.in);
  alignas(64) bf16 parts[kChunk / amx::kStep * amx::step_elements(amx::kRows)];
  alignas(64) float dots[kWeightRows * amx::kRows];
  const amx::Session session;
  for (std::int64_t begin = 0; begin < task.cols; begin += kChunk) {
    const std::int64_t cols = std::min(kChunk, task.cols - begin);
    for (std::int64_t row = 0; row < task.num_rows; row += amx::kRows) {
      const std::int64_t rows = std::min(amx::kRows, task.num_rows - row);
      amx::split_rows(in + row * task.in_stride + begin, task.in_stride, rows, cols, 1.0f, parts);
      const std::int64_t width = amx::padded_rows(rows);
      for (std::int64_t first = 0; first < task.num_weight_rows; first += kWeightRows) {
        const std::int64_t count = std::min(kWeightRows, task.num_weight_rows - first);
        multiply_weights(task, first, count, {parts, rows, begin, cols}, dots);
        for (std::int64_t r = 0; r < rows; ++r) {
          float* out = task.out + (row + r) * task.out_stride + first;
          const bool adds = begin > 0 || task.accumulate;
          for (std::int64_t n = 0; n < count; ++n) out[n] = (adds ? out[n] : 0.0f) + dots[n * width + r];
        }
      }
    }
  }
}

}  // namespace helix::cpu::linear
