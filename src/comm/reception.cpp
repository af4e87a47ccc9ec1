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
#include "comm/open_files.hpp"
#include "comm/rank_names.hpp"
#include "comm/rendezvous.hpp"

namespace helix::comm {
namespace {

constexpr milliseconds kVisit{5000};         // from the connection to the complete Hello
constexpr std::size_t kSpareVisitors = 256;  // most in addition to the job's own connections
constexpr std::size_t kFewestVisitors = 4;   // that this process must have descriptors for, in addition
constexpr std::size_t kOtherFiles = 4;       // listeners, and what other threads open meanwhile

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

struct Objection {
  ErrorCode code;
  std::string text;

  Verdict verdict() const {
    Verdict verdict{.error_code = static_cast<std::int32_t>(code)};
    set_text(verdict.text, text);
    return verdict;
  }
};

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
    const OpenFiles files = open_files();
    const std::size_t num_connections = 2 * (processes_.size() - 1);
    const std::size_t num_needed = num_connections + kFewestVisitors + kOtherFiles;
    if (files.left() < num_needed) {
      object(ErrorCode::io,
             message({"bootstrap: rank 0 of ", options.size, " needs ", num_needed, " open files (",
                      num_connections, " connections to the other ranks, and some more), but has ",
                      files.left(), " left of its limit of ", files.limit,
                      "; raise the limit on rank 0's machine (ulimit -n) to ",
                      files.limit + num_needed - files.left(), " or more"}));
    }
    num_places_ =
        std::min(num_connections + kSpareVisitors, files.left() - std::min(files.left(), kOtherFiles));
    try {
      listeners_ = listen_for_ranks(options, deadline_);
    } catch (const Error&) {
      if (!objection_) throw;
      throw Error(objection_->code, objection_->text);
    }
  }

  Connections run() {
    while (heard_.size() < 2 * static_cast<std::size_t>(expected_ - 1) && Clock::now() < deadline_) wait();
    listeners_.clear();
    visitors_.clear();
    if (!objection_) objection_ = absence();
    const Verdict verdict = objection_ ? objection_->verdict() : Verdict{};
    for (const Socket& socket : connections_.control) {
      if (socket.is_open())
        (void)send_all(socket.fd(), &verdict, sizeof(verdict),
                       deadline_after(verdict_grace(options_.timeout)), kKeepWaiting);
    }
    if (objection_) throw Error(objection_->code, objection_->text);
    return std::move(connections_);
  }

 private:
  /// Where a connection of a rank is kept.
  struct Place {
    std::vector<Socket>* channel;
    std::size_t rank;
  };

  /// Sleeps until a connection arrives, sends or closes, then handles it.
  void wait() {
    // Open sockets only: poll() refuses more entries than the process may have open files.
    entries_.clear();
    places_.clear();
    const auto listen_to = [&](const Socket& socket) {
      entries_.push_back({.fd = socket.fd(), .events = POLLIN, .revents = 0});
    };
    for (const Socket& listener : listeners_) listen_to(listener);
    for (const Visitor& visitor : visitors_) listen_to(visitor.socket);
    for (std::vector<Socket>* channel : {&connections_.control, &connections_.watch}) {
      for (std::size_t rank = 0; rank < channel->size(); ++rank) {
        if (!(*channel)[rank].is_open()) continue;
        listen_to((*channel)[rank]);
        places_.push_back({channel, rank});
      }
    }
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
      if (entries_[i].revents != 0) notice_departure(places_[i - first_rank]);
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

  /// How many visitors there may be, beside the connections of ranks that have come. At least as many as
  /// ranks are still to come, since a rank makes its second connection when it has the place of its first.
  std::size_t room() const {
    return std::max(num_places_ - std::min(num_places_, num_seated_), std::size_t{1});
  }

  /// Makes room: the visitor that came first speaks now or leaves.
  void drop_oldest() {
    hear(visitors_.front());
    num_dropped_ += visitors_.front().socket.is_open() ? 1 : 0;
    visitors_.pop_front();
  }

  /// Accepts waiting connections, no more at once than there may be visitors.
  void admit(const Socket& listener) {
    for (std::size_t left = room(); left > 0; --left) {
      Socket socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      const int error = socket.is_open() ? 0 : errno;
      const bool is_full = error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
      why_not_accepted_ = is_full && visitors_.empty() ? error : 0;
      if (why_not_accepted_ != 0) return std::this_thread::sleep_for(milliseconds(10));
      if (is_full) {
        drop_oldest();
        continue;
      }
      if (error != 0) return;
      while (!visitors_.empty() && visitors_.size() >= room()) drop_oldest();
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

  /// Gives a process of the job its place. Once there is an objection, tells it that instead, and keeps no
  /// connection, for which there may be no descriptor.
  void seat(Socket socket, const Hello& hello) {
    if (std::optional<std::string> text = contradiction(hello))
      object(ErrorCode::invalid_argument, std::move(*text));
    expected_ =
        std::max(expected_, std::min(hello.size, static_cast<int>(kMaxRanks)));  // all should hear of it
    if (hello.rank >= 1 && hello.rank < expected_) heard_.insert({hello.rank, hello.channel});
    if (objection_) {
      if (hello.channel == Channel::control) (void)send_now(socket, objection_->verdict());
      return;
    }
    const auto rank = static_cast<std::size_t>(hello.rank);
    processes_[rank] = hello.process;
    Socket& place = (hello.channel == Channel::watch ? connections_.watch : connections_.control)[rank];
    num_seated_ += place.is_open() ? 0 : 1;
    place = std::move(socket);
  }

  /// Records the first objection. Others on their way should hear it too, so waits for them briefly.
  void object(ErrorCode code, std::string text) {
    if (objection_) return;
    objection_ = Objection{code, std::move(text)};
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
  void notice_departure(const Place& place) {
    Socket& socket = (*place.channel)[place.rank];
    char byte = 0;
    const ssize_t received = ::recv(socket.fd(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    if (received < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return;
    socket = Socket();
    --num_seated_;
    object(ErrorCode::peer_failed, message({"bootstrap: rank ", place.rank, " of ", options_.size,
                                            received > 0 ? " spoke out of turn" : " closed its connection",
                                            " before all ranks had come"}));
  }

  /// What to object to at the end if ranks are missing.
  std::optional<Objection> absence() const {
    std::vector<int> missing;
    for (int rank = 1; rank < options_.size; ++rank) {
      const auto place = static_cast<std::size_t>(rank);
      if (!connections_.control[place].is_open() || !connections_.watch[place].is_open())
        missing.push_back(rank);
    }
    if (missing.empty()) return std::nullopt;
    std::string text = message({"bootstrap: ", rank_names(missing), " of ", options_.size});
    if (why_not_accepted_ != 0) {
      text += message({" could not be admitted within ", seconds(options_.timeout),
                       " s: connections wait on port ", options_.port,
                       ", but rank 0 cannot accept them: ", words_of(why_not_accepted_)});
      if (why_not_accepted_ == EMFILE)
        text += message({" (its limit of open files, ulimit -n, is ", open_files().limit, ")"});
      return Objection{ErrorCode::io, std::move(text)};
    }
    text += message(
        {" did not connect to rank 0 on port ", options_.port, " within ", seconds(options_.timeout), " s"});
    if (num_strangers_ > 0) {
      text += message({"; ", num_strangers_, " other connections were no ranks of this job, ", num_unproven_,
                       " of them ranks of another job or with another secret"});
    }
    if (num_dropped_ > 0)
      text +=
          message({"; ", num_dropped_, " connections were closed unheard, because newer ones had no room"});
    return Objection{ErrorCode::timeout, std::move(text)};
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
  std::size_t num_places_ = 0;  // for visitors and ranks together
  std::size_t num_seated_ = 0;  // connections of ranks
  std::optional<Objection> objection_;
  std::size_t num_strangers_ = 0;
  std::size_t num_unproven_ = 0;
  std::size_t num_dropped_ = 0;
  int why_not_accepted_ = 0;     // the errno for which connections wait; 0: none do
  std::vector<pollfd> entries_;  // listeners, visitors, ranks
  std::vector<Place> places_;    // of the entries of ranks
};

}  // namespace

Connections serve(const BootstrapOptions& options) {
  return Reception(options).run();
}

}  // namespace helix::comm
