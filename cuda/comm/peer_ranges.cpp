// SPDX-License-Identifier: Apache-2.0
// Takes the smallest kept range that fits, or maps a new one; if there is no memory for it, unmaps kept ones
// of the same devices.
#include "cuda/comm/peer_ranges.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include <helix/cuda/runtime.hpp>
#include <helix/error.hpp>

#include "cuda/runtime/device_scope.hpp"

namespace helix::cuda {

PeerRanges::Taken PeerRanges::take(const std::vector<int>& devices, std::size_t bytes, std::size_t multiple) {
  std::size_t stride = 0;
  for (const int device : devices) stride = std::max(stride, PeerMemory::stride(device, bytes, multiple));
  auto keep_last = [ranges = shared_from_this(), devices](PeerRange* last) {
    ranges->keep(devices, std::unique_ptr<PeerRange>(last));
  };
  std::unique_ptr<PeerRange> range = find_kept(devices, stride, multiple);
  const bool is_kept = range != nullptr;
  if (!is_kept) {
    try {
      range = map(devices, stride);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::capacity) throw;
      std::vector<Kept> kept = take_kept_of(devices);
      if (kept.empty()) throw;
      kept.clear();
      range = map(devices, stride);
    }
    for (std::size_t rank = 0; rank < devices.size(); ++rank)
      range->zero(static_cast<int>(rank), devices[rank]);
  }
  return {std::shared_ptr<const PeerRange>(range.release(), std::move(keep_last)), !is_kept};
}

std::unique_ptr<PeerRange> PeerRanges::find_kept(const std::vector<int>& devices, std::size_t stride,
                                                 std::size_t multiple) {
  const std::lock_guard lock(mutex_);
  auto best = kept_.end();
  for (auto it = kept_.begin(); it != kept_.end(); ++it) {
    const auto size = static_cast<std::size_t>(it->range->stride());
    if (it->devices != devices || size < stride || size % multiple != 0) continue;
    if (best == kept_.end() || it->range->stride() < best->range->stride()) best = it;
  }
  if (best == kept_.end()) return nullptr;
  std::unique_ptr<PeerRange> found = std::move(best->range);
  kept_.erase(best);
  return found;
}

std::vector<PeerRanges::Kept> PeerRanges::take_kept_of(const std::vector<int>& devices) {
  const auto is_of_others = [&](const Kept& kept) {
    return !std::ranges::all_of(kept.devices,
                                [&](int device) { return std::ranges::count(devices, device) > 0; });
  };
  const std::lock_guard lock(mutex_);
  const auto first = std::partition(kept_.begin(), kept_.end(), is_of_others);
  std::vector<Kept> taken(std::make_move_iterator(first), std::make_move_iterator(kept_.end()));
  kept_.erase(first, kept_.end());
  return taken;
}

std::unique_ptr<PeerRange> PeerRanges::map(const std::vector<int>& devices, std::size_t stride) {
  std::vector<PeerMemory> memories;
  for (const int device : devices) {
    const DeviceScope scope(device);
    memories.push_back(PeerMemory::create(device, stride, false));
  }
  return std::make_unique<PeerRange>(std::move(memories), stride, devices);
}

void PeerRanges::keep(const std::vector<int>& devices, std::unique_ptr<PeerRange> range) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    kept_.push_back({devices, nullptr});
    kept_.back().range = std::move(range);
  } catch (...) {
    // No memory to keep it: it is unmapped now.
  }
}

}  // namespace helix::cuda
