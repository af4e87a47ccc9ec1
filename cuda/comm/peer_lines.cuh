// SPDX-License-Identifier: Apache-2.0
// Lines of an exchange, which carry their flag with them: 8 bytes of data and flag are written at once, so
// that a peer that sees the flag has the data. Twice the bytes, but no round trip between data and flag.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/backend/exchange.hpp>

#include "cuda/runtime/ptx.cuh"

namespace helix::cuda {

inline constexpr int kLineBytes = static_cast<int>(kExchangeLineBytes);
/// Elements of T in a line.
template <class T>
inline constexpr int kLineColumns = static_cast<int>(kExchangeLineDataBytes) / static_cast<int>(sizeof(T));

/// Stores a line of data and flag: the count, and its complement, so that memory which nobody has written has
/// no count.
__device__ __forceinline__ void store_line(void* to, std::uint32_t first, std::uint32_t second,
                                           std::uint32_t count) {
  store_volatile(to, {first, count, second, ~count});
}

/// The data that store_line() wrote with this count, if it is there.
__device__ __forceinline__ bool load_line(const std::byte* from, std::uint32_t count, uint2& data) {
  const uint4 line = load_volatile(from);
  data = {line.x, line.z};
  return line.y == count && line.w == ~count;
}

}  // namespace helix::cuda
