// SPDX-License-Identifier: Apache-2.0
// ProcessHosts: the hosts of a PeerComm whose ranks are processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <helix/comm/bootstrap.hpp>

#include "comm/host_call.hpp"
#include "comm/linked_group.hpp"
#include "comm/local_links.hpp"
#include "cuda/comm/peer_hosts.hpp"
#include "cuda/comm/peer_islands.hpp"

namespace helix::cuda {

/// The order of a process's host calls. Processes are linked once for all groups, so a call must end before
/// the next begins, on whatever group.
struct HostTurns {
  std::mutex mutex;
  std::uint64_t last_group = 0;  // largest number of a group, by comm::next_group()
};

/// What all groups of one process of a job share.
struct PeerProcess {
  comm::Bootstrap bootstrap;
  std::shared_ptr<const comm::LocalLinks> links;
  std::shared_ptr<const PeerIslands> islands;
  int device = 0;
  std::shared_ptr<HostTurns> turns = std::make_shared<HostTurns>();
};

/// Hosts of ranks that are processes, of one island or of several.
class ProcessHosts : public PeerHosts {
 public:
  /// `number`: of the group, by comm::next_group(); 0: the root.
  ProcessHosts(std::shared_ptr<const PeerProcess> process, const std::vector<int>& root_ranks, int rank,
               std::uint64_t number = 0)
      : PeerHosts(process->islands->why_apart(root_ranks)),
        process_(std::move(process)),
        group_(process_->links, root_ranks, rank),
        number_(number) {}

  std::shared_ptr<const PeerRange> allocate(std::size_t bytes, std::size_t multiple) override;
  Part split(int color, int key, NcclComm* nccl) override;

 private:
  /// A call of this rank on this group. The caller holds the mutex of the turns.
  comm::HostCall new_call() const;
  /// Gathers a value from all ranks: over local sockets if these connect them; over the Bootstrap, which
  /// knows no groups, if they are all ranks of the job; else over NCCL.
  template <class T>
  std::vector<T> all_of(const T& own, NcclComm* nccl) const;

  std::shared_ptr<const PeerProcess> process_;
  comm::LinkedGroup group_;
  std::uint64_t number_;
};

}  // namespace helix::cuda
