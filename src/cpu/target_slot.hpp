// SPDX-License-Identifier: Apache-2.0
// Resolves the slot of a PartialTarget when a queued operation runs.
#pragma once

#include <cstddef>

#include <helix/backend/exchange.hpp>
#include <helix/tensor_view.hpp>

namespace helix::cpu {

/// The target with out and lse in the slot that its TargetSlot currently selects.
inline PartialTarget<float> in_slot(PartialTarget<float> target) {
  if (target.slot.exchanges == nullptr || *target.slot.exchanges % 2 == 0) return target;
  const auto moved = [&](float* data) {
    return reinterpret_cast<float*>(reinterpret_cast<std::byte*>(data) + target.slot.bytes);
  };
  target.out = {moved(target.out.data()), target.out.extents(), target.out.strides()};
  target.lse = {moved(target.lse.data()), target.lse.extents(), target.lse.strides()};
  return target;
}

}  // namespace helix::cpu
