// SPDX-License-Identifier: Apache-2.0
// What matrix products of a warp group ask for (compute capability 9.0, code for sm_90a): operands in shared
// memory, registers, and the order of products and waits. The products themselves: wgmma_product.cuh.
//
// Matrices in shared memory lie in chunks of 64 columns: rows of 128 bytes one after another, the eight
// 16-byte parts of a row swapped by the row's number, as the copy engine's 128-byte swizzle leaves them.
// Chunks begin at multiples of 1024 bytes. PTX ISA, "Asynchronous warpgroup-level matrix instructions".
#pragma once

#include <cstdint>

namespace helix::cuda {

inline constexpr int kWarpGroup = 128;    ///< Threads of a warp group.
inline constexpr int kGroupRows = 64;     ///< Rows of a warp group's product.
inline constexpr int kChunkColumns = 64;  ///< 16-bit columns of a swizzled chunk: 128 bytes.
inline constexpr int kProductDepth = 16;  ///< Of the summed dimension, an instruction.
inline constexpr int kSwizzleRows = 8;    ///< Rows after which the order of a chunk's parts repeats.

/// Where 16-byte part `part` of row `row` lies in a swizzled chunk, in bytes.
__device__ __forceinline__ constexpr unsigned swizzled(unsigned row, unsigned part) {
  return row * 128u + ((part ^ (row % 8u)) * 16u);
}

/// A matrix operand in shared memory whose summed dimension runs along the rows of its chunks (the queries,
/// and the keys of scores): 64 of the summed dimension a chunk. Step s of 16 within a chunk begins 32 * s
/// bytes later.
__device__ __forceinline__ constexpr std::uint64_t rows_operand(unsigned address) {
  return (std::uint64_t{1} << 62) | (std::uint64_t{1024 >> 4} << 32) | (std::uint64_t{1} << 16) |
         ((address & 0x3ffffu) >> 4);
}

/// A matrix operand whose summed dimension runs down the rows of its chunks (values: tokens are summed over,
/// columns are columns of the result): chunks of 64 columns each `chunk_bytes` apart. Step s of 16 tokens
/// begins 2048 * s bytes later.
__device__ __forceinline__ constexpr std::uint64_t columns_operand(unsigned address, unsigned chunk_bytes) {
  return (std::uint64_t{1} << 62) | (std::uint64_t{1024 >> 4} << 32) |
         (static_cast<std::uint64_t>(chunk_bytes >> 4) << 16) | ((address & 0x3ffffu) >> 4);
}

/// `operand`, `bytes` further: its address lies in the lower bits, and is far from their end.
__device__ __forceinline__ std::uint64_t operand_at(std::uint64_t operand, int bytes) {
  const unsigned low = static_cast<unsigned>(operand) + static_cast<unsigned>(bytes >> 4);
  return (operand >> 32 << 32) | low;
}

/// Before the first product, and after plain writes to registers that products read or add to.
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

/// Waits until at most `kPending` groups are on their way.
template <int kPending>
__device__ __forceinline__ void products_wait() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

/// Keeps the compiler from moving reads and writes of `x` across this place: it does not know that products
/// that are on their way write to registers.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

/// Registers of this warp group's threads from here on, more or fewer than at launch; all warps of it.
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
