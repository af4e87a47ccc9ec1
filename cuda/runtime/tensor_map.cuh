// SPDX-License-Identifier: Apache-2.0
// Tensor maps: how the copy engine of compute capability 9.0 cuts boxes out of strided tensors.
//
// A box lands in shared memory as chunks of 64 columns that matrix instructions read (wgmma.cuh). The map is
// made on the host, in less than a microsecond, and goes to the kernel as a __grid_constant__ parameter.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_runtime.h>

#include <helix/cuda/runtime.hpp>
#include <helix/dtype.hpp>

#include "cuda/kv_cache/paged_rows.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace helix::cuda {

/// The driver's encoder of tensor maps. The library links no driver: it is asked for once.
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

/// A map of the 16-bit rows of a paged pool, with coordinates (column, token of the page, head, page) and
/// boxes of 64 columns of `box_tokens` tokens; what lies past `columns` arrives as zeros. Rows are aligned to
/// 16 bytes.
inline CUtensorMap paged_rows_map(const PagedRows& rows, DType dtype, std::int64_t columns, const KvView& kv,
                                  int box_tokens) {
  const auto size = [](std::int64_t x) { return static_cast<cuuint64_t>(x); };
  // The stride of a dimension of one is never used, and may be anything in the view.
  const auto stride = [&](std::int64_t bytes, std::int64_t extent) { return size(extent > 1 ? bytes : 16); };
  const KvFormat& format = kv.format;
  const cuuint64_t sizes[] = {size(columns), size(format.page_tokens), size(format.num_heads),
                              size(kv.num_pages)};
  const cuuint64_t strides[] = {stride(rows.token_bytes, format.page_tokens),
                                stride(rows.head_bytes, format.num_heads),
                                stride(rows.page_bytes, kv.num_pages)};
  const cuuint32_t box[] = {kChunkColumns, static_cast<cuuint32_t>(box_tokens), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map, dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
      rows.first, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  HELIX_EXPECTS(result == CUDA_SUCCESS, ErrorCode::invalid_argument, "a pool of ", kv.num_pages,
                " pages has no tensor map: CUresult ", static_cast<int>(result));
  return map;
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
#endif
}

/// Copies one box to `to`, a multiple of 1024 bytes; `barrier` counts its bytes.
__device__ __forceinline__ void copy_box(unsigned to, const CUtensorMap& map, int column, int token, int head,
                                         int page, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(column), "r"(token), "r"(head), "r"(page), "r"(barrier)
      : "memory");
#endif
}

/// Copies one box to `to` in every block of `blocks`, a bit for each of the cluster; the same barrier of each
/// counts its bytes.
__device__ __forceinline__ void copy_box_to_blocks(unsigned to, const CUtensorMap& map, int column, int token,
                                                   int head, int page, unsigned barrier, unsigned blocks) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(column), "r"(token), "r"(head), "r"(page), "r"(barrier),
      "h"(static_cast<unsigned short>(blocks))
      : "memory");
#endif
}

}  // namespace helix::cuda
