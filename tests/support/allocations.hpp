// SPDX-License-Identifier: Apache-2.0
// Counts the calls of operator new on all threads. Link support/allocations.cpp, which replaces it.
#pragma once

#include <cstdint>

namespace helix::test {

void start_counting_allocations();

/// Allocations since start_counting_allocations().
std::int64_t stop_counting_allocations();

/// Allocations of all threads while `work` runs.
template <class Work>
std::int64_t allocations_in(const Work& work) {
  start_counting_allocations();
  work();
  return stop_counting_allocations();
}

/// From here on the allocation number `number` (0: the next) of the calling thread throws std::bad_alloc,
/// once; negative: none does. Starts to count the thread's allocations.
void fail_own_allocation(std::int64_t number);
/// Ends it. Returns the allocations of the calling thread since it began, the failed one included.
std::int64_t stop_failing_own_allocations();

}  // namespace helix::test
