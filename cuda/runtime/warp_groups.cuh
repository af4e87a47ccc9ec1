// SPDX-License-Identifier: Apache-2.0
// How warp groups with different roles in one block synchronise (compute capability 9.0): named barriers for
// some of the block's threads, and ring buffers in shared memory between producers and consumers.
#pragma once

#include "cuda/runtime/ptx.cuh"

namespace helix::cuda {

/// Waits until `threads` threads of the block have arrived at barrier `id`, by this call or by
/// group_arrive(). Called by whole warps. Barrier 0 is __syncthreads().
__device__ __forceinline__ void group_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Arrives at barrier `id` without waiting.
__device__ __forceinline__ void group_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// One arrival that expects no bytes.
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

/// Makes the current phase expect `bytes` more; this is not an arrival.
__device__ __forceinline__ void barrier_expect_more(unsigned barrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

/// `x`, equal in all lanes of the warp, in a form that the compiler knows to be uniform: it computes what
/// follows once per warp and branches uniformly. A shuffle's result is not known to be uniform.
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

  /// Called by one thread, before a barrier of the block.
  __device__ void init(unsigned fills, unsigned empties) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_at(&full[i]), fills);
      barrier_init(shared_at(&empty[i]), empties);
    }
  }
};

/// A position in a ring, for producer or consumer. Takes one register: the number of stages passed.
template <int kStages>
class RingPlace {
 public:
  __device__ explicit RingPlace(RingBarriers<kStages>& ring)
      : full_(shared_at(ring.full)), empty_(shared_at(ring.empty)) {}

  __device__ __forceinline__ int stage() const { return static_cast<int>(count_ % kStages); }
  __device__ __forceinline__ unsigned full() const { return full_ + count_ % kStages * 8u; }
  __device__ __forceinline__ unsigned empty() const { return empty_ + count_ % kStages * 8u; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), parity()); }
  /// Returns at once the first time round.
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty(), parity() ^ 1u); }
  /// Whether wait_empty() would return at once.
  __device__ __forceinline__ bool is_empty() const { return barrier_test(empty(), parity() ^ 1u); }
  __device__ __forceinline__ void advance() { ++count_; }
  /// Tells the compiler that all lanes of this warp are at the same position; see warp_uniform().
  __device__ __forceinline__ void make_uniform() { count_ = warp_uniform(count_); }
  /// Parity of the current phase of barriers that end one each time round.
  __device__ __forceinline__ unsigned parity() const { return count_ / kStages % 2; }

 private:
  unsigned full_;  // equal in all threads, so it costs no register
  unsigned empty_;
  unsigned count_ = 0;
};

}  // namespace helix::cuda
