// SPDX-License-Identifier: Apache-2.0
// PeerRanges: the memory that ranks which are threads of one process map for each other.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/comm/peer_memory.hpp"

namespace helix::cuda {

/// The ranges of all groups of a root. To unmap one is to wait for the devices of all its ranks, whose
/// kernels may wait for what the caller has not queued yet. So one that nobody holds any more stays mapped
/// for the next that is asked for, and all are unmapped with the last group.
class PeerRanges : public std::enable_shared_from_this<PeerRanges> {
 public:
  static std::shared_ptr<PeerRanges> create() { return std::shared_ptr<PeerRanges>(new PeerRanges); }

  struct Taken {
    std::shared_ptr<const PeerRange> range;
    bool is_zeroed = false;  ///< Else it has been used, and kernels may still use it.
  };
  /// Memory by rank on `devices`, `bytes` each at least, at a stride that is a multiple of `multiple` bytes.
  /// @throws Error(unsupported) if the devices do not reach each other's memory, Error(capacity).
  Taken take(const std::vector<int>& devices, std::size_t bytes, std::size_t multiple);

 private:
  struct Kept {
    std::vector<int> devices;  // by rank
    std::unique_ptr<PeerRange> range;
  };

  PeerRanges() = default;

  std::unique_ptr<PeerRange> find_kept(const std::vector<int>& devices, std::size_t stride,
                                       std::size_t multiple);
  static std::unique_ptr<PeerRange> map(const std::vector<int>& devices, std::size_t stride);
  void keep(const std::vector<int>& devices, std::unique_ptr<PeerRange> range) noexcept;

  std::mutex mutex_;
  std::vector<Kept> kept_;
};

}  // namespace helix::cuda
