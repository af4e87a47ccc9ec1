// SPDX-License-Identifier: Apache-2.0
// PeerHosts: what the ranks of a PeerComm agree on by their hosts, as threads of a process or as processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/call.hpp"
#include "cuda/comm/peer_memory.hpp"

namespace helix::cuda {

/// Where the hosts of a group meet. Calls are collective over the group.
class PeerHosts {
 public:
  virtual ~PeerHosts() = default;

  /// Memory of each rank, `bytes` at least, at a stride that is a multiple of `multiple` bytes. @throws
  /// Error(unsupported), Error(capacity) on all ranks alike; what a bounded wait for other ranks throws.
  virtual std::shared_ptr<const PeerRange> allocate(std::size_t bytes, std::size_t multiple) = 0;

  /// Before a kernel that waits for the peers is queued: where it matters that their hosts have come too,
  /// returns when all of the group have, with equal calls. `peer`: the other end of a send or recv, else -1.
  virtual void meet(comm::Call& call, int peer) = 0;

  /// A part of the group.
  struct Part {
    std::shared_ptr<PeerHosts> hosts;
    int rank = 0;
    std::vector<int> root_ranks;  // of its ranks
  };
  /// The part of the ranks of equal `color`, ordered by (key, rank).
  virtual Part split(int color, int key) = 0;
};

/// Stride of memories of `bytes`: whole granules of the device, and of `multiple`.
std::size_t peer_stride(int device, std::size_t bytes, std::size_t multiple);

}  // namespace helix::cuda
