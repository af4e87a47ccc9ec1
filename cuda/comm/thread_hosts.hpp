// SPDX-License-Identifier: Apache-2.0
// ThreadHosts: the hosts of a PeerComm whose ranks are threads of one process.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/local_group.hpp"
#include "cuda/comm/peer_hosts.hpp"
#include "cuda/comm/peer_islands.hpp"
#include "cuda/comm/peer_ranges.hpp"

namespace helix::cuda {

/// Hosts of ranks that are threads of one process.
class ThreadHosts : public PeerHosts {
 public:
  /// `devices` and `islands` are by root rank; `ranges` are the root's. `meets`: whether hosts meet before
  /// and after they queue a kernel that waits for peers. Otherwise a rank that is ahead or behind may call
  /// what waits for the device (cudaFree, mapping memory). Such a call waits for another rank's kernel, which
  /// waits for a kernel that the call keeps from being queued.
  ThreadHosts(std::shared_ptr<const PeerIslands> islands, std::shared_ptr<PeerRanges> ranges,
              std::shared_ptr<comm::Group> group, int rank, std::vector<int> devices, bool meets)
      : PeerHosts(islands->why_apart(group->root_ranks)),
        islands_(std::move(islands)),
        ranges_(std::move(ranges)),
        group_(std::move(group)),
        rank_(rank),
        devices_(std::move(devices)),
        meets_(meets) {}

  std::shared_ptr<const PeerRange> allocate(std::size_t bytes, std::size_t multiple) override;
  bool meets() const override { return meets_; }
  void queue_together(comm::Call& call, int peer, const std::function<void()>& queue) override;
  Part split(int color, int key, NcclComm* nccl) override;

 private:
  /// Returns when all ranks of the group, or this rank and `peer`, have arrived with equal calls.
  void meet(comm::Call& call, int peer);
  /// Zeroes this rank's part once no kernel of the group uses the range. Collective; returns when all ranks
  /// are done.
  void zero_own(const PeerRange& range);

  std::shared_ptr<const PeerIslands> islands_;
  std::shared_ptr<PeerRanges> ranges_;
  std::shared_ptr<comm::Group> group_;
  int rank_;
  std::vector<int> devices_;
  bool meets_;
};

}  // namespace helix::cuda
