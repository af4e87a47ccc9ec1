// SPDX-License-Identifier: Apache-2.0
// The two ways in which the hosts of a PeerComm meet.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "comm/local_group.hpp"
#include "comm/local_links.hpp"
#include "cuda/comm/peer_hosts.hpp"

namespace helix::cuda {

/// Ranks that are threads of one process.
class ThreadHosts : public PeerHosts {
 public:
  /// `devices`: by root rank.
  /// `meets`: before each kernel that waits. Calls that wait for the device (cudaFree, the driver's mapping
  /// of memory) would otherwise wait for kernels of ranks of the same device, which wait for the caller.
  ThreadHosts(std::shared_ptr<comm::Group> group, int rank, std::vector<int> devices, bool meets)
      : group_(std::move(group)), rank_(rank), devices_(std::move(devices)), meets_(meets) {}

  /// Memory of all ranks of a process, by rank on `devices`, as allocate() gives it.
  static std::shared_ptr<const PeerRange> map_all(const std::vector<int>& devices, std::size_t bytes,
                                                  std::size_t multiple);

  std::shared_ptr<const PeerRange> allocate(std::size_t bytes, std::size_t multiple) override;
  void meet(comm::Call& call, int peer) override;
  Part split(int color, int key) override;

 private:
  std::shared_ptr<comm::Group> group_;
  int rank_;
  std::vector<int> devices_;
  bool meets_;
};

/// Ranks that are processes of one machine.
class ProcessHosts : public PeerHosts {
 public:
  ProcessHosts(std::shared_ptr<comm::LocalLinks> links, std::vector<int> root_ranks, int rank, int device)
      : links_(std::move(links)), root_ranks_(std::move(root_ranks)), rank_(rank), device_(device) {}

  std::shared_ptr<const PeerRange> allocate(std::size_t bytes, std::size_t multiple) override;
  /// Contexts of processes do not wait for each other.
  void meet(comm::Call& /*call*/, int /*peer*/) override {}
  Part split(int color, int key) override;

 private:
  /// The values of all ranks.
  template <class T>
  std::vector<T> all_of(const T& own) const;
  /// The descriptors of all ranks for one's own; closed where a rank has none.
  std::vector<comm::Socket> exchange(const comm::Socket& own) const;

  std::shared_ptr<comm::LocalLinks> links_;
  std::vector<int> root_ranks_;
  int rank_;
  int device_;
};

}  // namespace helix::cuda
