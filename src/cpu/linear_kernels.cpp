// SPDX-License-Identifier: Apache-2.0
// Thin matrix products in SIMD, compiled for each instruction set and chosen at run time.
//
// Weights stream from memory once for each block of R activation rows, R up to half the lanes, straight from
// the checkpoint's rows. The activations are brought into the order of the widened weights once a task and
// chunk of columns.
//
// Where there are tile registers, bf16 weights meet more than 4 rows on them: vectors then wait for
// arithmetic, not for memory.

// As in attention/attend.cpp: machines before 2013 take the portable code.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/linear_kernels.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>

#include <hwy/highway.h>

#include "cpu/amx.hpp"
#include "cpu/linear_kernels.hpp"
#include "cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

constexpr int kMaxRows = kLanes / 2;
/// Columns of a step: the activations of a block, 24 KB, stay in L1. The same for every R, so that sums have
/// one order.
constexpr std::int64_t kChunk = 768;

/// Weight rows; the last one stands for those that a block reads past the end.
template <class T, int R>
struct WeightRows {
  const T* first;
  std::int64_t stride;
  std::int64_t last;
  std::int64_t after_last;  ///< elements from where the row behind the last would be to what is read next
  HWY_INLINE const T* operator[](std::int64_t i) const { return first + std::min(i, last) * stride; }
  /// Ahead by a block or two, because a chunk of a row is too short for the hardware to run ahead: half again
  /// as fast. 8 rows of activations leave L1 no room for it.
  HWY_INLINE void prefetch(std::int64_t i, int block, std::int64_t d) const {
    i += R == 1 ? block : 2 * block;
    const auto offset = (i * stride + d + (i > last ? after_last : 0)) * static_cast<std::int64_t>(sizeof(T));
    const auto line = reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(first) +
                                                    static_cast<std::uintptr_t>(offset));
    HELIX_UNROLL for (int byte = 0; byte < kPair * static_cast<int>(sizeof(T)); byte += 64) {
      __builtin_prefetch(line + byte, 0, R > 4 ? 2 : 3);
    }
  }
};

/// Columns [begin, end) of the rows [first_row, + valid): their products, added chunk by chunk to out, or to
/// zero if `is_first`.
template <class T, int R>
HWY_NOINLINE void multiply_block(const LinearTask& task, std::int64_t first_row, int valid,
                                 std::int64_t begin, std::int64_t end, bool is_first) {
  alignas(64) float x[R * kChunk];
  alignas(64) float dots[kLinearTaskRows * R + kLanes];
  alignas(64) float sums[kLinearTaskRows * R + kLanes];  // [weight row][R]
  const std::int64_t count = task.num_weight_rows;
  std::fill_n(sums, count * R + kLanes, 0.0f);
  for (int r = 0; r < valid && !is_first; ++r) {
    const float* out = task.out + (first_row + r) * task.out_stride;
    for (std::int64_t n = 0; n < count; ++n) sums[n * R + r] = out[n];
  }
  if (valid < R) std::fill_n(x, R * kChunk, 0.0f);
  for (; begin < end; begin += kChunk) {
    const std::int64_t cols = std::min(kChunk, end - begin);
    for (int r = 0; r < valid; ++r) {
      load_pair_order<T>(task.in + (first_row + r) * task.in_stride + begin, cols, kDecodeFactor<T>,
                         x + r * kPair, R * kPair);
    }
    // After the last row of a chunk come the first ones of the next chunk, or of the next task.
    const std::int64_t after_last = begin + kChunk < task.cols ? kChunk - count * task.cols : -begin;
    const WeightRows<T, R> weights{static_cast<const T*>(task.weight) + begin, task.cols, count - 1,
                                   after_last};
    dot_block<R, true>(weights, count, x, cols, dots);
    for (std::int64_t i = 0; i < count * R; i += kLanes) {
      hn::Store(hn::Add(hn::Load(kF32, sums + i), hn::Load(kF32, dots + i)), kF32, sums + i);
    }
  }
  for (int r = 0; r < valid; ++r) {
    float* out = task.out + (first_row + r) * task.out_stride;
    for (std::int64_t n = 0; n < count; ++n) out[n] = sums[n * R + r];
  }
}

/// All rows of activations against columns [begin, end).
template <class T>
void multiply_columns(const LinearTask& task, std::int64_t begin, std::int64_t end) {
  const bool is_first = begin == 0 && !task.accumulate;
  for (std::int64_t row = 0; row < task.num_rows;) {
    const int valid = static_cast<int>(std::min<std::int64_t>(task.num_rows - row, kMaxRows));
    if (valid == 1) {
      multiply_block<T, 1>(task, row, valid, begin, end, is_first);
    } else if (valid == 2) {
      multiply_block<T, 2>(task, row, valid, begin, end, is_first);
    } else if (kMaxRows > 4 && valid <= 4) {
      multiply_block < T, kMaxRows<4 ? kMaxRows : 4>(task, row, valid, begin, end, is_first);
    } else {
      multiply_block<T, kMaxRows>(task, row, valid, begin, end, is_first);
    }
    row += valid;
  }
}

template <class T>
void multiply_as(const LinearTask& task) {
  if (task.num_rows <= kMaxRows) return multiply_columns<T>(task, 0, task.cols);
  // Several blocks: chunks outermost, so that the weights of a chunk serve all of them before they leave the
  // cache.
  for (std::int64_t begin = 0; begin < task.cols; begin += kChunk) {
    multiply_columns<T>(task, begin, std::min(begin + kChunk, task.cols));
  }
}

void multiply_target(const LinearTask& task) {
  switch (task.dtype) {
    case DType::f32:
      return multiply_as<float>(task);
    case DType::f16:
      return multiply_as<f16>(task);
    case DType::bf16:
      return multiply_as<bf16>(task);
    case DType::fp8_e4m3:
      return multiply_as<fp8_e4m3>(task);
  }
}

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace helix::cpu {

HWY_EXPORT(multiply_target);

namespace {

bool uses_tiles(DType weight_dtype, std::int64_t num_rows) {
  return weight_dtype == DType::bf16 && num_rows >= amx::kMinRows && amx::available();
}

/// Columns whose activations, 192 KB for 16 rows, are split at once. Hardware prefetchers follow the 32 rows
/// that are read side by side: with 512 columns a core draws 85 % of its bandwidth, with 1024 92 %.
constexpr std::int64_t kAmxChunk = 2048;
/// Weight rows that are multiplied at once.
constexpr std::int64_t kAmxWeightRows = amx::kMaxRows;

/// Up to 16 rows of activations, split, over columns [begin, begin + cols).
struct SplitRows {
  const bf16* parts;
  std::int64_t rows;
  std::int64_t begin;
  std::int64_t cols;
};

/// `count` <= kAmxWeightRows weight rows times split rows of activations. dots: [weight row][padded rows].
void multiply_weights(const LinearTask& task, std::int64_t first, std::int64_t count, const SplitRows& in,
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

void multiply_on_tiles(const LinearTask& task) {
  alignas(64) bf16 parts[kAmxChunk / amx::kStep * amx::step_elements(amx::kRows)];
  alignas(64) float dots[kAmxWeightRows * amx::kRows];
  const amx::Session session;
  for (std::int64_t begin = 0; begin < task.cols; begin += kAmxChunk) {
    const std::int64_t cols = std::min(kAmxChunk, task.cols - begin);
    for (std::int64_t row = 0; row < task.num_rows; row += amx::kRows) {
      const std::int64_t rows = std::min(amx::kRows, task.num_rows - row);
      amx::split_rows(task.in + row * task.in_stride + begin, task.in_stride, rows, cols, 1.0f, parts);
      const std::int64_t width = amx::padded_rows(rows);
      for (std::int64_t first = 0; first < task.num_weight_rows; first += kAmxWeightRows) {
        const std::int64_t count = std::min(kAmxWeightRows, task.num_weight_rows - first);
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

}  // namespace

std::int64_t linear_task_rows(DType weight_dtype, std::int64_t num_rows, std::int64_t num_weight_rows,
                              int num_threads) {
  if (!uses_tiles(weight_dtype, num_rows)) return kLinearTaskRows;
  // Further activation rows read the weights of a chunk again: then these stay in L2.
  const std::int64_t largest = num_rows <= amx::kRows ? 1024 : 256;
  const std::int64_t share = num_weight_rows / (2 * std::max(num_threads, 1));
  return std::clamp(share / kAmxWeightRows * kAmxWeightRows, kLinearTaskRows, largest);
}

void multiply(const LinearTask& task) {
  if (task.cols > 0 && uses_tiles(task.dtype, task.num_rows)) {
    multiply_on_tiles(task);
  } else if (task.cols > 0) {
    HWY_DYNAMIC_DISPATCH(multiply_target)(task);
  } else if (!task.accumulate) {
    // An FFN slice of no width: the kernels walk columns and would leave `out` as it was.
    for (std::int64_t r = 0; r < task.num_rows; ++r)
      std::fill_n(task.out + r * task.out_stride, task.num_weight_rows, 0.0f);
  }
  if (task.bias == nullptr) return;
  dispatch(task.bias_dtype, [&]<class T>(T*) {
    const T* bias = static_cast<const T*>(task.bias);
    for (std::int64_t r = 0; r < task.num_rows; ++r) {
      for (std::int64_t n = 0; n < task.num_weight_rows; ++n) {
        task.out[r * task.out_stride + n] += static_cast<float>(bias[n]);
      }
    }
  });
}

}  // namespace helix::cpu
#endif
