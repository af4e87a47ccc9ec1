// SPDX-License-Identifier: Apache-2.0
// Lines of an exchange: twice 4 bytes of data and their flag, each pair an 8-byte word of its own, so a peer
// that sees both flags has the data. This doubles the bytes, but saves a round trip between data and flag.
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

/// Stores a line. Its flag is the count and the complement of the count, so memory never written holds no
/// valid flag.
__device__ __forceinline__ void store_line(void* to, std::uint32_t first, std::uint32_t second,
                                           std::uint32_t count) {
  store_volatile(to, {first, count, second, ~count});
}

/// Loads a line into `data`. Returns whether store_line() wrote it with this count.
__device__ __forceinline__ bool load_line(const std::byte* from, std::uint32_t count, uint2& data) {
  const uint4 line = load_volatile(from);
  data = {line.x, line.z};
  return line.y == count && line.w == ~count;
}

}  // namespace helix::cuda
