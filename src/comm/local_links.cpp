// SPDX-License-Identifier: Apache-2.0
// Local sockets in the abstract namespace, which leave no file behind. Containers that do not share a network
// namespace do not try to connect: every rank sees this from what the ranks tell each other first.
#include "comm/local_links.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <optional>
#include <thread>
#include <utility>

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <helix/error.hpp>

#include "comm/all_of.hpp"
#include "comm/bootstrap_messages.hpp"
#include "comm/bootstrap_wait.hpp"
#include "comm/check_after_close.hpp"
#include "comm/rendezvous.hpp"

namespace helix::comm {
namespace {

/// A rank's listening socket, as the other ranks learn it over the Bootstrap.
struct LinkPlace {
  std::array<char, 40> boot{};      // of the machine's kernel
  std::uint64_t net_namespace = 0;  // inode
  Digest island{};                  // hash of the name that the rank gave
  Nonce name{};                     // of the socket
  Nonce token{};                    // a connecting peer must show it first
  std::uint64_t listens = 0;

  bool is_near(const LinkPlace& other) const {
    return boot == other.boot && net_namespace == other.net_namespace && island == other.island;
  }
};

/// The first message of each end.
struct LinkHello {
  std::int32_t rank = 0;
  Nonce token{};  // of the receiver's place
};

LinkPlace own_place(std::string_view island) {
  LinkPlace place;
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  set_text(place.boot, boot);
  struct stat info {};
  if (::stat("/proc/self/ns/net", &info) == 0) place.net_namespace = info.st_ino;
  Sha256 hash;
  hash.update(bytes_of(island));
  place.island = hash.finish();
  place.name = new_nonce();
  place.token = new_nonce();
  return place;
}

/// "\0helix-" and the name in hexadecimal.
std::pair<sockaddr_un, socklen_t> address_of(const LinkPlace& place) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  int length = std::snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "helix-");
  for (const std::uint8_t byte : place.name) {
    length += std::snprintf(address.sun_path + 1 + length,
                            sizeof(address.sun_path) - 1 - static_cast<std::size_t>(length), "%02x", byte);
  }
  return {address,
          static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(length))};
}

/// Whether the other end is a process of this one's user.
bool is_own_user(const Socket& socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return ::getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

bool say_hello(const Socket& socket, int rank, const LinkPlace& other, Clock::time_point deadline) {
  const LinkHello hello{rank, other.token};
  return send_all(socket.fd(), &hello, sizeof(hello), deadline, kKeepWaiting) == Transfer::done;
}

/// The rank at the other end, which proves by the token that it is of the job; -1: a stranger.
int hear_hello(const Socket& socket, const LinkPlace& own, Clock::time_point deadline) {
  LinkHello hello;
  if (!is_own_user(socket) ||
      recv_all(socket.fd(), &hello, sizeof(hello), deadline, kKeepWaiting) != Transfer::done)
    return -1;
  return hello.token == own.token ? hello.rank : -1;
}

/// Connects without blocking in the system call: while the listener's queue is full, retries until the
/// deadline.
Socket connect_to(const LinkPlace& place, Clock::time_point deadline) {
  const auto [address, length] = address_of(place);
  while (Clock::now() < deadline) {
    Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.is_open()) return {};
    if (::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), length) == 0) return socket;
    if (errno != EAGAIN && errno != EINTR) return {};
    std::this_thread::sleep_for(milliseconds(1));
  }
  return {};
}

/// Connects to lower neighbours and accepts higher ones. Returns whether all succeeded within half of the
/// timeout, so that others hear of a failure before they stop waiting for this rank.
/// @throws what has ended the job meanwhile.
bool connect_all(const Bootstrap& bootstrap, const Socket& listener, const std::vector<LinkPlace>& places,
                 std::vector<Socket>& links) {
  const Clock::time_point deadline = Clock::now() + bootstrap.timeout() / 2;
  const auto own = static_cast<std::size_t>(bootstrap.rank());
  for (std::size_t to = 0; to < own; ++to) {
    if (!places[to].is_near(places[own])) continue;
    Socket link = connect_to(places[to], deadline);
    if (!link.is_open() || !say_hello(link, bootstrap.rank(), places[to], deadline) ||
        hear_hello(link, places[own], deadline) != static_cast<int>(to))
      return false;
    links[to] = std::move(link);
  }
  constexpr milliseconds kStrangerLimit{5000};
  const auto is_near = [&](const LinkPlace& place) { return place.is_near(places[own]); };
  for (auto left = std::count_if(places.begin() + bootstrap.rank() + 1, places.end(), is_near); left > 0;) {
    bootstrap.check();
    if (!wait_for(listener.fd(), POLLIN, std::min(deadline, Clock::now() + kPollSlice))) {
      if (Clock::now() >= deadline) return false;
      continue;
    }
    Socket link(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!link.is_open()) {  // e.g. the limit of open files is reached; the connection stays queued
      if (Clock::now() >= deadline) return false;
      std::this_thread::sleep_for(milliseconds(10));
      continue;
    }
    const int rank = hear_hello(link, places[own], std::min(deadline, Clock::now() + kStrangerLimit));
    if (rank <= bootstrap.rank() || rank >= bootstrap.size()) continue;
    const auto from = static_cast<std::size_t>(rank);
    if (links[from].is_open() || !is_near(places[from])) continue;
    if (!say_hello(link, bootstrap.rank(), places[from], deadline)) return false;
    links[from] = std::move(link);
    --left;
  }
  return true;
}

}  // namespace

std::shared_ptr<const LocalLinks> LocalLinks::connect(Bootstrap& bootstrap, std::string_view name) {
  LinkPlace own = own_place(name);
  Socket listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto [address, length] = address_of(own);
  own.listens = listener.is_open() &&
                ::bind(listener.fd(), reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
                ::listen(listener.fd(), bootstrap.size()) == 0;
  const std::vector<LinkPlace> places = all_of(bootstrap, own);
  std::shared_ptr<LocalLinks> links(new LocalLinks(bootstrap));
  links->links_.resize(places.size());
  // If one neighbour does not listen, none tries to connect.
  const bool all_listen = std::all_of(places.begin(), places.end(), [&](const LinkPlace& place) {
    return place.listens != 0 || !place.is_near(own);
  });
  const std::uint32_t is_connected =
      all_listen && connect_all(bootstrap, listener, places, links->links_) ? 1 : 0;
  const std::vector<std::uint32_t> verdicts = all_of(bootstrap, is_connected);
  // The neighbour that keeps a rank from being linked: one that does not listen, else one that failed to
  // connect.
  const auto culprit_near = [&](const LinkPlace& place) {
    std::optional<std::size_t> culprit;
    for (std::size_t rank = 0; rank < places.size(); ++rank) {
      if (!places[rank].is_near(place)) continue;
      if (places[rank].listens == 0) return std::optional(rank);
      if (verdicts[rank] == 0 && !culprit) culprit = rank;
    }
    return culprit;
  };
  std::vector<char> is_linked;
  for (const LinkPlace& place : places) is_linked.push_back(culprit_near(place) ? 0 : 1);
  links->neighbourhoods_ = islands_of(places.size(), [&](std::size_t from, std::size_t to) {
    return from == to || (is_linked[from] && places[from].is_near(places[to]));
  });
  if (const auto culprit = culprit_near(own))
    links->why_not_ = "rank " + std::to_string(*culprit) + " could not connect its local sockets";
  return links;
}

void LocalLinks::send(int rank, std::span<const std::byte> message, int descriptor) const {
  messages_.call([&] { send_message(rank, message, descriptor); });
}

int LocalLinks::recv(int rank, std::span<std::byte> message) const {
  return messages_.call([&] { return recv_message(rank, message); });
}

void LocalLinks::send_message(int rank, std::span<const std::byte> message, int descriptor) const {
  const BootstrapWait waiting(bootstrap_);
  Patience patience(deadline_after(bootstrap_.timeout() + kWatchGrace));
  const int fd = links_.at(static_cast<std::size_t>(rank)).fd();
  iovec part{const_cast<std::byte*>(message.data()), message.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (descriptor >= 0) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* const carried = CMSG_FIRSTHDR(&header);
    carried->cmsg_level = SOL_SOCKET;
    carried->cmsg_type = SCM_RIGHTS;
    carried->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(carried), &descriptor, sizeof(int));
  }
  const auto check = [this] { bootstrap_.check(); };
  Transfer transfer = Transfer::done;
  ssize_t sent = -1;
  while (transfer == Transfer::done && (sent = ::sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT)) < 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      transfer = Transfer::closed;
    } else if (!wait_a_slice(fd, POLLOUT, patience, check)) {
      transfer = Transfer::late;
    }
  }
  if (sent >= 0) {
    transfer = send_all(fd, message.data() + sent, message.size() - static_cast<std::size_t>(sent),
                        patience.deadline(), check);
  }
  if (transfer == Transfer::done) return;
  HELIX_EXPECTS(transfer == Transfer::closed, ErrorCode::timeout, "rank ", rank,
                " read too little from its local socket within ", seconds(bootstrap_.timeout()), " s");
  check_after_close(check);
  throw Error(ErrorCode::peer_failed, "the local socket to rank ", rank, " is closed");
}

int LocalLinks::recv_message(int rank, std::span<std::byte> message) const {
  const BootstrapWait waiting(bootstrap_);
  Patience patience(deadline_after(bootstrap_.timeout() + kWatchGrace));
  const int fd = links_.at(static_cast<std::size_t>(rank)).fd();
  Socket descriptor;  // not necessarily a socket
  bool has_room = true;
  std::size_t received = 0;
  while (received < message.size()) {
    bootstrap_.check();
    HELIX_EXPECTS(!patience.is_over(), ErrorCode::timeout, "rank ", rank, " sent nothing for ",
                  seconds(bootstrap_.timeout()), " s on its local socket");
    if (!wait_for(fd, POLLIN, patience.next_look())) continue;
    iovec part{message.data() + received, message.size() - received};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    const ssize_t bytes = ::recvmsg(fd, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (bytes < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (bytes <= 0) {
      check_after_close([this] { bootstrap_.check(); });
      throw Error(ErrorCode::peer_failed, "rank ", rank, " closed its local socket");
    }
    has_room = has_room && (header.msg_flags & MSG_CTRUNC) == 0;
    for (cmsghdr* carried = CMSG_FIRSTHDR(&header); carried != nullptr;
         carried = CMSG_NXTHDR(&header, carried)) {
      if (carried->cmsg_level != SOL_SOCKET || carried->cmsg_type != SCM_RIGHTS) continue;
      int carried_fd = -1;
      std::memcpy(&carried_fd, CMSG_DATA(carried), sizeof(int));
      descriptor = Socket(carried_fd);
    }
    received += static_cast<std::size_t>(bytes);
  }
  return has_room ? descriptor.release() : kNoRoom;
}

}  // namespace helix::comm
