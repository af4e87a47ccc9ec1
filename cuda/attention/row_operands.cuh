// SPDX-License-Identifier: Apache-2.0
// Query rows as operands of mma.sync, in the kernels of tensor.cuh, mma.cuh and mma_latent.cuh.
//
// With e4m3 KV they are f16. A row of bf16 is multiplied by the power of two that brings its largest
// magnitude to [2^14, 2^15), which is exact for all elements down to 2^-31 of the largest. Each row has its
// own power, because the rows of a query tile are different heads, whose magnitudes are independent.
#pragma once

#include <type_traits>

#include <helix/dtype.hpp>

#include "cuda/runtime/ptx.cuh"

namespace helix::cuda {

inline constexpr int kMmaRows = 16;  ///< Query rows of one mma.sync.

/// The 16-bit type in which elements of type KV are multiplied.
template <class KV>
using MultipliedAs = std::conditional_t<sizeof(KV) == 1, f16, KV>;

/// The largest of `top` and the magnitudes of a chunk's bf16 elements, as bits of f32.
__device__ __forceinline__ unsigned larger_magnitude(unsigned top, const uint4& chunk) {
  for (unsigned word : {chunk.x, chunk.y, chunk.z, chunk.w})
    top = ::max(top, ::max(word << 16 & 0x7fff0000u, word & 0x7fff0000u));
  return top;
}

/// The power of two by which a row of bf16 is multiplied to become f16.
struct RowScale {
  int power;

  /// `top`: larger_magnitude() over the whole row.
  __device__ __forceinline__ explicit RowScale(unsigned top)
      : power(::min(141 - static_cast<int>(top >> 23), 126)) {}

  __device__ __forceinline__ void make_f16(uint4& chunk) const {
    const float factor = __int_as_float((127 + power) << 23);
    const auto scaled = [&](unsigned word) {
      return pack<f16>(__uint_as_float(word << 16) * factor, __uint_as_float(word & 0xffff0000u) * factor);
    };
    chunk = {scaled(chunk.x), scaled(chunk.y), scaled(chunk.z), scaled(chunk.w)};
  }
  /// Factor of the row's scores.
  __device__ __forceinline__ float inverse() const { return __int_as_float((127 - power) << 23); }
};

}  // namespace helix::cuda
