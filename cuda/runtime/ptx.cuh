// SPDX-License-Identifier: Apache-2.0
// Instructions that CUDA C++ has no name for: bulk copies into shared memory and their mbarriers (compute
// capability 9.0; no code below it), memory accesses shared with other GPUs while a kernel runs, 16-bit
// matrix products, and conversion of e4m3 to f16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <helix/dtype.hpp>

namespace helix::cuda {

/// The L2 cache policy for data that is read once: evict first.
__device__ __forceinline__ std::uint64_t evict_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// A bulk copy of `bytes` (a multiple of 16) into shared memory, counted by `barrier`. Its data is read once
/// and leaves L2 first, so code, queries and page tables stay.
__device__ __forceinline__ void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(evict_first())
      : "memory");
#endif
}

/// Copies 16 bytes into shared memory, bypassing L1 and evicting first from L2. barrier_arrive_after_copies()
/// signals completion.
__device__ __forceinline__ void copy_chunk(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(evict_first())
               : "memory");
}

/// Prefetches the line at `from` into L2.
__device__ __forceinline__ void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

/// The address in shared memory that other functions take.
__device__ __forceinline__ unsigned shared_at(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ void store_shared(unsigned to, std::byte x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(static_cast<unsigned>(x)) : "memory");
}

__device__ __forceinline__ void store_shared(unsigned to, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared(unsigned from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

/// 16-byte store to memory that another GPU reads meanwhile, and 16-byte load from memory that it writes.
__device__ __forceinline__ void store_volatile(void* to, uint4 x) {
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      "mov.b64 low, {%1, %2};\n"
      "mov.b64 high, {%3, %4};\n"
      "st.volatile.global.v2.u64 [%0], {low, high};\n"
      "}\n" ::"l"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
}

__device__ __forceinline__ uint4 load_volatile(const void* from) {
  uint4 x;
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      "ld.volatile.global.v2.u64 {low, high}, [%4];\n"
      "mov.b64 {%0, %1}, low;\n"
      "mov.b64 {%2, %3}, high;\n"
      "}\n"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "l"(from)
      : "memory");
  return x;
}

/// Initialises a barrier whose phase ends after `arrivals` arrivals and all bytes that these expect.
__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

/// Makes this thread's barrier_init() visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// Arrives once all earlier copy_chunk() of this thread have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

/// Waits for copies and arrivals of this block. Unbounded: copies complete or the kernel faults, and the
/// kernel's own code makes the arrivals.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

/// Whether barrier_wait() would return at once.
__device__ __forceinline__ bool barrier_test(unsigned barrier, unsigned parity) {
  unsigned is_done = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(is_done)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return is_done != 0;
}

/// Stores a word in shared memory if `condition` holds, without a branch.
__device__ __forceinline__ void store_shared_if(bool condition, unsigned to, int word) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %0, 0;\n"
      "@p st.shared.b32 [%1], %2;\n"
      "}\n" ::"r"(static_cast<int>(condition)),
      "r"(to), "r"(word)
      : "memory");
}

/// Arrives if `condition` holds, without a branch.
__device__ __forceinline__ void barrier_arrive_if(bool condition, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %0, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%1];\n"
      "}\n" ::"r"(static_cast<int>(condition)),
      "r"(barrier)
      : "memory");
#endif
}

/// Stores four 8 x 8 matrices of 16-bit elements to shared memory: lane l gives the address of row l % 8 of
/// matrix l / 8.
__device__ __forceinline__ void store_matrices(unsigned to, unsigned x0, unsigned x1, unsigned x2,
                                               unsigned x3) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x0), "r"(x1),
               "r"(x2), "r"(x3)
               : "memory");
#endif
}

/// The matching load of four matrices.
__device__ __forceinline__ void load_matrices(unsigned (&x)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}

/// As load_matrices(), with each matrix transposed.
__device__ __forceinline__ void load_transposed_matrices(unsigned (&x)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}

/// Orders this thread's plain writes to shared memory before later bulk copies over them, and before
/// warp-group products that read them.
__device__ __forceinline__ void fence_before_copy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                         unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

/// Converts four e4m3 to two pairs of f16, exactly; NaN stays NaN.
__device__ __forceinline__ void widen(unsigned four, unsigned& low, unsigned& high) {
#if __CUDA_ARCH__ >= 890
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}\n"
      : "=r"(low), "=r"(high)
      : "r"(four));
#else
  // The exponent of f16 has one bit more than that of e4m3, and a bias of 15 instead of 7. Moved bits of NaN
  // are 480, above all numbers of e4m3.
  const auto moved = [](unsigned pair) {
    const unsigned bits = (pair & 0x80008000u) | (pair & 0x7f007f00u) >> 1;
    const __half2 x = __hmul2(reinterpret_cast<const __half2&>(bits), __half2half2(__ushort_as_half(0x5c00)));
    return reinterpret_cast<const unsigned&>(x) | __hgt2_mask(__habs2(x), __float2half2_rn(448.0f));
  };
  low = moved(__byte_perm(four, 0, 0x1404));
  high = moved(__byte_perm(four, 0, 0x3424));
#endif
}

/// Packs two f32 as a pair of T, `low` in the lower half.
template <class T>
__device__ __forceinline__ unsigned pack(float low, float high) {
  if constexpr (std::is_same_v<T, bf16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const unsigned&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned&>(pair);
  }
}

}  // namespace helix::cuda
