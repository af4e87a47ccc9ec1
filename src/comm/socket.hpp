// SPDX-License-Identifier: Apache-2.0
// A descriptor that its owner closes, mostly of a socket, and transfers over sockets that end at a deadline.
#pragma once

#include <cerrno>
#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/timeout.hpp"

namespace helix::comm {

/// How often a wait checks whether something else ends it.
inline constexpr milliseconds kPollSlice{100};

/// The text of an errno.
std::string words_of(int error);

/// Owns a descriptor: of a TCP or local socket, or also of an event, a file or memory of a device.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  /// Returns the descriptor, which the caller then owns.
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

/// Sends short messages at once too (TCP_NODELAY).
void send_without_delay(const Socket& socket);

/// Waits until the socket has one of `events`. Returns false if the deadline passes first.
bool wait_for(int fd, short events, Clock::time_point deadline);

enum class Transfer { done, closed, late };

/// A `keep_waiting` for waits that only their deadline ends.
inline constexpr auto kKeepWaiting = [] {};

/// Calls `keep_waiting()`, which may throw, then waits briefly for one of `events`. Returns false once the
/// patience is over.
template <class KeepWaiting>
bool wait_a_slice(int fd, short events, Patience& patience, KeepWaiting&& keep_waiting) {
  keep_waiting();
  if (patience.is_over()) return false;
  wait_for(fd, events, patience.next_look());
  return true;
}

/// Sends `rest` and advances it past what was sent. Calls `keep_waiting()`, which may throw, a few times a
/// second.
template <class KeepWaiting>
Transfer send_rest(int fd, std::span<const std::byte>& rest, Clock::time_point deadline,
                   KeepWaiting&& keep_waiting) {
  Patience patience(deadline);
  while (!rest.empty()) {
    const ssize_t sent = ::send(fd, rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      rest = rest.subspan(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_a_slice(fd, POLLOUT, patience, keep_waiting)) return Transfer::late;
    } else if (errno != EINTR) {
      return Transfer::closed;
    }
  }
  return Transfer::done;
}

/// Sends exactly `bytes`.
template <class KeepWaiting>
Transfer send_all(int fd, const void* data, std::size_t bytes, Clock::time_point deadline,
                  KeepWaiting&& keep_waiting) {
  std::span<const std::byte> rest(static_cast<const std::byte*>(data), bytes);
  return send_rest(fd, rest, deadline, keep_waiting);
}

/// Receives exactly `bytes`. Calls `keep_waiting()`, which may throw, a few times a second.
template <class KeepWaiting>
Transfer recv_all(int fd, void* data, std::size_t bytes, Clock::time_point deadline,
                  KeepWaiting&& keep_waiting) {
  char* position = static_cast<char*>(data);
  Patience patience(deadline);
  while (bytes > 0) {
    const ssize_t received = ::recv(fd, position, bytes, MSG_DONTWAIT);
    if (received > 0) {
      position += received;
      bytes -= static_cast<std::size_t>(received);
    } else if (received == 0) {
      return Transfer::closed;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_a_slice(fd, POLLIN, patience, keep_waiting)) return Transfer::late;
    } else if (errno != EINTR) {
      return Transfer::closed;
    }
  }
  return Transfer::done;
}

}  // namespace helix::comm
