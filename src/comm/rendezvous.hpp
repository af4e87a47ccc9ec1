// SPDX-License-Identifier: Apache-2.0
// How the processes of a job find each other: rank 0 listens, the others connect, and all get one verdict.
#pragma once

#include <algorithm>
#include <vector>

#include <helix/comm/bootstrap.hpp>

#include "comm/bootstrap_messages.hpp"
#include "comm/socket.hpp"

namespace helix::comm {

/// How much longer than the timeout the other ranks wait for rank 0's verdict, which says more than their own
/// deadline. At most half of the timeout, so that all ranks end within twice the timeout.
inline constexpr milliseconds verdict_grace(milliseconds timeout) {
  return std::min(milliseconds(2000), timeout / 2);
}

struct Connections {
  std::vector<Socket> control;  // rank 0: by rank, its own closed; others: one entry
  std::vector<Socket> watch;
};

/// Bytes from the machine's random source. @throws Error(io).
Nonce new_nonce();

/// Rank 0's part: waits for all ranks and sends them the verdict. @throws that verdict, if it is an error.
Connections serve(const BootstrapOptions& options);

/// The others' part: connects to rank 0 and waits for its verdict. @throws the verdict, or why there is none.
Connections join(const BootstrapOptions& options);

}  // namespace helix::comm
