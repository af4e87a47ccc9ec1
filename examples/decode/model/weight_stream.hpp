// SPDX-License-Identifier: Apache-2.0
// stream_weights: the bytes of a WeightPlan out of the mapped files, a few MiB at a time.
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

/// Feeds all bytes of the plan to `sink`, a few MiB at a time, giving mapped pages back as it goes, so that
/// resident memory grows by what the sink keeps.
void stream_weights(const WeightPlan& plan, const WeightSink& sink, const WeightProgress& progress);

}  // namespace helix::decode
