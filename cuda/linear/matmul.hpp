// SPDX-License-Identifier: Apache-2.0
// Dense matrix products of 16-bit types through cuBLASLt.
#pragma once

#include <cstdint>
#include <memory>

#include <helix/dtype.hpp>

#include "cuda/runtime/operators_state.hpp"

namespace helix::cuda {

/// For the calling thread's device. Workspaces come from `allocator` (null: CUDA's own), for the first two
/// streams that multiply, when they first do so outside of a capture; a third stream, and a captured one
/// until then, use algorithms without one.
/// @throws Error(internal) if the library does not start.
std::unique_ptr<MatmulLibrary, MatmulLibraryDelete> make_matmul_library(
    std::shared_ptr<const Allocator> allocator);

/// out[r, n] = sum_k in[r, k] * weight[n, k] (+ bias[n], unless null) (+ out[r, n] if accumulate), f32 sums.
/// `dtype` (f16 or bf16) is the type of in, weight and bias, `out_dtype` the same or f32, `cols` and all
/// sizes at least 1. Pointers are aligned to 16 bytes, and so is each row of `in` and `out`: strides are in
/// elements and at least the row's length. Plans once for each shape (some host work, nothing on the stream),
/// then only queues; capturable. A captured product keeps the workspace of the stream it was captured on: a
/// graph and other products of that stream must not run side by side. Threads may call it at the same time,
/// each with its own stream.
/// @throws Error(unsupported) if the library has no algorithm for the shape, Error(capacity) without memory
/// for a workspace, Error(internal) if it fails.
void library_matmul(MatmulLibrary& library, DType dtype, const void* in, std::int64_t in_stride,
                    std::int64_t rows, std::int64_t cols, const void* weight, std::int64_t weight_rows,
                    const void* bias, void* out, DType out_dtype, std::int64_t out_stride, bool accumulate,
                    StreamHandle stream);

}  // namespace helix::cuda
