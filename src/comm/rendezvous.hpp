// SPDX-License-Identifier: Apache-2.0
// How the processes of a job find each other: rank 0 listens, the others connect, and all hear one verdict.
#pragma once

#include <algorithm>
#include <vector>

#include <helix/comm/bootstrap.hpp>

#include "comm/bootstrap_messages.hpp"
#include "comm/socket.hpp"

namespace helix::comm {

/// Rank 0's verdict says more than a deadline of one's own: so much longer than the timeout others wait for
/// it, and no longer than half of it, so that all end within twice the timeout.
inline constexpr milliseconds verdict_grace(milliseconds timeout) {
  return std::min(milliseconds(2000), timeout / 2);
}

struct Connections {
  std::vector<Socket> control;  // rank 0: by rank, its own closed; others: one
  std::vector<Socket> watch;
};

/// Bytes from the machine's random source. @throws Error(io).
Nonce new_nonce();

/// Rank 0's part: waits for all ranks, and tells them the verdict. @throws what it told them.
Connections serve(const BootstrapOptions& options);

/// The others' part: connects to rank 0 and waits for its verdict. @throws the verdict, or why there is none.
Connections join(const BootstrapOptions& options);

}  // namespace helix::comm
