// SPDX-License-Identifier: Apache-2.0
// Thin matrix products in SIMD, compiled for each instruction set and chosen at run time.
//
// Weights stream from memory once for each block of R activation rows, R up to half the lanes, straight from
// the checkpoint's rows. The activations are brought into the order of the widened weights once a task and
// chunk of columns.
// As in attention_kernels.cpp: machines before 2013 take the portable code.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/linear_kernels.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>

#include <hwy/highway.h>

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

void multiply(const LinearTask& task) {
  if (task.cols > 0) {
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
