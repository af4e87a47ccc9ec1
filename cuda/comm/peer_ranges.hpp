// SPDX-License-Identifier: Apache-2.0
// PeerRanges: memory that the ranks of one process, which are threads, map for each other.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/comm/peer_memory.hpp"

namespace helix::cuda {

/// The mapped ranges of all groups of a root. Unmapping a range waits for the devices of all its ranks, whose
/// kernels may wait for work that the caller has not queued yet. So a range that is no longer used stays
/// mapped for reuse until the last group ends, or until a group has no memory for another range. That group
/// then unmaps those whose devices are all its own: its ranks wait for it, and a device of others may wait
/// for one of them.
class PeerRanges : public std::enable_shared_from_this<PeerRanges> {
 public:
  static std::shared_ptr<PeerRanges> create() { return std::shared_ptr<PeerRanges>(new PeerRanges); }

  struct Taken {
    std::shared_ptr<const PeerRange> range;
    bool is_zeroed = false;  ///< If not, it was used before, and kernels may still use it.
  };
  /// Takes a range for ranks on `devices`, with at least `bytes` for each, at a stride that is a multiple of
  /// `multiple` bytes. @throws Error(unsupported) if the devices do not reach each other's memory,
  /// Error(capacity).
  Taken take(const std::vector<int>& devices, std::size_t bytes, std::size_t multiple);

 private:
  struct Kept {
    std::vector<int> devices;  // by rank
    std::unique_ptr<PeerRange> range;
  };

  PeerRanges() = default;

  std::unique_ptr<PeerRange> find_kept(const std::vector<int>& devices, std::size_t stride,
                                       std::size_t multiple);
  /// Takes the kept ranges that use no device but `devices`.
  std::vector<Kept> take_kept_of(const std::vector<int>& devices);
  static std::unique_ptr<PeerRange> map(const std::vector<int>& devices, std::size_t stride);
  void keep(const std::vector<int>& devices, std::unique_ptr<PeerRange> range) noexcept;

  std::mutex mutex_;
  std::vector<Kept> kept_;
};

}  // namespace helix::cuda
