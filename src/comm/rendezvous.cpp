// SPDX-License-Identifier: Apache-2.0
// The rendezvous of a job at rank 0.
#include "comm/rendezvous.hpp"

#include <cerrno>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <helix/error.hpp>

#include "comm/bootstrap_messages.hpp"

namespace helix::comm {
namespace {

constexpr auto kNothing = [] {};

struct Addresses {
  addrinfo* list = nullptr;
  ~Addresses() {
    if (list != nullptr) ::freeaddrinfo(list);
  }
};

void set_options(int fd) {
  const int on = 1;
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // fails on no TCP socket
}

Socket try_listen(int family, const BootstrapOptions& options, bool is_local) {
  Socket listener(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.is_open()) return {};
  const int on = 1;
  const int off = 0;
  (void)::setsockopt(listener.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  int result = -1;
  if (family == AF_INET6) {
    (void)::setsockopt(listener.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    any.sin6_addr = in6addr_any;
    any.sin6_port = htons(static_cast<std::uint16_t>(options.port));
    result = ::bind(listener.fd(), reinterpret_cast<const sockaddr*>(&any), sizeof(any));
  } else {
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(is_local ? INADDR_LOOPBACK : INADDR_ANY);
    any.sin_port = htons(static_cast<std::uint16_t>(options.port));
    result = ::bind(listener.fd(), reinterpret_cast<const sockaddr*>(&any), sizeof(any));
  }
  if (result != 0 || ::listen(listener.fd(), 2 * options.size) != 0) return {};
  return listener;
}

Socket listen_on(const BootstrapOptions& options) {
  // A job of one machine is not for other machines to talk to.
  const bool is_local = options.address == "localhost" || options.address.starts_with("127.");
  Socket listener;
  if (!is_local) listener = try_listen(AF_INET6, options, is_local);
  if (!listener.is_open()) listener = try_listen(AF_INET, options, is_local);
  HELIX_EXPECTS(listener.is_open(), ErrorCode::io, "bootstrap: rank 0 cannot listen on port ", options.port,
                ": ", words_of(errno), "; set MASTER_PORT to a free one on all ranks");
  return listener;
}

/// Connects to one address; 0, or the errno that says why not.
int connect_socket(const Socket& socket, const addrinfo& entry, Clock::time_point deadline) {
  if (::connect(socket.fd(), entry.ai_addr, entry.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  int error = ETIMEDOUT;
  socklen_t length = sizeof(error);
  if (wait_for(socket.fd(), POLLOUT, std::min(deadline, Clock::now() + std::chrono::seconds(3))))
    (void)::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

/// Tries each address of the host until the deadline: rank 0 may not listen yet.
Socket connect_to(const BootstrapOptions& options, Clock::time_point deadline) {
  const std::string port = std::to_string(options.port);
  std::string reason;
  while (Clock::now() < deadline) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    Addresses found;
    const int status = ::getaddrinfo(options.address.c_str(), port.c_str(), &hints, &found.list);
    if (status != 0) reason = ::gai_strerror(status);
    for (const addrinfo* entry = found.list; entry != nullptr; entry = entry->ai_next) {
      Socket socket(::socket(entry->ai_family, entry->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (!socket.is_open()) continue;
      const int error = connect_socket(socket, *entry, deadline);
      if (error == 0) {
        set_options(socket.fd());
        return socket;
      }
      reason = words_of(error);
    }
    std::this_thread::sleep_for(milliseconds(50));
  }
  throw Error(ErrorCode::timeout, "bootstrap: rank ", options.rank, " of ", options.size,
              " could not connect to rank 0 at ", options.address, ":", options.port, " within ",
              seconds(options.timeout), " s: ", reason);
}

std::string missing_ranks(const Connections& connections) {
  std::ostringstream text;
  std::size_t missing = 0;
  for (std::size_t rank = 1; rank < connections.control.size(); ++rank) {
    if (connections.control[rank].is_open() && connections.watch[rank].is_open()) continue;
    text << (missing++ == 0 ? "" : ", ") << rank;
  }
  return (missing == 1 ? "rank " : "ranks ") + text.str();
}

/// What is wrong with a newcomer, or nothing.
std::optional<std::string> contradiction(const Hello& hello, const BootstrapOptions& options,
                                         const std::vector<Socket>& place) {
  std::ostringstream text;
  if (hello.size != options.size) {
    text << "bootstrap: rank " << hello.rank << " says the job has " << hello.size << " ranks, rank 0 says "
         << options.size << "; set WORLD_SIZE alike on all";
  } else if (hello.rank < 1 || hello.rank >= options.size) {
    text << "bootstrap: a process calls itself rank " << hello.rank << "; ranks 1 to " << options.size - 1
         << " are expected beside rank 0";
  } else if (place[static_cast<std::size_t>(hello.rank)].is_open()) {
    text << "bootstrap: two processes call themselves rank " << hello.rank << "; set RANK to one each";
  } else if (hello.config_hash != options.config_hash) {
    text << "bootstrap: rank " << hello.rank << " has another configuration (hash " << std::hex
         << hello.config_hash << ") than rank 0 (hash " << options.config_hash
         << "); start all ranks with the same model, topology and options";
  } else {
    return std::nullopt;
  }
  return text.str();
}

}  // namespace

Connections serve(const BootstrapOptions& options) {
  const auto size = static_cast<std::size_t>(options.size);
  Connections connections;
  connections.control.resize(size);
  connections.watch.resize(size);
  const Socket listener = listen_on(options);
  Clock::time_point deadline = Clock::now() + options.timeout;
  std::vector<Socket> refused;  // told at the end, like all
  std::optional<std::string> wrong;
  std::size_t arrived = 0;
  while (arrived + refused.size() < 2 * (size - 1) && wait_for(listener.fd(), POLLIN, deadline)) {
    Socket socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket.is_open()) continue;
    set_options(socket.fd());
    Hello hello;
    const Clock::time_point soon = std::min(deadline, Clock::now() + std::chrono::seconds(2));
    const Transfer transfer = recv_all(socket.fd(), &hello, sizeof(hello), soon, kNothing);
    if (transfer != Transfer::done || hello.magic != kMagic) continue;  // no rank of ours
    std::vector<Socket>& place = hello.channel == Channel::watch ? connections.watch : connections.control;
    std::optional<std::string> objection = contradiction(hello, options, place);
    if (objection) {
      // Others of the job may be on their way and should hear of it too, but soon.
      if (!wrong) deadline = std::min(deadline, Clock::now() + kVerdictGrace);
      if (!wrong) wrong = std::move(objection);
      refused.push_back(std::move(socket));
    } else {
      place[static_cast<std::size_t>(hello.rank)] = std::move(socket);
      ++arrived;
    }
  }
  Verdict verdict;
  if (wrong) {
    verdict.error_code = static_cast<std::int32_t>(ErrorCode::invalid_argument);
    set_text(verdict.text, *wrong);
  } else if (arrived < 2 * (size - 1)) {
    std::ostringstream text;
    text << "bootstrap: " << missing_ranks(connections) << " of " << options.size
         << " did not connect to rank 0 on port " << options.port << " within " << seconds(options.timeout)
         << " s";
    verdict.error_code = static_cast<std::int32_t>(ErrorCode::timeout);
    set_text(verdict.text, text.str());
  }
  const auto tell = [&](const Socket& socket) {
    if (socket.is_open())
      (void)send_all(socket.fd(), &verdict, sizeof(verdict), Clock::now() + kVerdictGrace);
  };
  for (const Socket& socket : connections.control) tell(socket);
  for (const Socket& socket : refused) tell(socket);
  if (verdict.error_code >= 0) {
    throw Error(static_cast<ErrorCode>(verdict.error_code), verdict.text.data());
  }
  return connections;
}

Connections join(const BootstrapOptions& options) {
  const Clock::time_point deadline = Clock::now() + options.timeout;
  Connections connections;
  for (const Channel channel : {Channel::control, Channel::watch}) {
    Socket socket = connect_to(options, deadline);
    const Hello hello{
        .channel = channel, .rank = options.rank, .size = options.size, .config_hash = options.config_hash};
    (void)send_all(socket.fd(), &hello, sizeof(hello), deadline);  // a failure shows below
    (channel == Channel::control ? connections.control : connections.watch).push_back(std::move(socket));
  }
  Verdict verdict;
  const Transfer transfer = recv_all(connections.control[0].fd(), &verdict, sizeof(verdict),
                                     Clock::now() + options.timeout + kVerdictGrace, kNothing);
  HELIX_EXPECTS(transfer != Transfer::closed, ErrorCode::peer_failed, "bootstrap: rank 0 at ",
                options.address, ":", options.port, " closed the connection of rank ", options.rank);
  HELIX_EXPECTS(transfer == Transfer::done, ErrorCode::timeout, "bootstrap: rank 0 at ", options.address, ":",
                options.port, " did not answer rank ", options.rank, " within ", seconds(options.timeout),
                " s");
  verdict.text.back() = '\0';
  if (verdict.error_code >= 0 && verdict.error_code <= static_cast<int>(ErrorCode::internal)) {
    throw Error(static_cast<ErrorCode>(verdict.error_code), verdict.text.data());
  }
  return connections;
}

}  // namespace helix::comm
