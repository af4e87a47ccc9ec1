// SPDX-License-Identifier: Apache-2.0
// stream_weights: the bytes of a WeightPlan out of its files, a few MiB at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "model/weight_plan.hpp"

namespace helix::decode {

/// Takes `bytes` of host memory for `offset` of a buffer; the memory is re-used on return.
using WeightSink =
    std::function<void(std::size_t buffer, std::int64_t offset, const std::byte* data, std::size_t bytes)>;

/// Told now and then: bytes loaded so far, bytes in all.
using WeightProgress = std::function<void(std::int64_t done, std::int64_t total)>;

/// Reads all bytes of the plan and feeds them to `sink`, a few MiB at a time, so that resident memory grows
/// by what the sink keeps.
/// @throws Error(io) naming the file if one shrank or cannot be read, Error(invalid_file) naming tensor and
/// element if a router's weight or bias is not finite: it would decide experts.
void stream_weights(const WeightPlan& plan, const WeightSink& sink, const WeightProgress& progress);

}  // namespace helix::decode
