// SPDX-License-Identifier: Apache-2.0
// Sockets: waits that end at a deadline.
#include "comm/socket.hpp"

#include <algorithm>
#include <cstdint>
#include <system_error>

#include <netinet/in.h>
#include <netinet/tcp.h>

#include <helix/error.hpp>

namespace helix::comm {

std::string words_of(int error) {
  return std::generic_category().message(error);
}

void send_without_delay(const Socket& socket) {
  const int on = 1;
  (void)::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // fails on no TCP socket
}

bool wait_for(int fd, short events, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
    pollfd entry{.fd = fd, .events = events, .revents = 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000)));
    if (ready > 0) return true;
    if (ready == 0 && left <= 0) return false;
    if (ready < 0 && errno != EINTR) throw Error(ErrorCode::io, "poll failed: ", words_of(errno));
  }
}

}  // namespace helix::comm
