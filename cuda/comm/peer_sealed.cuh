// SPDX-License-Identifier: Apache-2.0
// Packets whose words are their own flags ("sealed"): a word lies in the reader's memory as its complement,
// 0 says that it has not come, and the reader leaves 0 behind for the message after the next. No bytes beside
// the data, no round trip between data and flag, and nothing need be written at once but 4 bytes.
//
// The word ~0 has no complement that is not 0: ~1 goes in its place. As f32, as two f16 and as two bf16 both
// are NaN, so that sums do not know them apart; who sends other words sees to it that none is ~0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/comm/peer_wait.cuh"
#include "cuda/runtime/ptx.cuh"

namespace helix::cuda {

__device__ __forceinline__ std::uint32_t seal(std::uint32_t word) {
  return word == ~0u ? 1u : ~word;
}

/// Stores a packet of 16 bytes, sealed.
__device__ __forceinline__ void store_sealed(std::byte* to, uint4 x) {
  store_volatile(to, {seal(x.x), seal(x.y), seal(x.z), seal(x.w)});
}

/// The packet that store_sealed() wrote, if all of it is there. It stays.
__device__ __forceinline__ bool load_sealed(const std::byte* from, uint4& packet) {
  const uint4 x = load_volatile(from);
  packet = {~x.x, ~x.y, ~x.z, ~x.w};
  return x.x != 0 && x.y != 0 && x.z != 0 && x.w != 0;
}

/// Makes the place of a packet that has been read ready for the message after the next, which its sender may
/// write once it has the block's next one: between them lies the end of a kernel, or a __threadfence_system()
/// and a barrier.
__device__ __forceinline__ void clear_sealed(std::byte* packet) {
  *reinterpret_cast<uint4*>(packet) = uint4{0, 0, 0, 0};
}

/// Waits for the packet at `from`, of message `count` of `peer`; zeros where it never comes. It stays. Not
/// inlined: with a copy of this code for each of two packets, sums of 16 to 262 kB take 0.1 to 0.6 us more.
static __device__ __noinline__ uint4 wait_for_sealed(const PeerWaits& waits, int peer, const std::byte* from,
                                                     std::uint32_t count) {
  uint4 packet;
  const bool is_there = wait_for_peer(waits, peer, count, [&](std::uint64_t& value) {
    const bool has_come = load_sealed(from, packet);
    value = has_come ? count : 0;
    return has_come ? Seen::there : Seen::not_yet;
  });
  return is_there ? packet : uint4{0, 0, 0, 0};
}

}  // namespace helix::cuda
