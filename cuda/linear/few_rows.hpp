// SPDX-License-Identifier: Apache-2.0
// Products of few activation rows at the memory limit (compute capability 9.0).
#pragma once

#include <cuda_runtime_api.h>

namespace helix::cuda {

template <class T>
struct Product;

inline constexpr int kMaxFewRows = 16;

/// Whether multiply_few_rows() takes the product: up to kMaxFewRows rows, one head, a multiple of 64 columns,
/// rows aligned to 16 bytes, no negative row stride. Weights are of T, which the caller has checked.
template <class T>
bool fits_few_rows(const Product<T>& product);

/// As fits_few_rows() but for the addresses of `in` and the weights: ranks with the same product agree on it.
template <class T>
bool has_few_rows(const Product<T>& product);

/// The product, which must fit. The sums of a row do not depend on how many rows there are.
template <class T>
void multiply_few_rows(const Product<T>& product, int num_sms, cudaStream_t stream);

/// out[r, n] = silu(g) * u with g and u, kept in f32, of weight rows n and width + n. `product.width` counts
/// pairs.
template <class T>
void multiply_few_rows_gated(const Product<T>& product, int num_sms, cudaStream_t stream);

}  // namespace helix::cuda
