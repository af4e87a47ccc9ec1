// SPDX-License-Identifier: Apache-2.0
// Sockets: waits and sends that end at a deadline.
#include "comm/socket.hpp"

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
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) return false;
    pollfd entry{.fd = fd, .events = events, .revents = 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::min<std::int64_t>(left.count(), 60'000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw Error(ErrorCode::io, "poll failed: ", words_of(errno));
  }
}

Transfer send_all(int fd, const void* data, std::size_t bytes, Clock::time_point deadline) {
  const char* position = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(fd, position, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      position += sent;
      bytes -= static_cast<std::size_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(fd, POLLOUT, deadline)) return Transfer::late;
    } else if (errno != EINTR) {
      return Transfer::closed;
    }
  }
  return Transfer::done;
}

}  // namespace helix::comm
