// SPDX-License-Identifier: Apache-2.0
// Packets that carry their flag with them: 8 bytes of data and flag are written at once, so that a peer that
// sees the flag has the data. Twice the bytes, but no round trip between data and flag.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/comm/peer_wait.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// Bytes of a line: 8 of data, and the flag beside each 4.
inline constexpr int kLineBytes = 16;
/// Elements of T in a line.
template <class T>
inline constexpr int kLineColumns = 8 / static_cast<int>(sizeof(T));
/// Bytes between the two lines of a packet: those of 32 packets lie side by side, so that a warp's store is
/// whole lines of NVLink. With the lines of a packet side by side 131 KB took 6.4 us, so 5.2; 262 KB 8.2
/// and 6.2.
inline constexpr int kWarpLinesBytes = kWarp * kLineBytes;

/// Bytes from the first packet's first line to packet `i`'s.
__host__ __device__ constexpr std::int64_t line_place(int i) {
  return static_cast<std::int64_t>(i / kWarp) * 2 * kWarpLinesBytes + i % kWarp * kLineBytes;
}

/// Stores a line of data and flag: the count, and its complement, so that memory which nobody has written has
/// no count.
__device__ __forceinline__ void store_line(void* to, std::uint32_t first, std::uint32_t second,
                                           std::uint32_t count) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(first), "r"(count),
               "r"(second), "r"(~count)
               : "memory");
}

/// Stores a packet as two lines.
__device__ __forceinline__ void store_lines(std::byte* to, uint4 x, std::uint32_t count) {
  store_line(to, x.x, x.y, count);
  store_line(to + kWarpLinesBytes, x.z, x.w, count);
}

__device__ __forceinline__ uint4 load_volatile(const std::byte* from) {
  uint4 x;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

/// The data that store_line() wrote with this count, if it is there.
__device__ __forceinline__ bool load_line(const std::byte* from, std::uint32_t count, uint2& data) {
  const uint4 line = load_volatile(from);
  data = {line.x, line.z};
  return line.y == count && line.w == ~count;
}

/// The packet that store_lines() wrote with this count, if it is there.
__device__ __forceinline__ bool load_lines(const std::byte* from, std::uint32_t count, uint4& packet) {
  const uint4 low = load_volatile(from);
  const uint4 high = load_volatile(from + kWarpLinesBytes);
  packet = {low.x, low.z, high.x, high.z};
  return low.y == count && low.w == ~count && high.y == count && high.w == ~count;
}

/// Waits for the packet that store_lines() wrote; zeros where it never comes.
__device__ __forceinline__ uint4 wait_for_lines(const PeerWaits& waits, int peer, const std::byte* from,
                                                std::uint32_t count) {
  uint4 packet;
  const bool is_there = wait_for_peer(waits, peer, count, [&](std::uint64_t& value) {
    const bool has_come = load_lines(from, count, packet);
    value = has_come ? count : 0;
    return has_come ? Seen::there : Seen::not_yet;
  });
  return is_there ? packet : uint4{0, 0, 0, 0};
}

}  // namespace helix::cuda
