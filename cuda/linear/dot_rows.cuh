// SPDX-License-Identifier: Apache-2.0
// Products of a few activation rows with a few weight rows by one warp; linear and expert_ffn share them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

constexpr int kDotWarps = 8;  // warps per block
constexpr int kDotThreads = kDotWarps * kWarp;
constexpr int kDotOutputs = 4;  // weight rows per warp
constexpr int kMaxDotRows = 8;  // activation rows per warp

/// Loads 16 bytes of a weight, bypassing L1: this SM does not read them again, and the activations should
/// stay in L1.
__device__ __forceinline__ uint4 load_weight(const void* data) {
  uint4 bits;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
      : "l"(data));
  return bits;
}

/// Widens the elements 0 .. 4 / sizeof(T) of a word, lowest bits first.
template <class T>
__device__ __forceinline__ void widen_word(unsigned word, float* values) {
  if constexpr (sizeof(T) == 4) {
    values[0] = __uint_as_float(word);
  } else {
    values[0] = to_float(T::from_bits(static_cast<std::uint16_t>(word)));
    values[1] = to_float(T::from_bits(static_cast<std::uint16_t>(word >> 16)));
  }
}

template <class T>
__device__ __forceinline__ void widen(uint4 bits, float* values) {
  constexpr int kPerWord = 4 / sizeof(T);
  widen_word<T>(bits.x, values);
  widen_word<T>(bits.y, values + kPerWord);
  widen_word<T>(bits.z, values + 2 * kPerWord);
  widen_word<T>(bits.w, values + 3 * kPerWord);
}

/// Loads `kWidth` consecutive elements as floats. If kWidth > 1, `data` is aligned to 16 bytes or to the
/// whole access.
template <int kWidth, class T>
__device__ __forceinline__ void load_values(const T* data, float (&values)[kWidth]) {
  constexpr int kBytes = kWidth * static_cast<int>(sizeof(T));
  if constexpr (kWidth == 1) {
    values[0] = to_float(*data);
  } else if constexpr (kBytes == 8) {
    const uint2 bits = *reinterpret_cast<const uint2*>(data);
    widen_word<T>(bits.x, values);
    widen_word<T>(bits.y, values + 4 / sizeof(T));
  } else {
    static_assert(kBytes % 16 == 0);
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
      widen<T>(reinterpret_cast<const uint4*>(data)[i], values + i * (16 / sizeof(T)));
  }
}

/// sums[r * kDotOutputs + o] += this lane's share of rows[r] . weights[o], over part `split` of `splits`
/// equal parts of the columns, which are assigned in spans of kWarp * kWidth. kWidth is 1, or the number of
/// weights in 16 bytes; `cols` must then be a multiple of it and all rows aligned to 16 bytes.
template <int kWidth, int kRows, class T, class W>
__device__ __forceinline__ void accumulate_dots(const W* const (&weights)[kDotOutputs],
                                                const T* const (&rows)[kRows], int cols, int split,
                                                int splits, float (&sums)[kRows * kDotOutputs]) {
  constexpr int kSpan = kWarp * kWidth;
  constexpr int kUnroll = kRows <= 2 ? 2 : 1;  // enough loads in flight; more rows leave no registers
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll kUnroll
  for (std::int64_t k = split * kSpan + lane * kWidth; k < cols; k += splits * kSpan) {
    float weight[kDotOutputs][kWidth];
#pragma unroll
    for (int o = 0; o < kDotOutputs; ++o) {
      if constexpr (kWidth == 1) {
        weight[o][0] = to_float(weights[o][k]);
      } else {
        widen<W>(load_weight(weights[o] + k), weight[o]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float values[kWidth];
      load_values<kWidth>(rows[r] + k, values);
#pragma unroll
      for (int o = 0; o < kDotOutputs; ++o)
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          sums[r * kDotOutputs + o] = fmaf(values[i], weight[o][i], sums[r * kDotOutputs + o]);
    }
  }
}

/// Sums each of `values` over the warp in about kCount - 1 shuffles: each step halves the values that a lane
/// holds. Afterwards values[0] of lane i is the total of values[i / (kWarp / kCount)].
template <int kCount>
__device__ __forceinline__ void sum_across_warp(float (&values)[kCount]) {
  static_assert(kCount <= kWarp && (kCount & (kCount - 1)) == 0);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const int count = kCount * offset / kWarp;  // values kept after this step; 0: one final value
    if (count == 0) {
      values[0] += __shfl_xor_sync(~0u, values[0], offset);
      continue;
    }
    const bool is_upper = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if (i >= count) continue;
      const float sent = is_upper ? values[i] : values[i + count];
      const float kept = is_upper ? values[i + count] : values[i];
      values[i] = kept + __shfl_xor_sync(~0u, sent, offset);
    }
  }
}

/// The whole product of the warp's part. Writes partial[r * kDotOutputs + o], in shared memory.
template <int kWidth, int kRows, class T, class W>
__device__ __forceinline__ void dot_rows(const W* const (&weights)[kDotOutputs],
                                         const T* const (&rows)[kRows], int cols, int split, int splits,
                                         float* partial) {
  constexpr int kSums = kRows * kDotOutputs;
  constexpr int kLanesPerSum = kWarp / kSums;
  float sums[kSums] = {};
  accumulate_dots<kWidth>(weights, rows, cols, split, splits, sums);
  sum_across_warp(sums);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (lane % kLanesPerSum == 0) partial[lane / kLanesPerSum] = sums[0];
}

/// Warps of a block that share the columns of one group of weight rows: 1, 2, 4 or 8. The most that leave
/// four spans each, so that blocks are small and end together; more if the groups alone do not fill the GPU,
/// unless half as many take no longer.
inline int choose_splits(std::int64_t groups, std::int64_t cols, std::int64_t span, int num_sms) {
  constexpr std::int64_t kWarpsPerSm = 16;
  int splits = kDotWarps;
  while (splits > 1 && ((splits / 2) * span >= cols ||
                        (cols < 4 * splits * span && groups * (splits / 2) >= kWarpsPerSm * num_sms)))
    splits /= 2;
  return splits;
}

}  // namespace helix::cuda
