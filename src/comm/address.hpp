// SPDX-License-Identifier: Apache-2.0
// Where rank 0 listens and the other ranks connect.
#pragma once

#include <functional>
#include <vector>

#include <helix/comm/bootstrap.hpp>

#include "comm/socket.hpp"

namespace helix::comm {

/// Rank 0: listens on each address of this machine that the job's address resolves to; on all interfaces if a
/// host name resolves to loopback addresses only and the job may span machines (Debian's /etc/hosts maps a
/// machine's own name to 127.0.1.1, which other machines cannot reach).
/// @throws Error(io) if the port is taken, the name does not resolve before the deadline, or no address is
/// this machine's.
std::vector<Socket> listen_for_ranks(const BootstrapOptions& options, Clock::time_point deadline);

/// Other ranks: tries the addresses of rank 0 in turn, repeatedly, until `greet(socket)` returns true.
/// `greet` returns whether the listener is this job's rank 0, and sets `reason` if not.
/// @throws Error(timeout) with the last reason.
Socket connect_to_rank_0(const BootstrapOptions& options, Clock::time_point deadline,
                         const std::function<bool(const Socket& socket, std::string& reason)>& greet);

}  // namespace helix::comm
