// SPDX-License-Identifier: Apache-2.0
// The rendezvous on rank 0: serves all connections concurrently, and counts only ranks of the job.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <helix/error.hpp>
#include <helix/limits.hpp>

#include "comm/address.hpp"
#include "comm/bootstrap_messages.hpp"
#include "comm/rank_names.hpp"
#include "comm/rendezvous.hpp"

namespace helix::comm {
namespace {

constexpr milliseconds kVisit{5000};         // from the connection to the complete Hello
constexpr std::size_t kSpareVisitors = 256;  // in addition to the job's own connections

/// A connection that has not yet said which rank it is.
struct Visitor {
  Socket socket;
  Challenge challenge;
  Clock::time_point leave_by;
  std::array<std::byte, sizeof(Hello)> bytes{};
  std::size_t num_bytes = 0;

  std::span<const std::byte> said() const { return std::span(bytes).first(num_bytes); }
};

/// Sends a message without blocking; false if it does not fit into the socket's buffer.
template <class Message>
bool send_now(const Socket& socket, const Message& message) {
  return ::send(socket.fd(), &message, sizeof(message), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(sizeof(message));
}

class Reception {
 public:
  explicit Reception(const BootstrapOptions& options)
      : options_(options),
        key_{options.secret, options.job},
        deadline_(deadline_after(options.timeout)),
        expected_(options.size),
        processes_(static_cast<std::size_t>(options.size)) {
    connections_.control.resize(processes_.size());
    connections_.watch.resize(processes_.size());
    listeners_ = listen_for_ranks(options, deadline_);
  }

  Connections run() {
    while (heard_.size() < 2 * static_cast<std::size_t>(expected_ - 1) && Clock::now() < deadline_) wait();
    listeners_.clear();
    visitors_.clear();
    const Verdict verdict = final_verdict();
    const auto tell = [&](const Socket& socket) {
      if (socket.is_open())
        (void)send_all(socket.fd(), &verdict, sizeof(verdict),
                       deadline_after(verdict_grace(options_.timeout)), kKeepWaiting);
    };
    for (const Socket& socket : connections_.control) tell(socket);
    for (const Socket& socket : refused_) tell(socket);
    if (verdict.error_code >= 0) throw Error(static_cast<ErrorCode>(verdict.error_code), verdict.text.data());
    return std::move(connections_);
  }

 private:
  struct Objection {
    ErrorCode code;
    std::string text;
  };

  /// Sleeps until a connection arrives, sends or closes, then handles it.
  void wait() {
    entries_.clear();
    const auto listen_to = [&](const Socket& socket) {
      entries_.push_back({.fd = socket.fd(), .events = POLLIN, .revents = 0});  // -1 is skipped
    };
    for (const Socket& listener : listeners_) listen_to(listener);
    for (const Visitor& visitor : visitors_) listen_to(visitor.socket);
    for (const Socket& socket : connections_.control) listen_to(socket);
    for (const Socket& socket : connections_.watch) listen_to(socket);
    Clock::time_point until = deadline_;
    if (!visitors_.empty()) until = std::min(until, visitors_.front().leave_by);  // the oldest
    const auto left = std::chrono::ceil<milliseconds>(until - Clock::now()).count();
    const int status =
        ::poll(entries_.data(), entries_.size(), static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000)));
    HELIX_EXPECTS(status >= 0 || errno == EINTR, ErrorCode::io, "poll failed: ", words_of(errno));
    if (status < 0) return;

    // Handlers do not move entries that are still to be looked up: new visitors are added last.
    const std::size_t first_visitor = listeners_.size();
    const std::size_t first_rank = first_visitor + visitors_.size();
    for (std::size_t i = first_rank; i < entries_.size(); ++i) {
      if (entries_[i].revents != 0) notice_departure(i - first_rank);
    }
    for (std::size_t i = 0; i < visitors_.size(); ++i) {
      Visitor& visitor = visitors_[i];
      if (entries_[first_visitor + i].revents != 0) hear(visitor);
      if (visitor.socket.is_open() && Clock::now() >= visitor.leave_by) dismiss(visitor);
    }
    std::erase_if(visitors_, [](const Visitor& visitor) { return !visitor.socket.is_open(); });
    for (std::size_t i = 0; i < first_visitor; ++i) {
      if (entries_[i].revents != 0) admit(listeners_[i]);
    }
  }

  void dismiss(Visitor& visitor) {
    visitor.socket = Socket();
    ++num_strangers_;
  }

  /// Accepts waiting connections. If there is no room, drops the visitor that has been silent longest.
  void admit(const Socket& listener) {
    const std::size_t most = kSpareVisitors + 2 * processes_.size();
    for (std::size_t i = 0; i < most; ++i) {
      Socket socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket.is_open()) {
        const bool is_full = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
        if (!is_full) return;
        if (visitors_.empty()) return std::this_thread::sleep_for(milliseconds(10));
      }
      if (!socket.is_open() || visitors_.size() >= most) {
        visitors_.pop_front();
        ++num_strangers_;
        if (!socket.is_open()) continue;
      }
      send_without_delay(socket);
      Visitor visitor{.socket = std::move(socket),
                      .challenge = {.nonce = new_nonce()},
                      .leave_by = Clock::now() + kVisit};
      if (send_now(visitor.socket, visitor.challenge)) visitors_.push_back(std::move(visitor));
    }
  }

  /// Reads what the visitor sent, no byte past a Hello.
  void hear(Visitor& visitor) {
    const ssize_t received = ::recv(visitor.socket.fd(), visitor.bytes.data() + visitor.num_bytes,
                                    visitor.bytes.size() - visitor.num_bytes, MSG_DONTWAIT);
    if (received < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (received <= 0) return dismiss(visitor);
    visitor.num_bytes += static_cast<std::size_t>(received);
    const std::size_t num_magic = std::min(visitor.num_bytes, sizeof(kMagic));
    if (std::memcmp(visitor.bytes.data(), &kMagic, num_magic) != 0) return dismiss(visitor);
    if (visitor.num_bytes < sizeof(Hello)) return;
    const std::optional<Hello> hello = read_hello(visitor.said());
    if (!hello) return dismiss(visitor);
    Reply reply;
    if (!key_.is_proven(*hello, visitor.challenge, hello->process)) {
      reply.answer = Answer::stranger;
      (void)send_now(visitor.socket, reply);
      ++num_unproven_;
      return dismiss(visitor);
    }
    reply.proof = key_.proof_of(reply, visitor.challenge, hello->process);
    if (!send_now(visitor.socket, reply)) return dismiss(visitor);
    seat(std::exchange(visitor.socket, Socket()), *hello);
  }

  /// Gives a process of the job its place, or records for the verdict what is wrong with it.
  void seat(Socket socket, const Hello& hello) {
    std::optional<std::string> objection = contradiction(hello);
    expected_ =
        std::max(expected_, std::min(hello.size, static_cast<int>(kMaxRanks)));  // all should hear of it
    if (hello.rank >= 1 && hello.rank < expected_) heard_.insert({hello.rank, hello.channel});
    if (!objection) {
      const auto rank = static_cast<std::size_t>(hello.rank);
      processes_[rank] = hello.process;
      auto& places = hello.channel == Channel::watch ? connections_.watch : connections_.control;
      places[rank] = std::move(socket);
      return;
    }
    object(ErrorCode::invalid_argument, std::move(*objection));
    if (refused_.size() < kSpareVisitors + 2 * processes_.size()) refused_.push_back(std::move(socket));
  }

  /// Records the first objection. Others on their way should hear it too, so waits for them briefly.
  void object(ErrorCode code, std::string text) {
    if (wrong_) return;
    wrong_ = Objection{code, std::move(text)};
    deadline_ = std::min(deadline_, deadline_after(verdict_grace(options_.timeout)));
  }

  /// What is wrong with a process of the job, or nothing.
  std::optional<std::string> contradiction(const Hello& hello) const {
    std::ostringstream text;
    if (hello.size != options_.size) {
      text << "bootstrap: rank " << hello.rank << " says the job has " << hello.size << " ranks, rank 0 says "
           << options_.size << "; set WORLD_SIZE alike on all";
    } else if (hello.rank < 1 || hello.rank >= options_.size) {
      text << "bootstrap: a process calls itself rank " << hello.rank << "; ranks 1 to " << options_.size - 1
           << " are expected beside rank 0";
    } else if (const auto& known = processes_[static_cast<std::size_t>(hello.rank)];
               known && *known != hello.process) {
      text << "bootstrap: two processes call themselves rank " << hello.rank << "; set RANK to one each";
    } else if (hello.config_hash != options_.config_hash) {
      text << "bootstrap: rank " << hello.rank << " has another configuration (hash " << std::hex
           << hello.config_hash << ") than rank 0 (hash " << options_.config_hash
           << "); start all ranks with the same model, topology and options";
    } else {
      return std::nullopt;
    }
    return text.str();
  }

  /// A rank with a place sends nothing before the verdict, so an event here means that it left or misbehaves.
  void notice_departure(std::size_t place) {
    const std::size_t rank = place % processes_.size();
    auto& places = place < processes_.size() ? connections_.control : connections_.watch;
    if (!places[rank].is_open()) return;  // replaced by a new connection just now
    char byte = 0;
    const ssize_t received = ::recv(places[rank].fd(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    if (received < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return;
    places[rank] = Socket();
    std::ostringstream text;
    text << "bootstrap: rank " << rank << " of " << options_.size
         << (received > 0 ? " spoke out of turn" : " closed its connection") << " before all ranks had come";
    object(ErrorCode::peer_failed, text.str());
  }

  Verdict final_verdict() const {
    Verdict verdict;
    const auto say = [&](ErrorCode code, std::string_view text) {
      verdict.error_code = static_cast<std::int32_t>(code);
      set_text(verdict.text, text);
    };
    std::vector<int> missing;
    for (int rank = 1; rank < options_.size; ++rank) {
      const auto place = static_cast<std::size_t>(rank);
      if (!connections_.control[place].is_open() || !connections_.watch[place].is_open())
        missing.push_back(rank);
    }
    if (wrong_) {
      say(wrong_->code, wrong_->text);
    } else if (!missing.empty()) {
      std::ostringstream text;
      text << "bootstrap: " << rank_names(missing) << " of " << options_.size
           << " did not connect to rank 0 on port " << options_.port << " within "
           << seconds(options_.timeout) << " s";
      if (num_strangers_ > 0) {
        text << "; " << num_strangers_ << " other connections were no ranks of this job, " << num_unproven_
             << " of them ranks of another job or with another secret";
      }
      say(ErrorCode::timeout, text.str());
    }
    return verdict;
  }

  const BootstrapOptions& options_;
  const JobKey key_;
  Clock::time_point deadline_;
  std::vector<Socket> listeners_;
  std::deque<Visitor> visitors_;  // oldest first
  int expected_;                  // ranks of the job, by the largest size that any rank claims
  std::set<std::pair<int, Channel>> heard_;
  std::vector<std::optional<Nonce>> processes_;  // by rank
  Connections connections_;
  std::vector<Socket> refused_;  // get the verdict at the end, like all ranks
  std::optional<Objection> wrong_;
  std::size_t num_strangers_ = 0;
  std::size_t num_unproven_ = 0;
  std::vector<pollfd> entries_;  // listeners, visitors, ranks
};

}  // namespace

Connections serve(const BootstrapOptions& options) {
  return Reception(options).run();
}

}  // namespace helix::comm
