// SPDX-License-Identifier: Apache-2.0
// Attention of single query rows in double precision by the formula: what the benchmarks compare results
// with.
#pragma once

#include <cstdint>

#include <helix/backend/attention.hpp>
#include <helix/cuda/runtime.hpp>

namespace helix::cuda::bench {

/// Where exact attention leaves its results, device memory.
struct ExactRows {
  const std::int64_t* rows = nullptr;  ///< [count], token * query heads + query head; read.
  int count = 0;
  double* out = nullptr;  ///< [count, Dv], written.
  double* lse = nullptr;  ///< [count], natural log, written.
};

/// out = softmax(scale q K^T) V and its log-sum-exp over the visible tokens of `args`, scales of the cache
/// included, for the rows that `to` names. `args.target` and `args.workspace` are not looked at; no window,
/// no soft cap.
template <class T>
void launch_exact_attention(const PartialAttentionArgs<T>& args, const ExactRows& to, StreamHandle stream);

/// Fills `rows` rows of DType::fp8_ds_mla, one behind the other in device memory at `pool`, with random
/// columns and scales; waits for it.
void fill_mixed_rows(void* pool, std::int64_t rows, std::int64_t head_dim, std::int64_t value_dim,
                     unsigned seed);

}  // namespace helix::cuda::bench
