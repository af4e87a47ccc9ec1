// SPDX-License-Identifier: Apache-2.0
// comm::Bootstrap: sockets, the rendezvous, and the thread that watches.
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <helix/comm/bootstrap.hpp>

namespace helix::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::uint64_t kMagic = 0x31706174'73746f6f;  // also tells a machine of another byte order
constexpr milliseconds kPollSlice{100};
constexpr milliseconds kVerdictGrace{2000};  // rank 0's verdict says more than a deadline of one's own

std::string words_of(int error) {
  return std::generic_category().message(error);
}

double seconds(milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

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

 private:
  int fd_ = -1;
};

/// Waits at most until the deadline; false: the deadline is past.
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

enum class Transfer { done, closed, late };

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

/// `keep_waiting()` is asked a few times a second and may throw.
template <class KeepWaiting>
Transfer recv_all(int fd, void* data, std::size_t bytes, Clock::time_point deadline,
                  KeepWaiting&& keep_waiting) {
  char* position = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t received = ::recv(fd, position, bytes, MSG_DONTWAIT);
    if (received > 0) {
      position += received;
      bytes -= static_cast<std::size_t>(received);
    } else if (received == 0) {
      return Transfer::closed;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      keep_waiting();
      if (Clock::now() >= deadline) return Transfer::late;
      wait_for(fd, POLLIN, std::min(deadline, Clock::now() + kPollSlice));
    } else if (errno != EINTR) {
      return Transfer::closed;
    }
  }
  return Transfer::done;
}

constexpr auto kNothing = [] {};

void set_text(std::span<char> target, std::string_view text) {
  const std::size_t length = std::min(text.size(), target.size() - 1);
  std::copy_n(text.data(), length, target.data());
  target[length] = '\0';
}

// ---------------------------------------------------------------------------------------------------------------
// Messages
// ---------------------------------------------------------------------------------------------------------------

enum class Channel : std::uint32_t { control, watch };

struct Hello {
  std::uint64_t magic = kMagic;
  Channel channel = Channel::control;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int32_t unused = 0;
  std::uint64_t config_hash = 0;
};

/// Rank 0's answer to a Hello on the control channel, once all are there.
struct Verdict {
  std::int32_t error_code = -1;  // -1: welcome
  std::array<char, 508> text{};
};

enum class BeatKind : std::uint32_t { alive, farewell, failure };

/// Everything on the watch channel has this one size.
struct Beat {
  BeatKind kind = BeatKind::alive;
  std::int32_t rank = 0;
  std::uint64_t step = 0;
  std::uint64_t operations = 0;
  std::uint32_t waited_ms = 0;  // in one wait at this step and operation; 0: not waiting
  std::array<char, 36> operation{};
  std::array<char, 448> text{};  // of a failure
};
static_assert(sizeof(Beat) == 512 && std::is_trivially_copyable_v<Beat>);

// ---------------------------------------------------------------------------------------------------------------
// Rendezvous
// ---------------------------------------------------------------------------------------------------------------

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
      int error = 0;
      if (::connect(socket.fd(), entry->ai_addr, entry->ai_addrlen) != 0) {
        error = errno;
        if (error == EINPROGRESS) {
          socklen_t length = sizeof(error);
          error = ETIMEDOUT;
          if (wait_for(socket.fd(), POLLOUT, std::min(deadline, Clock::now() + std::chrono::seconds(3)))) {
            (void)::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
          }
        }
      }
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

struct Connections {
  std::vector<Socket> control;  // rank 0: by rank, its own closed; others: one
  std::vector<Socket> watch;
};

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

// ---------------------------------------------------------------------------------------------------------------
// Watch
// ---------------------------------------------------------------------------------------------------------------

/// The other end of a watch connection, as its last heartbeat told.
struct Peer {
  Socket socket;
  int rank = 0;
  bool is_watched = true;  // not any more after a farewell
  Beat last;
  Clock::time_point last_heard = Clock::now();
  std::array<char, sizeof(Beat)> incoming{};
  std::size_t num_incoming = 0;
};

/// Shared with the watching thread, which outlives Bootstrap when it drops the last copy itself.
struct Watch {
  BootstrapOptions options;
  std::vector<Peer> peers;  // the thread's alone
  Socket wake{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<bool> is_stopping = false;

  std::atomic<std::uint64_t> step = 0;
  std::atomic<std::uint64_t> operations = 0;
  std::atomic<const char*> operation = "start";
  std::atomic<Clock::rep> waiting_since = 0;  // 0: not waiting

  mutable std::mutex mutex;
  std::atomic<bool> has_failed = false;
  std::string failure;
  std::string own_failure;  // to be told to the others
  std::vector<std::function<void(const Error&)>> callbacks;

  void wake_up() const {
    const std::uint64_t one = 1;
    (void)!::write(wake.fd(), &one, sizeof(one));
  }

  /// The first failure wins. Callbacks are called without the mutex.
  void set_failure(const std::string& text) {
    std::vector<std::function<void(const Error&)>> to_call;
    {
      const std::lock_guard lock(mutex);
      if (has_failed) return;
      failure = text;
      has_failed.store(true, std::memory_order_release);
      to_call.swap(callbacks);
    }
    const Error error(ErrorCode::peer_failed, text);
    for (const auto& callback : to_call) callback(error);
  }

  Beat own_beat() const {
    Beat beat;
    beat.rank = options.rank;
    beat.step = step.load(std::memory_order_relaxed);
    beat.operations = operations.load(std::memory_order_relaxed);
    set_text(beat.operation, operation.load(std::memory_order_relaxed));
    if (const Clock::rep since = waiting_since.load(std::memory_order_relaxed); since != 0) {
      const auto waited = Clock::now() - Clock::time_point(Clock::duration(since));
      beat.waited_ms = static_cast<std::uint32_t>(
          std::max<std::int64_t>(1, std::chrono::ceil<milliseconds>(waited).count()));
    }
    return beat;
  }

  static std::string place_of(const Beat& beat) {
    std::ostringstream text;
    text << "in " << beat.operation.data() << " at step " << beat.step << " (operation " << beat.operations
         << ")";
    return text.str();
  }

  std::string describe(const Beat& beat, std::string_view what) const {
    std::ostringstream text;
    text << "rank " << beat.rank << " of " << options.size << " failed " << place_of(beat) << ": " << what;
    return text.str();
  }

  /// A heartbeat fits in the socket's buffer unless the peer has stopped reading for minutes; then it is
  /// dead.
  static void send_beat(Peer& peer, const Beat& beat) {
    if (peer.socket.is_open())
      (void)send_all(peer.socket.fd(), &beat, sizeof(beat), Clock::now() + milliseconds(200));
  }

  void tell_all(const Beat& beat) {
    for (Peer& peer : peers) send_beat(peer, beat);
  }

  /// Ends the job on this rank, and on all others where this is rank 0.
  void judge(const std::string& text) {
    if (options.rank == 0) {
      Beat beat = own_beat();
      beat.kind = BeatKind::failure;
      set_text(beat.text, text);
      tell_all(beat);
    }
    set_failure(text);
  }

  void handle(Peer& peer, const Beat& beat) {
    peer.last_heard = Clock::now();
    peer.last = beat;
    peer.last.operation.back() = '\0';
    peer.last.rank = peer.rank;
    if (beat.kind == BeatKind::farewell) peer.is_watched = false;
    if (beat.kind == BeatKind::failure) {
      Beat copy = beat;
      copy.text.back() = '\0';
      judge(copy.text.data());
    }
  }

  void receive(Peer& peer) {
    for (;;) {
      const ssize_t received = ::recv(peer.socket.fd(), peer.incoming.data() + peer.num_incoming,
                                      peer.incoming.size() - peer.num_incoming, MSG_DONTWAIT);
      if (received < 0 && errno == EINTR) continue;
      if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (received <= 0) {
        if (peer.is_watched) judge(describe(peer.last, "its connection closed"));
        peer.is_watched = false;
        peer.socket = Socket();
        return;
      }
      peer.num_incoming += static_cast<std::size_t>(received);
      if (peer.num_incoming < sizeof(Beat)) continue;
      peer.num_incoming = 0;
      Beat beat;
      std::memcpy(&beat, peer.incoming.data(), sizeof(beat));
      handle(peer, beat);
    }
  }

  void check_silence() {
    for (Peer& peer : peers) {
      if (!peer.is_watched || Clock::now() - peer.last_heard < options.timeout) continue;
      std::ostringstream text;
      text << "no sign of life for " << seconds(options.timeout) << " s";
      peer.is_watched = false;
      judge(describe(peer.last, text.str()));
    }
  }

  /// Rank 0: somebody waits too long, and somebody else is behind.
  void check_lag() {
    Beat waiting = own_beat();
    Beat behind = waiting;
    const auto place = [](const Beat& beat) { return std::pair(beat.step, beat.operations); };
    for (const Peer& peer : peers) {
      if (!peer.is_watched) continue;
      if (peer.last.waited_ms > waiting.waited_ms) waiting = peer.last;
      if (place(peer.last) < place(behind)) behind = peer.last;
    }
    if (milliseconds(waiting.waited_ms) < options.timeout || place(behind) >= place(waiting)) return;
    std::ostringstream text;
    text << "it is behind: rank " << waiting.rank << " has waited for " << waiting.waited_ms << " ms "
         << place_of(waiting);
    judge(describe(behind, text.str()));
  }

  void tell_own_failure() {
    std::string own;
    {
      const std::lock_guard lock(mutex);
      own.swap(own_failure);
    }
    if (own.empty()) return;
    Beat beat = own_beat();
    beat.kind = BeatKind::failure;
    set_text(beat.text, own);
    tell_all(beat);
  }

  void run() {
    std::vector<pollfd> entries;
    Clock::time_point next_beat = Clock::now();
    while (!is_stopping.load(std::memory_order_acquire)) {
      tell_own_failure();
      if (Clock::now() >= next_beat) {
        tell_all(own_beat());
        next_beat = Clock::now() + options.heartbeat;
        if (!has_failed.load(std::memory_order_acquire)) {
          check_silence();
          if (options.rank == 0) check_lag();
        }
      }
      entries.clear();
      entries.push_back({.fd = wake.fd(), .events = POLLIN, .revents = 0});
      for (const Peer& peer : peers) {
        entries.push_back({.fd = peer.socket.fd(), .events = POLLIN, .revents = 0});  // -1 is skipped
      }
      const auto left = std::chrono::ceil<milliseconds>(next_beat - Clock::now()).count();
      if (::poll(entries.data(), entries.size(), static_cast<int>(std::max<std::int64_t>(left, 0))) <= 0) {
        continue;
      }
      std::uint64_t count = 0;
      if (entries[0].revents != 0) (void)!::read(wake.fd(), &count, sizeof(count));
      for (std::size_t i = 0; i < peers.size(); ++i) {
        if (entries[i + 1].revents != 0) receive(peers[i]);
      }
    }
    tell_own_failure();
    Beat beat = own_beat();
    beat.kind = BeatKind::farewell;
    tell_all(beat);
  }
};

// ---------------------------------------------------------------------------------------------------------------
// Environment
// ---------------------------------------------------------------------------------------------------------------

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

int number(const char* name, const std::string& text, int low, int high) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  HELIX_EXPECTS(error == std::errc() && end == text.data() + text.size() && value >= low && value <= high,
                ErrorCode::invalid_argument, "bootstrap: ", name, " is \"", text, "\"; a number from ", low,
                " to ", high, " is needed");
  return value;
}

int number(const char* name, int low, int high) {
  const std::optional<std::string> text = variable(name);
  HELIX_EXPECTS(text.has_value(), ErrorCode::invalid_argument, "bootstrap: ", name,
                " is not set; start the ranks with torchrun, mpirun or srun, or set it");
  return number(name, *text, low, high);
}

/// What one launcher calls the numbers of a process.
struct Launcher {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};
constexpr std::array kLaunchers = {
    Launcher{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    Launcher{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE"},
    Launcher{"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
};
constexpr int kMaxRanks = 1 << 16;

}  // namespace

BootstrapOptions BootstrapOptions::from_environment() {
  BootstrapOptions options;
  const auto* launcher = std::find_if(kLaunchers.begin(), kLaunchers.end(),
                                      [](const Launcher& l) { return variable(l.rank).has_value(); });
  if (launcher == kLaunchers.end()) return options;
  options.size = number(launcher->size, 1, kMaxRanks);
  options.rank = number(launcher->rank, 0, options.size - 1);
  // Without it all ranks are taken to be on one machine.
  options.local_rank =
      variable(launcher->local_rank) ? number(launcher->local_rank, 0, kMaxRanks) : options.rank;
  const std::optional<std::string> address = variable("MASTER_ADDR");
  const bool is_one_machine = options.size == 1 ||
                              variable(launcher->local_size) == variable(launcher->size) ||
                              variable("SLURM_NNODES") == "1";
  HELIX_EXPECTS(address || is_one_machine, ErrorCode::invalid_argument,
                "bootstrap: MASTER_ADDR is not set; set it to the host of rank 0 on all ranks");
  if (address) options.address = *address;
  if (const auto port = variable("MASTER_PORT")) {
    const bool is_taken = variable("TORCHELASTIC_RUN_ID").has_value();
    options.port = number("MASTER_PORT", *port, 1, 65534) + (is_taken ? 1 : 0);
  }
  return options;
}

struct Bootstrap::State {
  Connections connections;  // its watch sockets are the thread's
  std::shared_ptr<Watch> watch = std::make_shared<Watch>();
  std::thread thread;
  std::mutex in_use;

  ~State() {
    if (!thread.joinable()) return;
    watch->is_stopping.store(true, std::memory_order_release);
    watch->wake_up();
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }

  void check() const {
    if (!watch->has_failed.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(watch->mutex);
    throw Error(ErrorCode::peer_failed, watch->failure);
  }

  Clock::time_point deadline() const { return Clock::now() + watch->options.timeout; }

  void expect_done(Transfer transfer, const char* operation, std::size_t peer) const {
    if (transfer == Transfer::done) return;
    // The watching thread may know more in a moment.
    if (transfer == Transfer::closed) std::this_thread::sleep_for(2 * kPollSlice);
    check();
    HELIX_EXPECTS(transfer != Transfer::closed, ErrorCode::peer_failed, "bootstrap ", operation, ": rank ",
                  peer, " closed its connection to rank ", watch->options.rank);
    throw Error(ErrorCode::timeout, "bootstrap ", operation, ": rank ", peer, " did not arrive within ",
                seconds(watch->options.timeout), " s; rank ", watch->options.rank, " waited");
  }

  void send(std::size_t peer, const void* data, std::size_t bytes, const char* operation) const {
    expect_done(send_all(connections.control[index(peer)].fd(), data, bytes, deadline()), operation, peer);
  }
  void recv(std::size_t peer, void* data, std::size_t bytes, const char* operation) const {
    expect_done(recv_all(connections.control[index(peer)].fd(), data, bytes, deadline(), [this] { check(); }),
                operation, peer);
  }
  std::size_t index(std::size_t peer) const { return watch->options.rank == 0 ? peer : 0; }
};

Bootstrap::Bootstrap(const BootstrapOptions& options) : state_(std::make_shared<State>()) {
  HELIX_EXPECTS(options.size >= 1 && options.rank >= 0 && options.rank < options.size,
                ErrorCode::invalid_argument, "bootstrap: rank ", options.rank, " of ", options.size,
                "; ranks are 0 to size - 1");
  HELIX_EXPECTS(options.timeout.count() > 0 && options.heartbeat.count() > 0, ErrorCode::invalid_argument,
                "bootstrap: timeout is ", options.timeout.count(), " ms and heartbeat ",
                options.heartbeat.count(), " ms; both must be positive");
  Watch& watch = *state_->watch;
  watch.options = options;
  if (options.size == 1) return;
  state_->connections = options.rank == 0 ? serve(options) : join(options);
  for (std::size_t i = 0; i < state_->connections.watch.size(); ++i) {
    if (!state_->connections.watch[i].is_open()) continue;  // rank 0 has none to itself
    Peer peer;
    peer.socket = std::move(state_->connections.watch[i]);
    peer.rank = static_cast<int>(i);  // the only peer of another rank is rank 0
    peer.last = watch.own_beat();
    peer.last.rank = peer.rank;
    watch.peers.push_back(std::move(peer));
  }
  state_->thread = std::thread([shared = state_->watch] { shared->run(); });
}

int Bootstrap::rank() const {
  return state_->watch->options.rank;
}
int Bootstrap::size() const {
  return state_->watch->options.size;
}
int Bootstrap::local_rank() const {
  return state_->watch->options.local_rank;
}
milliseconds Bootstrap::timeout() const {
  return state_->watch->options.timeout;
}

void Bootstrap::broadcast(std::span<std::byte> bytes) {
  const std::lock_guard lock(state_->in_use);
  state_->check();
  std::uint64_t num_bytes = bytes.size();
  if (rank() == 0) {
    for (std::size_t peer = 1; peer < static_cast<std::size_t>(size()); ++peer) {
      state_->send(peer, &num_bytes, sizeof(num_bytes), "broadcast");
      state_->send(peer, bytes.data(), bytes.size(), "broadcast");
    }
    return;
  }
  state_->recv(0, &num_bytes, sizeof(num_bytes), "broadcast");
  HELIX_EXPECTS(num_bytes == bytes.size(), ErrorCode::invalid_argument, "bootstrap broadcast: rank 0 sends ",
                num_bytes, " bytes, rank ", rank(), " expects ", bytes.size());
  state_->recv(0, bytes.data(), bytes.size(), "broadcast");
}

std::vector<std::vector<std::byte>> Bootstrap::gather(std::span<const std::byte> bytes) {
  constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 30;  // a size beyond is no size
  const std::lock_guard lock(state_->in_use);
  state_->check();
  std::uint64_t num_bytes = bytes.size();
  if (rank() != 0) {
    state_->send(0, &num_bytes, sizeof(num_bytes), "gather");
    state_->send(0, bytes.data(), bytes.size(), "gather");
    return {};
  }
  std::vector<std::vector<std::byte>> all(static_cast<std::size_t>(size()));
  all[0].assign(bytes.begin(), bytes.end());
  for (std::size_t peer = 1; peer < all.size(); ++peer) {
    state_->recv(peer, &num_bytes, sizeof(num_bytes), "gather");
    HELIX_EXPECTS(num_bytes <= kMaxBytes, ErrorCode::invalid_argument, "bootstrap gather: rank ", peer,
                  " announces ", num_bytes, " bytes; at most ", kMaxBytes, " are taken");
    all[peer].resize(static_cast<std::size_t>(num_bytes));
    state_->recv(peer, all[peer].data(), all[peer].size(), "gather");
  }
  return all;
}

void Bootstrap::barrier() {
  gather({});
  broadcast({});
}

void Bootstrap::set_step(std::uint64_t step) {
  state_->watch->step.store(step, std::memory_order_relaxed);
}

void Bootstrap::begin_operation(const char* operation) {
  state_->watch->operation.store(operation, std::memory_order_relaxed);
  state_->watch->operations.fetch_add(1, std::memory_order_relaxed);
}

void Bootstrap::begin_wait() {
  state_->watch->waiting_since.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
}

void Bootstrap::end_wait() {
  state_->watch->waiting_since.store(0, std::memory_order_relaxed);
}

void Bootstrap::on_failure(std::function<void(const Error&)> callback) {
  {
    const std::lock_guard lock(state_->watch->mutex);
    if (!state_->watch->has_failed) {
      state_->watch->callbacks.push_back(std::move(callback));
      return;
    }
  }
  callback(Error(ErrorCode::peer_failed, state_->watch->failure));
}

void Bootstrap::fail(std::string_view reason) noexcept {
  try {
    Watch& watch = *state_->watch;
    const std::string text = watch.describe(watch.own_beat(), reason);
    {
      const std::lock_guard lock(watch.mutex);
      if (watch.has_failed) return;
      watch.own_failure = text;
    }
    watch.wake_up();
    watch.set_failure(text);
  } catch (...) {
    // Out of memory for the message: the others see the silence.
  }
}

bool Bootstrap::has_failed() const {
  return state_->watch->has_failed.load(std::memory_order_acquire);
}

void Bootstrap::check() const {
  state_->check();
}

}  // namespace helix::comm
