// SPDX-License-Identifier: Apache-2.0
// How warp groups of one block meet that do different things (compute capability 9.0): barriers of some of
// its threads, and rings of stages in shared memory that one side fills and the other empties.
#pragma once

#include "cuda/runtime/ptx.cuh"

namespace helix::cuda {

/// Waits until `threads` threads of the block have come to barrier `id`, by this or by group_arrive(). Whole
/// warps; 0 is __syncthreads().
__device__ __forceinline__ void group_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Comes to barrier `id` and goes on.
__device__ __forceinline__ void group_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// One arrival without bytes to expect.
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

/// Has the present phase expect `bytes` more, and an arrival no less.
__device__ __forceinline__ void barrier_expect_more(unsigned barrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

/// `x`, which all lanes of the warp have alike, where the compiler knows it: what follows from it is computed
/// once for the warp, and branches on it are the warp's. Of a shuffle's result it does not know.
__device__ __forceinline__ unsigned warp_uniform(unsigned x) {
  return __reduce_or_sync(~0u, x);
}
__device__ __forceinline__ int warp_uniform(int x) {
  return static_cast<int>(warp_uniform(static_cast<unsigned>(x)));
}

/// Barriers of a ring of kStages stages, in shared memory.
template <int kStages>
struct RingBarriers {
  unsigned long long full[kStages];
  unsigned long long empty[kStages];

  /// By one thread, before the block meets.
  __device__ void init(unsigned fills, unsigned empties) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(static_cast<unsigned>(__cvta_generic_to_shared(&full[i])), fills);
      barrier_init(static_cast<unsigned>(__cvta_generic_to_shared(&empty[i])), empties);
    }
  }
};

/// A walk around a ring, by either side. One register: how many stages lie behind.
template <int kStages>
class RingPlace {
 public:
  __device__ explicit RingPlace(RingBarriers<kStages>& ring)
      : full_(static_cast<unsigned>(__cvta_generic_to_shared(ring.full))),
        empty_(static_cast<unsigned>(__cvta_generic_to_shared(ring.empty))) {}

  __device__ __forceinline__ int stage() const { return static_cast<int>(count_ % kStages); }
  __device__ __forceinline__ unsigned full() const { return full_ + count_ % kStages * 8u; }
  __device__ __forceinline__ unsigned empty() const { return empty_ + count_ % kStages * 8u; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), parity()); }
  /// The first time round it returns at once.
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty(), parity() ^ 1u); }
  __device__ __forceinline__ void advance() { ++count_; }
  /// Tells the compiler that the lanes of this warp stand at one place: warp_uniform().
  __device__ __forceinline__ void make_uniform() { count_ = warp_uniform(count_); }

 private:
  __device__ __forceinline__ unsigned parity() const { return count_ / kStages % 2; }

  unsigned full_;  // the same for all threads, which costs no register
  unsigned empty_;
  unsigned count_ = 0;
};

}  // namespace helix::cuda
