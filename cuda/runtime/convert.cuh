// SPDX-License-Identifier: Apache-2.0
// Conversions between storage types and f32 on the device.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <helix/dtype.hpp>

namespace helix::cuda {

/// Device conversions of the storage types. They give the same values as the constexpr ones on the host.
__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
__device__ __forceinline__ float to_float(f16 x) {
  return __half2float(__ushort_as_half(x.bits));
}
__device__ __forceinline__ float to_float(fp8_e4m3 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3)));
}

template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, bf16>) {
    return bf16::from_bits(__bfloat16_as_ushort(__float2bfloat16_rn(x)));
  } else if constexpr (std::is_same_v<T, f16>) {
    return f16::from_bits(__half_as_ushort(__float2half_rn(x)));
  } else {
    return fp8_e4m3::from_bits(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
  }
}

/// Reads element `i` of f32, f16 or bf16 `data`.
__device__ __forceinline__ float load_element(const void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[i];
  if (dtype == DType::bf16) return to_float(static_cast<const bf16*>(data)[i]);
  return to_float(static_cast<const f16*>(data)[i]);
}

/// Stores `x` as element `i` of f32, f16, bf16 or e4m3 `data`.
__device__ __forceinline__ void store_element(void* data, DType dtype, std::int64_t i, float x) {
  if (dtype == DType::f32) {
    static_cast<float*>(data)[i] = x;
  } else if (dtype == DType::bf16) {
    static_cast<bf16*>(data)[i] = from_float<bf16>(x);
  } else if (dtype == DType::f16) {
    static_cast<f16*>(data)[i] = from_float<f16>(x);
  } else {
    static_cast<fp8_e4m3*>(data)[i] = from_float<fp8_e4m3>(x);
  }
}

}  // namespace helix::cuda
