// SPDX-License-Identifier: Apache-2.0
// TargetPlace: the message slot of a target to which partials are written, and the count of their lines.
#pragma once

#include <cstdint>

#include <helix/backend/exchange.hpp>

#include "cuda/comm/peer_lines.cuh"
#include "cuda/comm/peer_wait.cuh"

namespace helix::cuda {

/// Where a kernel writes partials, as read on the device.
struct TargetPlace {
  std::int64_t slot;    ///< Message slot: 0 or 1.
  std::uint32_t count;  ///< For lines.

  TargetPlace() = default;
  /// `gave_up`: of lines; null if the target has no lines.
  __device__ __forceinline__ TargetPlace(const std::uint64_t* counter, const std::uint32_t* gave_up) {
    const std::uint64_t exchanges = *counter;
    const std::uint32_t has_stopped = gave_up == nullptr ? 0 : volatile_word(gave_up);
    slot = static_cast<std::int64_t>(exchanges & 1);
    count = static_cast<std::uint32_t>(exchanges) +
            (has_stopped != 0 ? 0 : 1);  // 0: looks as if no line had come
  }
};

}  // namespace helix::cuda
