// SPDX-License-Identifier: Apache-2.0
// Replaces the global operator new and delete with ones that count. They are in a file of their own, so that
// no compiler inlines one of a pair and not the other.
#include "support/allocations.hpp"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

std::atomic<bool> is_counting = false;
std::atomic<std::int64_t> num_allocations = 0;
thread_local std::int64_t own_allocations = 0;
thread_local std::int64_t failing_allocation =
    -1;  // number of the allocation that fails on this thread; negative: none

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (is_counting) ++num_allocations;
  if (own_allocations++ == failing_allocation) throw std::bad_alloc();
  bytes = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, bytes == 0 ? alignment : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// All other forms call these.
void* operator new(std::size_t bytes) {
  return allocate(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace helix::test {

void start_counting_allocations() {
  num_allocations = 0;
  is_counting = true;
}

void fail_own_allocation(std::int64_t number) {
  own_allocations = 0;
  failing_allocation = number;
}

std::int64_t stop_failing_own_allocations() {
  failing_allocation = -1;
  return own_allocations;
}

std::int64_t stop_counting_allocations() {
  is_counting = false;
  return num_allocations;
}

}  // namespace helix::test
