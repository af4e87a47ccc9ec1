// SPDX-License-Identifier: Apache-2.0
// The slot of a PartialSink, as a queued operation finds it.
#pragma once

#include <cstddef>

#include <helix/backend/exchange.hpp>
#include <helix/tensor_view.hpp>

namespace helix::cpu {

/// The sink with out and lse in the slot that its SinkSlot names now.
inline PartialSink<float> in_slot(PartialSink<float> sink) {
  if (sink.slot.exchanges == nullptr || *sink.slot.exchanges % 2 == 0) return sink;
  const auto moved = [&](float* data) {
    return reinterpret_cast<float*>(reinterpret_cast<std::byte*>(data) + sink.slot.bytes);
  };
  sink.out = {moved(sink.out.data()), sink.out.extents(), sink.out.strides()};
  sink.lse = {moved(sink.lse.data()), sink.lse.extents(), sink.lse.strides()};
  return sink;
}

}  // namespace helix::cpu
