// SPDX-License-Identifier: Apache-2.0
// Connections to a rendezvous from programs that are not ranks of the job.
#pragma once

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/bootstrap_messages.hpp"

namespace helix::test {

/// A connection that stays open, or half open, until it is destroyed.
class Stranger {
 public:
  /// Connects as soon as somebody listens, within `patience`, and sends `bytes`. Ignores failures.
  Stranger(int port, const std::string& bytes,
           std::chrono::milliseconds patience = std::chrono::seconds(10)) {
    sockaddr_in target{};
    target.sin_family = AF_INET;
    target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    target.sin_port = htons(static_cast<std::uint16_t>(port));
    const auto deadline = std::chrono::steady_clock::now() + patience;
    for (;;) {
      fd_ = ::socket(AF_INET, SOCK_STREAM, 0);
      // Binds to a port of its own: a socket that connects to a port without a listener may be assigned that
      // same port and connect to itself.
      sockaddr_in own = target;
      own.sin_port = 0;
      const bool is_bound = ::bind(fd_, reinterpret_cast<const sockaddr*>(&own), sizeof(own)) == 0;
      socklen_t length = sizeof(own);
      (void)::getsockname(fd_, reinterpret_cast<sockaddr*>(&own), &length);
      if (is_bound && own.sin_port != target.sin_port &&
          ::connect(fd_, reinterpret_cast<const sockaddr*>(&target), sizeof(target)) == 0)
        break;
      ::close(std::exchange(fd_, -1));
      if (std::chrono::steady_clock::now() >= deadline) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    (void)!::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  Stranger(Stranger&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Stranger& operator=(Stranger&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Stranger() {
    if (fd_ >= 0) ::close(fd_);
  }
  bool is_connected() const { return fd_ >= 0; }
  int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

/// The first bytes of strangers: nothing, HTTP, TLS, half of a message, far too much.
inline std::vector<std::string> first_words_of_strangers() {
  std::string tls("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);
  tls.append(506, '\x5a');
  std::string magic(sizeof(comm::kMagic), '\0');  // the beginning of a real rank's message
  std::memcpy(magic.data(), &comm::kMagic, magic.size());
  return {"",
          "GET / HTTP/1.1\r\nHost: helix\r\n\r\n",
          tls,
          magic.substr(0, 4),
          magic,
          magic + std::string(24, '\0'),
          magic + std::string(80, '\0'),
          magic + std::string(80, '\xff'),
          std::string(1 << 20, 'x'),
          magic + std::string(1 << 20, '\1'),
          std::string(1, '\0'),
          "SSH-2.0-OpenSSH_9.6\r\n"};
}

}  // namespace helix::test
