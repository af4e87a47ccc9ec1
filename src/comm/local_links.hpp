// SPDX-License-Identifier: Apache-2.0
// LocalLinks: sockets between all processes of a job on one machine, which carry descriptors too.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <helix/comm/bootstrap.hpp>

#include "comm/socket.hpp"

namespace helix::comm {

/// A connection to each other process of a job, by local sockets of the network namespace that they share.
/// Each end has shown that it knows what the job's ranks told each other over the Bootstrap, and that it is
/// of the same user. One thread at a time.
class LocalLinks {
 public:
  /// Connects all processes of the job. Collective. Null on all ranks, with the reason, where they cannot:
  /// on several machines, or in several network namespaces. @throws what the Bootstrap throws.
  static std::shared_ptr<LocalLinks> connect(Bootstrap& bootstrap, std::string& why_not);

  /// Sends a message, with a descriptor unless that is -1. @throws Error(peer_failed).
  void send(int rank, std::span<const std::byte> message, int descriptor = -1) const;
  /// Receives a message of as many bytes, and its descriptor or -1. @throws Error(timeout) past the job's
  /// timeout, Error(peer_failed).
  int recv(int rank, std::span<std::byte> message) const;

 private:
  explicit LocalLinks(const Bootstrap& bootstrap) : bootstrap_(bootstrap) {}

  Bootstrap bootstrap_;
  std::vector<Socket> links_;  // by rank; none to oneself
};

}  // namespace helix::comm
