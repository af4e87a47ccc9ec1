// SPDX-License-Identifier: Apache-2.0
// LocalLinks: sockets between the processes of a job on one machine, which can carry file descriptors.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <helix/comm/bootstrap.hpp>
#include <helix/export.hpp>

#include "comm/first_failure.hpp"
#include "comm/islands.hpp"
#include "comm/socket.hpp"

namespace helix::comm {

/// Connections to all neighbours: the other processes of the job with the same machine, network namespace and
/// given name. They use local sockets of that namespace. Each end has proved that it knows a token that the
/// job's ranks exchanged over the Bootstrap, and that it runs as the same user. One thread at a time, over
/// all groups.
class HELIX_API LocalLinks {
 public:
  /// Connects the processes of the job. Collective. Processes of one machine that give different `name`s are
  /// not connected. If a process cannot connect to its neighbours, none of them are linked, and why_not()
  /// says why. @throws what the Bootstrap throws.
  static std::shared_ptr<const LocalLinks> connect(Bootstrap& bootstrap, std::string_view name);

  static constexpr int kNoRoom = -2;

  /// Islands of linked ranks, by rank; equal on all ranks of the job.
  const std::vector<int>& neighbourhoods() const { return neighbourhoods_; }
  /// Why this process could not be linked with its neighbours; empty: it is.
  const std::string& why_not() const { return why_not_; }

  // After a message fails to be sent or received, all later ones fail: see FirstFailure. While a message is
  // sent or received, the job's watch sees that this rank waits. If it names nobody within the job's timeout
  // and kWatchGrace, the wait ends with Error(timeout).

  /// Sends a message, with a descriptor unless that is -1. @throws Error(timeout) if the rank reads too
  /// little, Error(peer_failed).
  void send(int rank, std::span<const std::byte> message, int descriptor = -1) const;
  /// Receives a message of exactly this size; returns its descriptor, -1, or kNoRoom: one was sent, but this
  /// process may have no more open files. @throws Error(timeout), Error(peer_failed).
  int recv(int rank, std::span<std::byte> message) const;

 private:
  explicit LocalLinks(const Bootstrap& bootstrap) : bootstrap_(bootstrap) {}
  void send_message(int rank, std::span<const std::byte> message, int descriptor) const;
  int recv_message(int rank, std::span<std::byte> message) const;

  Bootstrap bootstrap_;
  std::vector<Socket> links_;  // by rank; open for neighbours
  std::vector<int> neighbourhoods_;
  std::string why_not_;
  mutable FirstFailure messages_;
};

}  // namespace helix::comm
