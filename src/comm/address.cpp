// SPDX-License-Identifier: Apache-2.0
// Resolves host names and opens sockets.
#include "comm/address.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <helix/error.hpp>

namespace helix::comm {
namespace {

constexpr int kBacklog = 1024;  // long enough that strangers do not fill it

struct Addresses {
  addrinfo* list = nullptr;

  Addresses() = default;
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
  ~Addresses() {
    if (list != nullptr) ::freeaddrinfo(list);
  }
  /// Returns 0, or a code for gai_strerror().
  int resolve(const std::string& host, int port, int flags = 0) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    return ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  }
};

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
  }
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

bool is_same(const addrinfo& a, const addrinfo& b) {
  return a.ai_addrlen == b.ai_addrlen && std::memcmp(a.ai_addr, b.ai_addr, a.ai_addrlen) == 0;
}

/// Whether the text itself means this machine, without a lookup in a table of hosts.
bool is_meant_local(const std::string& host) {
  if (host == "localhost" || host.starts_with("localhost.") || host.ends_with(".localhost")) return true;
  Addresses literal;
  return literal.resolve(host, 0, AI_NUMERICHOST) == 0;
}

/// A listening socket, or a closed one with errno set.
Socket try_listen(const sockaddr* address, socklen_t length, bool is_dual_stack = false) {
  Socket listener(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.is_open()) return {};
  const int on = 1;
  const int v6_only = is_dual_stack ? 0 : 1;
  (void)::setsockopt(listener.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address->sa_family == AF_INET6)
    (void)::setsockopt(listener.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &v6_only, sizeof(v6_only));
  if (::bind(listener.fd(), address, length) == 0 && ::listen(listener.fd(), kBacklog) == 0) return listener;
  const int error = errno;
  listener = Socket();
  errno = error;
  return {};
}

[[noreturn]] void refuse_port(const BootstrapOptions& options) {
  throw Error(ErrorCode::io, "bootstrap: rank 0 cannot listen on port ", options.port, ": ", words_of(errno),
              "; set MASTER_PORT to a free one on all ranks");
}

Socket listen_everywhere(const BootstrapOptions& options) {
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  any6.sin6_addr = in6addr_any;
  any6.sin6_port = htons(static_cast<std::uint16_t>(options.port));
  Socket listener = try_listen(reinterpret_cast<const sockaddr*>(&any6), sizeof(any6), true);
  if (listener.is_open()) return listener;
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  any.sin_port = htons(static_cast<std::uint16_t>(options.port));
  listener = try_listen(reinterpret_cast<const sockaddr*>(&any), sizeof(any));
  if (!listener.is_open()) refuse_port(options);
  return listener;
}

/// If rank 0's port is an ephemeral one, a connecting socket may get it as its own: TCP then connects the
/// socket to itself, and holds the port that rank 0 needs.
bool is_connected_to_itself(const Socket& socket) {
  sockaddr_storage own{};
  sockaddr_storage peer{};
  socklen_t own_length = sizeof(own);
  socklen_t peer_length = sizeof(peer);
  return ::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&own), &own_length) == 0 &&
         ::getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&peer), &peer_length) == 0 &&
         own_length == peer_length && std::memcmp(&own, &peer, own_length) == 0;
}

/// Connects to one address. Returns 0 or an errno.
int connect_socket(const Socket& socket, const addrinfo& entry, Clock::time_point deadline) {
  int error = 0;
  if (::connect(socket.fd(), entry.ai_addr, entry.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return errno;
    error = ETIMEDOUT;
    socklen_t length = sizeof(error);
    if (wait_for(socket.fd(), POLLOUT, std::min(deadline, Clock::now() + std::chrono::seconds(3))))
      (void)::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  return error == 0 && is_connected_to_itself(socket) ? ECONNREFUSED : error;
}

}  // namespace

std::vector<Socket> listen_for_ranks(const BootstrapOptions& options, Clock::time_point deadline) {
  const bool is_told = !options.listen_address.empty();
  const std::string& host = is_told ? options.listen_address : options.address;
  const char* variable = is_told ? "HELIX_LISTEN_ADDR" : "MASTER_ADDR";
  Addresses found;
  // A cluster may publish a name only after its first process has started.
  for (int status = found.resolve(host, options.port); status != 0;
       status = found.resolve(host, options.port)) {
    HELIX_EXPECTS(Clock::now() < deadline, ErrorCode::io, "bootstrap: rank 0 cannot resolve ", variable,
                  " \"", host, "\": ", ::gai_strerror(status));
    std::this_thread::sleep_for(milliseconds(100));
  }
  std::vector<Socket> listeners;
  std::vector<const addrinfo*> opened;  // with a listener
  bool is_loopback_only = true;
  int error = 0;
  for (const addrinfo* entry = found.list; entry != nullptr; entry = entry->ai_next) {
    // A table of hosts that lists a name twice yields its address twice.
    if (std::any_of(opened.begin(), opened.end(),
                    [&](const addrinfo* other) { return is_same(*other, *entry); }))
      continue;
    Socket listener = try_listen(entry->ai_addr, entry->ai_addrlen);
    if (listener.is_open()) {
      is_loopback_only = is_loopback_only && is_loopback(entry->ai_addr);
      listeners.push_back(std::move(listener));
      opened.push_back(entry);
    } else if (errno == EADDRINUSE || errno == EACCES) {
      refuse_port(options);
    } else {
      error = errno;
    }
  }
  HELIX_EXPECTS(
      !listeners.empty(), ErrorCode::io, "bootstrap: ", variable, " is \"", host,
      "\", which is no address of rank 0's machine (", words_of(error),
      "); set MASTER_ADDR to that machine's on all ranks, or, where they reach it by another address "
      "than its own (NAT, a container, a service), set HELIX_LISTEN_ADDR on rank 0 to the one to "
      "listen on, 0.0.0.0 for all");
  if (is_loopback_only && !is_told && !options.is_one_machine && !is_meant_local(host)) {
    listeners.clear();
    listeners.push_back(listen_everywhere(options));
  }
  return listeners;
}

Socket connect_to_rank_0(const BootstrapOptions& options, Clock::time_point deadline,
                         const std::function<bool(const Socket&, std::string&)>& greet) {
  std::string reason = "no time was left";
  while (Clock::now() < deadline) {
    Addresses found;
    const int status = found.resolve(options.address, options.port);
    if (status != 0) reason = ::gai_strerror(status);
    for (const addrinfo* entry = found.list; entry != nullptr; entry = entry->ai_next) {
      Socket socket(::socket(entry->ai_family, entry->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (!socket.is_open()) {
        reason = words_of(errno);
        continue;
      }
      const int error = connect_socket(socket, *entry, deadline);
      if (error != 0) {
        reason = words_of(error);
        continue;
      }
      send_without_delay(socket);
      if (greet(socket, reason)) return socket;
    }
    std::this_thread::sleep_for(milliseconds(50));
  }
  throw Error(ErrorCode::timeout, "bootstrap: rank ", options.rank, " of ", options.size,
              " could not connect to rank 0 at ", options.address, ":", options.port, " within ",
              seconds(options.timeout), " s: ", reason);
}

}  // namespace helix::comm
