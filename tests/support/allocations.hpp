// SPDX-License-Identifier: Apache-2.0
// Counts the calls of operator new on all threads. Link support/allocations.cpp, which replaces operator new.
#pragma once

#include <cstdint>

namespace helix::test {

void start_counting_allocations();

/// Number of allocations since start_counting_allocations().
std::int64_t stop_counting_allocations();

/// Number of allocations of all threads while `work` runs.
template <class Work>
std::int64_t allocations_in(const Work& work) {
  start_counting_allocations();
  work();
  return stop_counting_allocations();
}

/// Makes allocation `number` (0: the next) of the calling thread throw std::bad_alloc, once; negative: none.
/// Also starts to count the thread's allocations.
void fail_own_allocation(std::int64_t number);
/// Ends this. Returns the calling thread's allocations since it began, including the failed one.
std::int64_t stop_failing_own_allocations();

}  // namespace helix::test
