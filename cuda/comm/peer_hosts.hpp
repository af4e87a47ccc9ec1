// SPDX-License-Identifier: Apache-2.0
// PeerHosts: what the ranks of a PeerComm agree on by their hosts, as threads of a process or as processes.
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

  /// Why the ranks do not reach each other's memory; empty: they do. Empty on all ranks or on none.
  const std::string& why_apart() const { return why_apart_; }

  /// Where they do: memory of each rank, `bytes` at least, at a stride that is a multiple of `multiple`
  /// bytes. @throws Error(unsupported), Error(capacity) on all ranks alike; what a bounded wait for other
  /// ranks throws.
  virtual std::shared_ptr<const PeerRange> allocate(std::size_t bytes, std::size_t multiple) = 0;

  /// Whether hosts meet where each queues a kernel that waits for the peers, as it matters that the others'
  /// are queued soon. Contexts of processes do not wait for each other.
  virtual bool meets() const { return false; }
  /// Where hosts meet, calls queue(), which queues this rank's kernel of `call`, between two meetings, the
  /// first with equal calls. `peer`: the other end of a send or recv, else -1. @throws what queue() throws,
  /// which ends the group at once, unless all of its ranks throw; what a meeting throws.
  virtual void queue_together(comm::Call& /*call*/, int /*peer*/, const std::function<void()>& queue) {
    queue();
  }

  /// A part of the group.
  struct Part {
    std::shared_ptr<PeerHosts> hosts;
    int rank = 0;
    std::vector<int> root_ranks;  // of its ranks
  };
  /// The part of the ranks of equal `color`, ordered by (key, rank). `nccl`: of this group, for hosts that
  /// have no other way to meet; may be null. @throws Error(unsupported) on all ranks if there is none.
  virtual Part split(int color, int key, NcclComm* nccl) = 0;

 protected:
  explicit PeerHosts(std::string why_apart) : why_apart_(std::move(why_apart)) {}

 private:
  std::string why_apart_;
};

}  // namespace helix::cuda
