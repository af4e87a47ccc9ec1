// SPDX-License-Identifier: Apache-2.0
// Thin matrix products on one thread: activation rows against some rows of a weight matrix as the checkpoint
// stores it.
#pragma once

#include <cstdint>

#include <helix/dtype.hpp>

namespace helix::cpu {

/// out[r, n] = in[r] . weight[n] (+ bias[n]) (+ out[r, n]) for num_weight_rows rows n.
struct LinearTask {
  const float* in = nullptr;  ///< [num_rows, cols]
  std::int64_t in_stride = 0;
  std::int64_t num_rows = 0;
  const void* weight = nullptr;  ///< the first of the weight rows, dense
  DType dtype = DType::f32;
  std::int64_t cols = 0;
  std::int64_t num_weight_rows = 0;  ///< at most linear_task_rows()
  const void* bias = nullptr;        ///< the first of the weight rows' biases, or null
  DType bias_dtype = DType::f32;
  float* out = nullptr;  ///< [num_rows, num_weight_rows]
  std::int64_t out_stride = 0;
  bool accumulate = false;
};

inline constexpr std::int64_t kLinearTaskRows = 64;  ///< weight rows that suit any task

/// Weight rows of a task when `num_threads` share a product, at least kLinearTaskRows: enough to bring the
/// activations into order once for many, few enough to share out.
std::int64_t linear_task_rows(DType weight_dtype, std::int64_t num_rows, std::int64_t num_weight_rows,
                              int num_threads);

/// Computes `task`. The bits of an output depend on its two rows alone, not on where the task begins, nor on
/// num_rows but for bf16 weights under AMX: there they may differ between up to 4 rows and more. Allocates
/// nothing.
void multiply(const LinearTask& task);

}  // namespace helix::cpu
