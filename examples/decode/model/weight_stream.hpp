// SPDX-License-Identifier: Apache-2.0
// load_weights() and stream_weights(): load the bytes of a WeightPlan from its files, into host memory with
// all threads of the rank, or through a sink.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include <helix/cpu/thread_pool.hpp>

#include "model/weight_plan.hpp"

namespace helix::decode {

/// Called from time to time on the calling thread, with the bytes loaded so far and the total.
using WeightProgress = std::function<void(std::int64_t done, std::int64_t total)>;

/// Reads the targets of `plan` that are not in place into `buffers` (host memory of plan.buffer_bytes) and
/// makes the others resident. The work is shared among `threads`. No byte is copied twice: if types are
/// equal, the file is read directly to the final address.
/// @throws Error(io) naming the file if one shrank or cannot be read, Error(invalid_file) naming tensor and
/// element if a router's weight or bias is not finite, in place or not.
void load_weights(const WeightPlan& plan, std::span<std::byte* const> buffers, cpu::ThreadPool& threads,
                  const WeightProgress& progress);

/// Takes `bytes` of host memory for `offset` of a buffer. The memory is reused after the call returns.
using WeightSink =
    std::function<void(std::size_t buffer, std::int64_t offset, const std::byte* data, std::size_t bytes)>;

/// Reads the targets of `plan` that are not in place and passes them to `sink`, about 1 MiB at a time.
/// Resident memory grows only by what the sink keeps.
/// @throws as load_weights() does.
void stream_weights(const WeightPlan& plan, const WeightSink& sink, const WeightProgress& progress);

}  // namespace helix::decode
