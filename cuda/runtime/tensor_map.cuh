// SPDX-License-Identifier: Apache-2.0
// Tensor maps: how the copy engine of compute capability 9.0 cuts boxes out of strided tensors.
//
// A box lands in shared memory as chunks of 64 columns, which matrix instructions read (wgmma.cuh). The host
// makes a map in less than a microsecond; the kernel gets it as a __grid_constant__ parameter.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_runtime.h>

#include <helix/cuda/runtime.hpp>
#include <helix/dtype.hpp>

#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace helix::cuda {

/// The driver's encoder of tensor maps. The library does not link the driver; it looks the function up once.
inline auto tensor_map_encoder() {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    HELIX_CUDA_CHECK(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
    HELIX_EXPECTS(found == cudaDriverEntryPointSuccess && entry != nullptr, ErrorCode::unsupported,
                  "the driver knows no tensor maps; it must be of CUDA 12.0 or newer");
    return reinterpret_cast<Encode>(entry);
  }();
  return encode;
}

/// The tensor map type of 16-bit or e4m3 elements.
inline CUtensorMapDataType map_type(DType dtype) {
  if (dtype == DType::bf16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

/// A map of elements whose last dimension is contiguous, in the copy engine's order: `sizes` from the columns
/// outward, then the byte strides of all dimensions but the columns. Swizzled boxes have rows of 128 bytes.
/// Elements beyond the sizes arrive as zeros. Rows are aligned to 16 bytes.
template <int kRank>
CUtensorMap rows_map(void* first, DType dtype, const std::int64_t (&sizes)[kRank],
                     const std::int64_t (&strides)[kRank - 1], const int (&box)[kRank],
                     CUtensorMapL2promotion promotion,
                     CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  cuuint64_t all_sizes[kRank];
  cuuint64_t all_strides[kRank - 1];
  cuuint32_t all_box[kRank];
  cuuint32_t steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    all_sizes[i] = static_cast<cuuint64_t>(sizes[i]);
    all_box[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
    // The stride of a dimension of size one is never used, and may be anything in the view.
    if (i > 0) all_strides[i - 1] = static_cast<cuuint64_t>(sizes[i] > 1 ? strides[i - 1] : 16);
  }
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(&map, map_type(dtype), kRank, first, all_sizes, all_strides,
                                               all_box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                               promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  HELIX_EXPECTS(result == CUDA_SUCCESS, ErrorCode::invalid_argument, "a tensor of ", sizes[kRank - 1],
                " parts has no tensor map: CUresult ", static_cast<int>(result));
  return map;
}

/// A map of 16-bit queries, with coordinates (column, head, token) and boxes of 64 columns of `box_heads`
/// heads of `box_tokens` tokens; strides in bytes.
inline CUtensorMap query_rows_map(const void* q, DType dtype, const std::int64_t (&sizes)[3],
                                  std::int64_t head_bytes, std::int64_t token_bytes, int box_heads,
                                  int box_tokens) {
  return rows_map<3>(const_cast<void*>(q), dtype, sizes, {head_bytes, token_bytes},
                     {kChunkColumns, box_heads, box_tokens}, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
#endif
}

/// Copies the box at these coordinates, in the map's order, to `to`, a multiple of 128 bytes; `barrier`
/// counts its bytes. Swizzles depend on address bits in shared memory, so a tile of 128-byte rows must begin
/// at a multiple of 1024.
__device__ __forceinline__ void copy_box(unsigned to, const CUtensorMap& map, int at0, int at1, int at2,
                                         int at3, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(barrier)
      : "memory");
#endif
}

/// As copy_box(), for data that is read once: it leaves L2 first.
__device__ __forceinline__ void copy_box_once(unsigned to, const CUtensorMap& map, int at0, int at1, int at2,
                                              int at3, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(barrier),
      "l"(evict_first())
      : "memory");
#endif
}

/// copy_box() for a map of five dimensions.
__device__ __forceinline__ void copy_box(unsigned to, const CUtensorMap& map, int at0, int at1, int at2,
                                         int at3, int at4, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(at4),
      "r"(barrier)
      : "memory");
#endif
}

/// copy_box_once() for a map of five dimensions.
__device__ __forceinline__ void copy_box_once(unsigned to, const CUtensorMap& map, int at0, int at1, int at2,
                                              int at3, int at4, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(at4),
      "r"(barrier), "l"(evict_first())
      : "memory");
#endif
}

/// copy_box() for a map of three dimensions.
__device__ __forceinline__ void copy_query_box(unsigned to, const CUtensorMap& map, int column, int head,
                                               int token, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(column), "r"(head), "r"(token), "r"(barrier)
      : "memory");
#endif
}

}  // namespace helix::cuda
