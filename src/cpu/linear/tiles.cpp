// SPDX-License-Identifier: Apache-2.0
// Products of bf16 weights with f32 activations on tile registers (cpu/amx.hpp).
#include <algorithm>
#include <cstdint>

#include <helix/integers.hpp>

#include "cpu/amx.hpp"
#include "cpu/linear/task.hpp"

namespace helix::cpu::linear {
namespace {

/// Weight rows multiplied at once.
constexpr std::int64_t kWeightRows = amx::kMaxRows;

/// Up to 16 rows of activations, split into bf16 parts, over columns [begin, begin + cols).
struct SplitRows {
  const bf16* parts;
  std::int64_t rows;
  std::int64_t begin;
  std::int64_t cols;
};

/// Multiplies `count` <= kWeightRows weight rows with split rows of activations. dots: [weight row][padded
/// rows].
void multiply_weights(const Task& task, std::int64_t first, std::int64_t count, const SplitRows& in,
                      amx::RowsAhead ahead, float* dots) {
  const auto* weights = static_cast<const bf16*>(task.weight) + first * task.cols + in.begin;
  const std::int64_t row_bytes = task.cols * static_cast<std::int64_t>(sizeof(bf16));
  const std::int64_t whole_rows = count / amx::kRows * amx::kRows;
  const std::int64_t steps = in.cols / amx::kStep;
  if (whole_rows > 0) {
    amx::multiply_rows(weights, row_bytes, whole_rows / amx::kRows, in.parts, in.rows, steps, dots, false,
                       ahead);
  }
  // A tile reads 16 rows of 32 columns. Smaller remainders are copied and padded with zeros.
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

/// Multiplies weight rows [first, + count) with a block of activations over a chunk, into the task's results.
void multiply_chunk(const Task& task, std::int64_t first, std::int64_t row, std::int64_t begin,
                    amx::RowsAhead ahead) {
  alignas(64) float dots[kWeightRows * amx::kRows];
  const std::int64_t count = std::min(kWeightRows, task.num_weight_rows - first);
  const std::int64_t rows = std::min(amx::kRows, task.num_rows - row);
  const std::int64_t cols = std::min(kTileChunk, task.cols - begin);
  const std::int64_t width = amx::padded_rows(rows);
  const std::int64_t block_elements = packed_cols(task.cols) / amx::kStep * amx::step_elements(amx::kRows);
  const auto* parts = static_cast<const bf16*>(task.in) + row / amx::kRows * block_elements +
                      begin / amx::kStep * amx::step_elements(rows);
  multiply_weights(task, first, count, {parts, rows, begin, cols}, ahead, dots);
  const bool adds = begin > 0 || task.accumulate;
  for (std::int64_t r = 0; r < rows; ++r) {
    float* out = task.out + (row + r) * task.out_stride + first;
    for (std::int64_t n = 0; n < count; ++n) out[n] = (adds ? out[n] : 0.0f) + dots[n * width + r];
  }
}

}  // namespace

void multiply_tiles(const Task& task) {
  const amx::Session session;
  if (task.num_rows <= amx::kRows) {
    for (std::int64_t first = 0; first < task.num_weight_rows; first += kWeightRows) {
      for (std::int64_t begin = 0; begin < task.cols; begin += kTileChunk)
        multiply_chunk(task, first, 0, begin, next_weights(task, first, kWeightRows, begin));
    }
    return;
  }
  for (std::int64_t begin = 0; begin < task.cols; begin += kTileChunk) {
    for (std::int64_t row = 0; row < task.num_rows; row += amx::kRows) {
      for (std::int64_t first = 0; first < task.num_weight_rows; first += kWeightRows)
        multiply_chunk(task, first, row, begin, {});
    }
  }
}

void pack_for_tiles(const float* in, std::int64_t in_stride, std::int64_t count, std::int64_t cols,
                    bf16* to) {
  amx::split_rows(in, in_stride, count, cols, 1.0f, to);
}

amx::RowsAhead next_weights(const Task& task, std::int64_t first, std::int64_t count, std::int64_t begin) {
  // Hardware follows a row once it is being read, so prefetch its first lines. 8 rows of activations take 1
  // to 2 % less with 8 lines, the same with 2 and with 4; f32 takes more with 16. All lines in address order
  // took 5 to 13 % more, although vectors, which read fewer rows at once, take 20 % less with it.
  constexpr std::int64_t kRun = 8;
  if (task.reading != Reading::ahead) return {};
  const bool is_last = begin + kTileChunk >= task.cols;
  const std::int64_t row = is_last ? first + count : first;
  const std::int64_t column = is_last ? 0 : begin + kTileChunk;
  if (row + count > task.num_weight_rows && !task.goes_on) return {};
  const std::int64_t steps = ceil_div(std::min(kTileChunk, task.cols - begin), amx::kStep);
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(bf16));
  return {.next = static_cast<const char*>(task.weight) + (row * task.cols + column) * kBytes,
          .lines = ceil_div(count * kRun, steps),
          .run = kRun,
          .to_next_run = task.cols * kBytes - kRun * 64};
}

}  // namespace helix::cpu::linear
