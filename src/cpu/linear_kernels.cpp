// SPDX-License-Identifier: Apache-2.0
// Thin matrix products in SIMD, compiled for each instruction set and chosen at run time.
//
// Weights stream from memory once for each block of R activation rows, R up to half the lanes, straight from
// the checkpoint's rows. The activations are brought into the order of the widened weights once a task and
// chunk of columns.
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
/// Columns of a step: the activations of a block stay in L1. The same for every R, so that sums have one
/// order.
constexpr std::int64_t kChunk = 1024;

/// Weight rows; the last one stands for those that a block reads past the end.
template <class T>
struct WeightRows {
  const T* first;
  std::int64_t stride;
  std::int64_t last;
  HWY_INLINE const T* operator[](std::int64_t i) const { return first + std::min(i, last) * stride; }
  HWY_INLINE void prefetch(std::int64_t, int, std::int64_t) const {}
};

template <class T, int R>
HWY_NOINLINE void multiply_block(const LinearTask& task, std::int64_t first_row, int valid) {
  alignas(64) float x[R * kChunk];
  alignas(64) float sums[kLinearTaskRows * R + kLanes];
  alignas(64) float dots[kLinearTaskRows * R + kLanes];
  std::fill_n(sums, task.num_weight_rows * R, 0.0f);
  if (valid < R) std::fill_n(x, R * kChunk, 0.0f);
  for (std::int64_t begin = 0; begin < task.cols; begin += kChunk) {
    const std::int64_t cols = std::min(kChunk, task.cols - begin);
    for (int r = 0; r < valid; ++r) {
      load_pair_order<T>(task.in + (first_row + r) * task.in_stride + begin, cols, kDecodeFactor<T>,
                         x + r * kPair, R * kPair);
    }
    const WeightRows<T> weights{static_cast<const T*>(task.weight) + begin, task.cols,
                                task.num_weight_rows - 1};
    dot_block<R, true>(weights, task.num_weight_rows, x, cols, dots);
    for (std::int64_t i = 0; i < task.num_weight_rows * R; ++i) sums[i] += dots[i];
  }
  for (int r = 0; r < valid; ++r) {
    float* out = task.out + (first_row + r) * task.out_stride;
    for (std::int64_t n = 0; n < task.num_weight_rows; ++n) {
      float value = sums[n * R + r];
      if (task.accumulate) value += out[n];
      out[n] = value;
    }
  }
}

template <class T>
void multiply_as(const LinearTask& task) {
  for (std::int64_t row = 0; row < task.num_rows;) {
    const std::int64_t rest = task.num_rows - row;
    const int valid = static_cast<int>(std::min<std::int64_t>(rest, kMaxRows));
    if (valid == 1) {
      multiply_block<T, 1>(task, row, valid);
    } else if (valid == 2) {
      multiply_block<T, 2>(task, row, valid);
    } else if (kMaxRows > 4 && valid <= 4) {
      multiply_block < T, kMaxRows<4 ? kMaxRows : 4>(task, row, valid);
    } else {
      multiply_block<T, kMaxRows>(task, row, valid);
    }
    row += valid;
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
  HWY_DYNAMIC_DISPATCH(multiply_target)(task);
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
