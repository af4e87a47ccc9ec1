// SPDX-License-Identifier: Apache-2.0
// load_weights and stream_weights: the bytes of a WeightPlan out of its files, into host memory by all
// threads of the rank, or through a sink.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include <helix/cpu/thread_pool.hpp>

#include "model/weight_plan.hpp"

namespace helix::decode {

/// Told now and then, by the calling thread: bytes loaded so far, bytes in all.
using WeightProgress = std::function<void(std::int64_t done, std::int64_t total)>;

/// Reads the targets of `plan` that are not in place into `buffers` (host memory of plan.buffer_bytes) and
/// makes resident those that are, shared among `threads`. No byte is copied twice: equal types are read
/// straight from the file to where they are used.
/// @throws Error(io) naming the file if one shrank or cannot be read, Error(invalid_file) naming tensor and
/// element if a router's weight or bias is not finite, in place or not.
void load_weights(const WeightPlan& plan, std::span<std::byte* const> buffers, cpu::ThreadPool& threads,
                  const WeightProgress& progress);

/// Takes `bytes` of host memory for `offset` of a buffer; the memory is re-used on return.
using WeightSink =
    std::function<void(std::size_t buffer, std::int64_t offset, const std::byte* data, std::size_t bytes)>;

/// Reads the targets of `plan` that are not in place and feeds them to `sink`, about 1 MiB at a time, so that
/// resident memory grows by what the sink keeps. @throws as load_weights().
void stream_weights(const WeightPlan& plan, const WeightSink& sink, const WeightProgress& progress);

}  // namespace helix::decode
