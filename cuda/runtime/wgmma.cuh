// SPDX-License-Identifier: Apache-2.0
// What matrix products of a warp group require (compute capability 9.0, code for sm_90a): operands in shared
// memory, registers, and fences and waits. The products themselves are in wgmma_product.cuh.
//
// Matrices in shared memory are stored in chunks of 64 columns: consecutive rows of 128 bytes, with the eight
// 16-byte parts of a row permuted by the row number, as the copy engine's 128-byte swizzle writes them.
// Chunks begin at multiples of 1024 bytes. PTX ISA, "Asynchronous warpgroup-level matrix instructions".
#pragma once

#include <cstdint>

namespace helix::cuda {

inline constexpr int kWarpGroup = 128;    ///< Threads of a warp group.
inline constexpr int kGroupRows = 64;     ///< Rows of a warp group's product.
inline constexpr int kChunkColumns = 64;  ///< 16-bit columns of a swizzled chunk: 128 bytes.
inline constexpr int kProductDepth = 16;  ///< Summed elements per instruction.
inline constexpr int kSwizzleRows = 8;    ///< Rows after which a chunk's permutation repeats.

/// Byte offset of 16-byte part `part` of row `row` in a swizzled chunk.
__device__ __forceinline__ constexpr unsigned swizzled(unsigned row, unsigned part) {
  return row * 128u + ((part ^ (row % 8u)) * 16u);
}

/// A matrix operand in shared memory whose summed dimension runs along the rows of its chunks, 64 elements
/// per chunk (the queries, and the keys of scores). Step s of 16 within a chunk begins 32 * s bytes later.
__device__ __forceinline__ constexpr std::uint64_t rows_operand(unsigned address) {
  return (std::uint64_t{1} << 62) | (std::uint64_t{1024 >> 4} << 32) | (std::uint64_t{1} << 16) |
         ((address & 0x3ffffu) >> 4);
}

/// A matrix operand whose summed dimension runs down the rows of its chunks (values: tokens are summed, and
/// columns are columns of the result). Chunks of 64 columns are `chunk_bytes` apart. Step s of 16 tokens
/// begins 2048 * s bytes later.
__device__ __forceinline__ constexpr std::uint64_t columns_operand(unsigned address, unsigned chunk_bytes) {
  return (std::uint64_t{1} << 62) | (std::uint64_t{1024 >> 4} << 32) |
         (static_cast<std::uint64_t>(chunk_bytes >> 4) << 16) | ((address & 0x3ffffu) >> 4);
}

/// `operand` advanced by `bytes`. Its address is in the lower bits and does not overflow them.
__device__ __forceinline__ std::uint64_t operand_at(std::uint64_t operand, int bytes) {
  const unsigned low = static_cast<unsigned>(operand) + static_cast<unsigned>(bytes >> 4);
  return (operand >> 32 << 32) | low;
}

/// Call before the first product, and after plain writes to registers that products read or add to.
__device__ __forceinline__ void products_fence() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

/// Ends a group of products, for products_wait() to count.
__device__ __forceinline__ void products_commit() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/// Waits until at most `kPending` groups are pending.
template <int kPending>
__device__ __forceinline__ void products_wait() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

/// Keeps the compiler from moving reads and writes of `x` across this point: it does not know that pending
/// products write to registers.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

/// Changes the registers per thread of this warp group from the number at launch. Called by all its warps.
template <int kCount>
__device__ __forceinline__ void take_registers() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void give_registers() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

}  // namespace helix::cuda
