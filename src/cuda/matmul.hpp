// SPDX-License-Identifier: Apache-2.0
// Dense matrix products of 16-bit types through cuBLASLt.
#pragma once

#include <cstdint>
#include <memory>

#include <helix/dtype.hpp>

#include "cuda/operators_state.hpp"

namespace helix::cuda {

std::unique_ptr<MatmulLibrary, MatmulLibraryDelete> make_matmul_library();

/// out[r, n] = sum_k in[r, k] * weight[n, k] (+ out[r, n] if accumulate), f32 sums. `dtype` (f16 or bf16) is
/// the type of all three. Rows may be strided. Plans once for each shape, then only queues; capturable once
/// planned.
void library_matmul(MatmulLibrary& library, DType dtype, const void* in, std::int64_t in_stride,
                    std::int64_t rows, std::int64_t cols, const void* weight, std::int64_t weight_rows,
                    void* out, std::int64_t out_stride, bool accumulate, StreamHandle stream);

}  // namespace helix::cuda
