// SPDX-License-Identifier: Apache-2.0
// The two ways in which the hosts of a PeerComm meet.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <helix/comm/bootstrap.hpp>

#include "comm/linked_group.hpp"
#include "comm/local_group.hpp"
#include "comm/local_links.hpp"
#include "cuda/comm/peer_hosts.hpp"
#include "cuda/comm/peer_islands.hpp"
#include "cuda/comm/peer_ranges.hpp"

namespace helix::cuda {

/// Ranks that are threads of one process.
class ThreadHosts : public PeerHosts {
 public:
  /// `devices`: by root rank, as `islands` are. `ranges`: of the root.
  /// `meets`: before each kernel that waits. Calls that wait for the device (cudaFree, the driver's mapping
  /// of memory) would otherwise wait for kernels of ranks of the same device, which wait for the caller.
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
  void meet(comm::Call& call, int peer) override;
  Part split(int color, int key, NcclComm* nccl) override;

 private:
  /// Zeroes this rank's part once no kernel of the group uses the range. Collective; returns when all have.
  void zero_own(const PeerRange& range);

  std::shared_ptr<const PeerIslands> islands_;
  std::shared_ptr<PeerRanges> ranges_;
  std::shared_ptr<comm::Group> group_;
  int rank_;
  std::vector<int> devices_;
  bool meets_;
};

/// A process of a job: what all of its groups share.
struct PeerProcess {
  comm::Bootstrap bootstrap;
  std::shared_ptr<const comm::LocalLinks> links;
  std::shared_ptr<const PeerIslands> islands;
  int device = 0;
};

/// Ranks that are processes, of one island or of several.
class ProcessHosts : public PeerHosts {
 public:
  ProcessHosts(std::shared_ptr<const PeerProcess> process, const std::vector<int>& root_ranks, int rank)
      : PeerHosts(process->islands->why_apart(root_ranks)),
        process_(std::move(process)),
        group_(process_->links, root_ranks, rank) {}

  std::shared_ptr<const PeerRange> allocate(std::size_t bytes, std::size_t multiple) override;
  /// Contexts of processes do not wait for each other.
  void meet(comm::Call& /*call*/, int /*peer*/) override {}
  Part split(int color, int key, NcclComm* nccl) override;

 private:
  /// The values of all ranks: over local sockets where these join them, over the Bootstrap where they are all
  /// ranks of the job, whose groups it does not know, else over NCCL.
  template <class T>
  std::vector<T> all_of(const T& own, NcclComm* nccl) const;

  std::shared_ptr<const PeerProcess> process_;
  comm::LinkedGroup group_;
};

}  // namespace helix::cuda
