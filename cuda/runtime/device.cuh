// SPDX-License-Identifier: Apache-2.0
// What the kernels share: launches with checks, conversions, reductions in a warp and a block.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <helix/cuda/runtime.hpp>
#include <helix/dtype.hpp>

namespace helix::cuda {

constexpr int kWarp = 32;
inline constexpr float kInfinity = __builtin_huge_valf();

/// Device conversions of the storage types; the same values as their constexpr ones on the host.
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

/// 2^x by the special function unit: 2 ulp, results below 2^-126 are zero.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// tanh to 2^-22 of 1, which soft caps multiply; tanhf takes five times the instructions.
__device__ __forceinline__ float fast_tanh(float x) {
  return 1.0f - __fdividef(2.0f, fast_exp2(x * 2.885390081777927f) + 1.0f);  // 2 log2(e)
}

/// Divides by a number that the host knows: a multiplication and a shift where a division takes a hundred
/// cycles. Otherwise it is that number.
class Divisor {
 public:
  /// `by` in [1, 2^30].
  explicit constexpr Divisor(int by = 1) : by_(by) {
    while ((1u << shift_) < static_cast<unsigned>(by)) ++shift_;
    const std::uint64_t rest = (std::uint64_t{1} << shift_) - static_cast<std::uint64_t>(by);
    factor_ = static_cast<unsigned>((rest << 32) / static_cast<std::uint64_t>(by) + 1);
  }

  __host__ __device__ operator int() const { return by_; }
  /// x >= 0.
  friend __host__ __device__ int operator/(int x, const Divisor& d) {
#ifdef __CUDA_ARCH__
    const auto dividend = static_cast<unsigned>(x);
    return static_cast<int>((__umulhi(dividend, d.factor_) + dividend) >> d.shift_);
#else
    return x / d.by_;
#endif
  }
  friend __host__ __device__ int operator%(int x, const Divisor& d) {
    return x - x / d * d.by_;
  }

 private:
  int by_;
  unsigned shift_ = 0;
  unsigned factor_ = 0;
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

/// Waits until all that the stream holds before this kernel has run, in a kernel of launch_early().
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Launches a kernel with an attribute, or without it where `has_attribute` is false.
template <class... Params>
void launch_with(cudaLaunchAttribute attribute, bool has_attribute, void (*kernel)(Params...),
                 std::int64_t blocks, int threads, std::size_t shared_bytes, StreamHandle stream,
                 const std::type_identity_t<Params>&... params) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = has_attribute ? 1 : 0;
  HELIX_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params...));
}

/// Launches a kernel whose blocks may start while the kernel before it ends: it must call
/// wait_for_previous() before it touches memory. `is_hopper` false: an ordinary launch.
template <class... Params>
void launch_early(void (*kernel)(Params...), std::int64_t blocks, int threads, std::size_t shared_bytes,
                  StreamHandle stream, bool is_hopper, const std::type_identity_t<Params>&... params) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  launch_with(early, is_hopper, kernel, blocks, threads, shared_bytes, stream, params...);
}

/// Checks the launch that stands before it.
#define HELIX_CHECK_LAUNCH() HELIX_CUDA_CHECK(cudaGetLastError())

}  // namespace helix::cuda
