// SPDX-License-Identifier: Apache-2.0
// Attention of single query rows by the formula in double precision, with which the benchmarks compare
// results.
#pragma once

#include <cstdint>

#include <helix/backend/attention.hpp>
#include <helix/cuda/runtime.hpp>

namespace helix::cuda::bench {

/// Where exact attention leaves its results; device memory.
struct ExactRows {
  const std::int64_t* rows = nullptr;  ///< [count], token * query heads + query head; read.
  int count = 0;
  double* out = nullptr;  ///< [count, Dv], written.
  double* lse = nullptr;  ///< [count], natural log, written.
};

/// out = softmax(scale q K^T) V and its log-sum-exp over the visible tokens of `args`, including the cache's
/// scales, for the rows in `to`. Ignores `args.target` and `args.workspace`; no window, no soft cap.
template <class T>
void launch_exact_attention(const PartialAttentionArgs<T>& args, const ExactRows& to, StreamHandle stream);

/// Fills `rows` consecutive rows of DType::fp8_ds_mla in device memory at `pool` with random columns and
/// scales; waits until that is done.
void fill_mixed_rows(void* pool, std::int64_t rows, std::int64_t head_dim, std::int64_t value_dim,
                     unsigned seed);

}  // namespace helix::cuda::bench
