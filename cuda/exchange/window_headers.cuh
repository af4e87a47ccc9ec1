// SPDX-License-Identifier: Apache-2.0
// Headers of messages that lie in the memory of peers: when they leave, and whether they have.
#pragma once

#include <cstdint>

#include "cuda/exchange/header.cuh"

namespace helix::cuda {

/// Whether attention that writes whole messages over windows sends their headers, from the block that ends
/// last. false: window_combine_kernel sends them, a launch later, as it does for whatever else writes there.
inline constexpr bool kAttentionSendsHeaders = true;

/// The words at WindowExchangeArgs::epoch.
struct WindowCounts {
  std::uint64_t exchanges;  // that this rank has combined
  std::uint32_t combining;  // blocks of the combine that have read it; 0 between launches
  std::uint32_t finished;   // blocks of the launch that sends headers; 0 between launches
};

__device__ __forceinline__ WindowCounts& counts_of(const WindowExchangeArgs& window) {
  return *reinterpret_cast<WindowCounts*>(window.epoch);
}

/// What kernels of an exchange read on the device: its number, counted from 1, and the bytes to its slot.
struct WindowPlace {
  std::uint64_t exchanges;
  std::int64_t slot;

  explicit __device__ __forceinline__ WindowPlace(const WindowExchangeArgs& window)
      : exchanges(*static_cast<const volatile std::uint64_t*>(window.epoch) + 1),
        slot(exchanges % 2 == 1 ? 0 : window.slot_bytes) {}
};

__device__ __forceinline__ std::uint64_t header_rest(const WindowExchangeArgs& window, std::int64_t sender) {
  return static_cast<std::uint32_t>(window.tokens) | static_cast<std::uint64_t>(sender) << 32;
}

/// What headers of this exchange carry; all lanes of one warp.
__device__ __forceinline__ std::uint64_t epoch_of(const WindowExchangeArgs& window,
                                                  const WindowPlace& place) {
  return exchange_epoch(place.exchanges, sum_epoch_terms(window.positions, window.tokens));
}

/// Whether this rank's headers have left: its own is one of them.
__device__ __forceinline__ bool are_headers_sent(const WindowExchangeArgs& window, const WindowPlace& place) {
  const auto* own = reinterpret_cast<const volatile std::uint32_t*>(
      window.received + window.sender * window.sender_bytes + place.slot);
  return *own == static_cast<std::uint32_t>(place.exchanges);
}

/// Tells all peers that this rank's messages are whole: what this warp has written or seen written. All lanes
/// of one warp. `epoch`: what the peers' headers must carry too. The fence waits beside the loads that
/// `epoch` is made of; behind it a header is one store of 16 bytes.
__device__ __forceinline__ void send_headers(const WindowExchangeArgs& window, const WindowPlace& place,
                                             std::uint64_t epoch) {
  __threadfence_system();
#pragma unroll 1
  for (std::int64_t p = static_cast<int>(threadIdx.x) % kWarp; p < window.peers; p += kWarp) {
    asm volatile(
        "st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(window.sent + p * window.peer_bytes + place.slot),
        "l"(epoch), "l"(header_rest(window, window.sender))
        : "memory");
  }
}

/// Counts a block that has ended; true in the last of the grid. All that the thread has written or seen
/// written goes before the count, for any GPU, and what the others counted before what follows.
__device__ __forceinline__ bool is_last_block(std::uint32_t* finished) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.sys.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(finished), "r"(gridDim.x - 1)
               : "memory");
  return before == gridDim.x - 1;
}

/// Sends the headers once all blocks of the grid have come here. All threads of the block, behind all that it
/// writes; the last block's warp kSender sends. For the last launch that writes: its blocks have all waited
/// for the launches before it, whose blocks need no count.
template <int kSender = 0>
__device__ __forceinline__ void send_headers_last(const WindowExchangeArgs& window) {
  __syncthreads();
  if (threadIdx.x / kWarp != kSender) return;
  int is_last = 0;
  if (threadIdx.x % kWarp == 0) is_last = is_last_block(&counts_of(window).finished);
  if (__shfl_sync(~0u, is_last, 0) == 0) return;
  __syncwarp();
  const WindowPlace place(window);
  send_headers(window, place, epoch_of(window, place));
}

/// send_headers_last() as a call, which leaves the registers of a kernel's loops as they were: inlined, it
/// cost some kernels a spill. Not for kernels whose warps share out registers, which calls prevent.
__device__ __noinline__ inline void call_send_headers_last(const WindowExchangeArgs& window) {
  send_headers_last(window);
}

}  // namespace helix::cuda
