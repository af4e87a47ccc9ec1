// SPDX-License-Identifier: Apache-2.0
// The words at WindowExchangeArgs::exchanges, which all kernels of an exchange over windows read and its
// combine advances.
#pragma once

#include <cstdint>

#include <helix/backend/exchange.hpp>

namespace helix::cuda {

struct WindowCounts {
  std::uint64_t exchanges;  // from first_exchange_count() on, one more for each that this rank has combined
  std::uint32_t combining;  // blocks of the running combine that have read it; 0 between launches
};
static_assert(sizeof(WindowCounts) <= kExchangeCountBytes);

__device__ __forceinline__ WindowCounts& counts_of(const WindowExchangeArgs& window) {
  return *reinterpret_cast<WindowCounts*>(window.exchanges);
}

/// An exchange's number and slot, as read on the device.
struct WindowPlace {
  std::uint64_t exchanges;  ///< The count, this exchange included.
  std::int64_t slot_begin;  ///< Bytes from the first slot to its own.

  explicit __device__ __forceinline__ WindowPlace(const WindowExchangeArgs& window)
      : exchanges(*static_cast<const volatile std::uint64_t*>(window.exchanges) + 1),
        slot_begin(exchanges % 2 == 1 ? 0 : window.slot_bytes) {}
};

/// Counts this block, whose threads have all read the number; tells its first thread whether it is the last.
__device__ __forceinline__ bool count_reader(const WindowExchangeArgs& window) {
  return threadIdx.x == 0 && atomicInc(&counts_of(window).combining, gridDim.x - 1) == gridDim.x - 1;
}

}  // namespace helix::cuda
