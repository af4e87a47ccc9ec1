// SPDX-License-Identifier: Apache-2.0
// PeerIslands: which ranks of a PeerComm's root reach each other's memory.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <helix/comm/bootstrap.hpp>

#include "comm/islands.hpp"
#include "comm/local_links.hpp"

namespace helix::cuda {

/// The islands of a root, equal on all of its ranks. An island is ranks that all reach each other's memory,
/// on devices with the same compute capability and number of SMs.
class PeerIslands {
 public:
  /// Islands of threads of this process; rank r uses devices[r].
  static std::shared_ptr<const PeerIslands> of_devices(std::span<const int> devices);
  /// Islands of the processes of a job; this one uses `device`. Each process tries to map memory of all that
  /// it is linked with, because its own driver may not even see their devices. Collective over the job.
  /// @throws what the Bootstrap and the links throw.
  static std::shared_ptr<const PeerIslands> of_processes(comm::Bootstrap bootstrap,
                                                         const std::shared_ptr<const comm::LocalLinks>& links,
                                                         int device);

  /// Why these ranks have no windows together; empty: they have. Empty on all ranks or on none.
  std::string why_apart(std::span<const int> root_ranks) const;
  /// Whether any two ranks have windows together.
  bool has_pair() const { return comm::has_pair(islands_); }

 private:
  PeerIslands(std::vector<int> islands, std::string obstacle)
      : islands_(std::move(islands)), obstacle_(std::move(obstacle)) {}

  std::vector<int> islands_;  // by rank
  std::string obstacle_;      // how devices differ, or the first error of this rank's attempts; may be empty
};

}  // namespace helix::cuda
