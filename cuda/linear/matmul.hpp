// SPDX-License-Identifier: Apache-2.0
// Dense matrix products of 16-bit types through cuBLASLt.
#pragma once

#include <cstdint>

#include <helix/cuda/runtime.hpp>
#include <helix/dtype.hpp>

#include "cuda/runtime/operators_state.hpp"

namespace helix::cuda {

/// One product for library_matmul(). Strides are in elements; row strides are at least the row's length.
struct MatmulArgs {
  DType dtype = DType::bf16;      ///< f16 or bf16; the type of in, weight and bias.
  DType out_dtype = DType::bf16;  ///< `dtype` or f32.
  const void* in = nullptr;       ///< [heads, rows, cols].
  std::int64_t in_row = 0;
  std::int64_t in_head = 0;      ///< 0: all heads share the rows.
  const void* weight = nullptr;  ///< [heads, width, cols].
  const void* bias = nullptr;    ///< [width] or null; needs one head.
  void* out = nullptr;           ///< [heads, rows, width].
  std::int64_t out_row = 0;
  std::int64_t out_head = 0;
  std::int64_t heads = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t width = 0;
  bool accumulate = false;  ///< Adds to the contents of out.
};

/// out[h, r, n] = sum_k in[h, r, k] * weight[h, n, k] (+ bias[n]) (+ out[h, r, n]), with f32 sums. Sizes are
/// at least 1. Pointers, and each row of `in` and `out`, are aligned to 16 bytes. Plans at the
/// first call of a shape (some host work, nothing on the stream), and again after thousands of others;
/// otherwise only queues; capturable. A captured product keeps using the
/// workspace of the stream it was captured on, so a graph and other products of that stream must not run
/// concurrently. The library keeps such a stream alive, so that no later stream gets its handle; the owner of
/// a borrowed stream must do so. Threads may call this concurrently, each with its own stream.
/// @throws Error(unsupported) if the library has no algorithm for the shape, Error(capacity) if there is no
/// memory for a workspace, Error(internal) if it fails.
void library_matmul(MatmulLibrary& library, const MatmulArgs& args, const Stream& stream);

}  // namespace helix::cuda
