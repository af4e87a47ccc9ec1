// SPDX-License-Identifier: Apache-2.0
// PeerHosts: how the hosts of a PeerComm's ranks agree, as threads of one process or as processes.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <helix/cuda/nccl_comm.hpp>

#include "comm/call.hpp"
#include "cuda/comm/peer_memory.hpp"

namespace helix::cuda {

/// Where the hosts of a group meet. Calls are collective over the group.
class PeerHosts {
 public:
  virtual ~PeerHosts() = default;
  PeerHosts(const PeerHosts&) = delete;
  PeerHosts& operator=(const PeerHosts&) = delete;

  /// Why the ranks cannot reach each other's memory; empty: they can. Empty on all ranks or on none.
  const std::string& why_apart() const { return why_apart_; }

  /// If they can: allocates at least `bytes` on each rank, at a stride that is a multiple of `multiple`
  /// bytes. @throws Error(unsupported), Error(capacity) or Error(io) on all ranks; what a bounded wait for
  /// other ranks throws.
  virtual std::shared_ptr<const PeerRange> allocate(std::size_t bytes, std::size_t multiple) = 0;

  /// Whether the hosts meet when they queue kernels that wait for peers, so that all of these are queued
  /// soon. Processes need not: their contexts do not wait for each other.
  virtual bool meets() const { return false; }
  /// Calls queue(), which queues this rank's kernel of `call`. If hosts meet, does so between two meetings,
  /// and the first checks that the calls are equal. `peer`: the other end of a send or recv, else -1.
  /// @throws what queue() throws, which ends the group unless all of its ranks throw; what a meeting throws.
  virtual void queue_together(comm::Call& /*call*/, int /*peer*/, const std::function<void()>& queue) {
    queue();
  }

  /// A part of the group.
  struct Part {
    std::shared_ptr<PeerHosts> hosts;
    int rank = 0;
    std::vector<int> root_ranks;  // of its ranks
  };
  /// The part with the ranks of equal `color`, ordered by (key, rank). `nccl`: this group's, for hosts
  /// without another way to meet; may be null. @throws Error(unsupported) on all ranks if there is no way.
  virtual Part split(int color, int key, NcclComm* nccl) = 0;

 protected:
  explicit PeerHosts(std::string why_apart) : why_apart_(std::move(why_apart)) {}

 private:
  std::string why_apart_;
};

}  // namespace helix::cuda
