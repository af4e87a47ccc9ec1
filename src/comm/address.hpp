// SPDX-License-Identifier: Apache-2.0
// Where rank 0 listens and where the others find it.
#pragma once

#include <functional>
#include <vector>

#include <helix/comm/bootstrap.hpp>

#include "comm/socket.hpp"

namespace helix::comm {

/// Rank 0: listens on each address of this machine that the job's address resolves to; on all interfaces
/// where a host name resolves to loopback addresses alone and the job may span machines (Debian's /etc/hosts
/// gives a machine's own name 127.0.1.1, where no other machine comes through).
/// @throws Error(io) if the port is taken, the name does not resolve until the deadline, or no address is
/// this machine's.
std::vector<Socket> listen_for_ranks(const BootstrapOptions& options, Clock::time_point deadline);

/// Other ranks: connects to each address of rank 0 in turn, again and again, until `greet(socket)` holds.
/// `greet` returns whether this is the one, and says in `reason` why not.
/// @throws Error(timeout) with the last reason.
Socket connect_to_rank_0(const BootstrapOptions& options, Clock::time_point deadline,
                         const std::function<bool(const Socket& socket, std::string& reason)>& greet);

}  // namespace helix::comm
