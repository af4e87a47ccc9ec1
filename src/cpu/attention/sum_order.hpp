// SPDX-License-Identifier: Apache-2.0
// The order in which attention of few rows sums the weights and values of a whole tile.
#pragma once

namespace helix::cpu {

/// Rounding depends on it, so it is the same for all variants of a kernel, and for the whole process.
enum class SumOrder {
  interleaved,  ///< A token of each of several runs of the tile in turn, for cores that follow many streams.
  in_order      ///< Token by token, for cores that read a single stream fastest.
};

/// The order of this CPU: no timing decides it, so that results are the same in every run. On Zen 5 one
/// thread reads keys and values at 30 GB/s in order and 26 interleaved, where a streaming read gets 38.
SumOrder sum_order() noexcept;

/// Replaces the order, for tests. Calls that are under way may still use the one before.
void set_sum_order(SumOrder order) noexcept;

}  // namespace helix::cpu
