// SPDX-License-Identifier: Apache-2.0
// sum_order(): the order of attention's sums, by CPU.
#include "cpu/attention/sum_order.hpp"

#include <atomic>

#include "cpu/x86_features.hpp"

namespace helix::cpu {
namespace {

SumOrder order_of_this_cpu() noexcept {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kZen5 = 0x1a;  // later families are taken to be like it
  if (amd_family() >= kZen5) return SumOrder::in_order;
#endif
  return SumOrder::interleaved;
}

std::atomic<SumOrder>& current_order() noexcept {
  static std::atomic<SumOrder> order{order_of_this_cpu()};
  return order;
}

}  // namespace

SumOrder sum_order() noexcept {
  return current_order().load(std::memory_order_relaxed);
}

void set_sum_order(SumOrder order) noexcept {
  current_order().store(order, std::memory_order_relaxed);
}

}  // namespace helix::cpu
