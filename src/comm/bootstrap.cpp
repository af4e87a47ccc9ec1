// SPDX-License-Identifier: Apache-2.0
// comm::Bootstrap: broadcast, gather and barrier over a star around rank 0, and the life of the watching
// thread.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <utility>

#include <helix/comm/bootstrap.hpp>
#include <helix/limits.hpp>

#include "comm/check_after_close.hpp"
#include "comm/first_failure.hpp"
#include "comm/rendezvous.hpp"
#include "comm/start_thread.hpp"
#include "comm/watch.hpp"

namespace helix::comm {
namespace {

/// Longest time that a failing rank waits until the others have been told.
constexpr milliseconds kTelling{1000};

constexpr const char* kBroadcast = "bootstrap broadcast";
constexpr const char* kGather = "bootstrap gather";

/// The heartbeat interval: at most a quarter of the timeout, so that several are due before silence counts.
milliseconds heartbeat_of(const BootstrapOptions& options) {
  return std::min(options.heartbeat, std::max(milliseconds(1), options.timeout / 4));
}

/// Limit of a transfer between rank 0 and another rank. From the timeout on, rank 0's watch decides who keeps
/// whom waiting. If it has not decided, rank 0 ends the job at this limit, and the other ranks end soon after
/// by themselves: all within twice the timeout.
milliseconds transfer_limit(const BootstrapOptions& options) {
  const int quarters = options.rank == 0 ? 6 : 7;
  return quarters * bounded(options.timeout) / 4;
}

/// While it lives, tells the watch which peer this rank waits for.
class Exchange {
 public:
  Exchange(Watch& watch, const char* name, std::size_t peer) : watch_(watch) {
    watch_.begin_exchange(name, static_cast<int>(peer));
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  ~Exchange() { watch_.end_exchange(); }

 private:
  Watch& watch_;
};

}  // namespace

struct Bootstrap::State {
  Connections connections;  // the watching thread owns the watch sockets
  std::shared_ptr<Watch> watch = std::make_shared<Watch>();
  Thread thread;
  std::mutex in_use;
  FirstFailure calls;  // on the control connections

  ~State() {
    if (!thread.joinable()) return;
    watch->is_stopping.store(true, std::memory_order_release);
    watch->wake_up();
    if (thread.is_current()) {
      thread.detach();
    } else {
      thread.join();
    }
  }

  void check() const {
    if (!watch->has_failed.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(watch->mutex);
    throw Error(watch->failure);
  }

  /// Ends the job on all ranks with the failure `text`; returns when they have been told.
  void end_job(std::string_view text) const noexcept;

  /// Unless the transfer is done, throws what has ended the job, or else an error that blames `peer`. On rank
  /// 0 this ends the job, because the others wait for rank 0 and would blame it.
  void expect_done(Transfer transfer, const char* operation, std::size_t peer) const {
    if (transfer == Transfer::done) return;
    if (transfer == Transfer::closed) {
      check_after_close([this] { check(); });
    } else {
      check();
    }
    const int rank = watch->options.rank;
    const Error error = transfer == Transfer::closed
                            ? Error(ErrorCode::peer_failed, operation, ": rank ", peer,
                                    " closed its connection to rank ", rank)
                            : Error(ErrorCode::timeout, operation, ": rank ", peer, " did not arrive within ",
                                    seconds(transfer_limit(watch->options)), " s; rank ", rank, " waited");
    if (rank == 0) end_job(error.what());
    throw error;
  }

  /// Runs the body of a call, unless an earlier call has failed.
  template <class Body>
  auto call(const Body& body) {
    const std::lock_guard lock(in_use);
    check();
    return calls.call(body);
  }

  void send(std::size_t peer, const void* data, std::size_t bytes, const char* operation) const {
    const Exchange exchange(*watch, operation, peer);
    expect_done(send_all(connections.control[index(peer)].fd(), data, bytes, deadline(), [this] { check(); }),
                operation, peer);
  }
  void recv(std::size_t peer, void* data, std::size_t bytes, const char* operation) const {
    const Exchange exchange(*watch, operation, peer);
    expect_done(recv_all(connections.control[index(peer)].fd(), data, bytes, deadline(), [this] { check(); }),
                operation, peer);
  }
  Clock::time_point deadline() const { return deadline_after(transfer_limit(watch->options)); }
  std::size_t index(std::size_t peer) const { return watch->options.rank == 0 ? peer : 0; }
};

void Bootstrap::State::end_job(std::string_view text) const noexcept {
  try {
    const bool has_others = thread.joinable();
    {
      const std::lock_guard lock(watch->mutex);
      if (!watch->has_failed && !watch->own_failure && has_others)
        watch->own_failure = watch->failure_beat(text);
    }
    watch->wake_up();
    watch->set_failure(text);
    // The failing rank may end its process next, and the reason would be lost with it.
    if (!has_others || thread.is_current()) return;
    std::unique_lock lock(watch->mutex);
    (void)watch->told.wait_for(lock, std::min(kTelling, watch->options.timeout / 2),
                               [&] { return !watch->own_failure.has_value(); });
  } catch (...) {
    // The mutex failed: nothing more can be done.
  }
}

Bootstrap::Bootstrap(const BootstrapOptions& options) : state_(std::make_shared<State>()) {
  HELIX_EXPECTS(options.size >= 1 && options.rank >= 0 && options.rank < options.size,
                ErrorCode::invalid_argument, "bootstrap: rank ", options.rank, " of ", options.size,
                "; ranks are 0 to size - 1");
  HELIX_EXPECTS(options.size <= kMaxRanks, ErrorCode::invalid_argument, "bootstrap: size is ", options.size,
                "; a job has up to ", kMaxRanks, " ranks");
  HELIX_EXPECTS(options.size == 1 || (options.port >= 1 && options.port <= 65535),
                ErrorCode::invalid_argument, "bootstrap: port is ", options.port,
                "; it must be in [1, 65535]");
  HELIX_EXPECTS(options.timeout.count() > 0 && options.heartbeat.count() > 0, ErrorCode::invalid_argument,
                "bootstrap: timeout is ", options.timeout.count(), " ms and heartbeat ",
                options.heartbeat.count(), " ms; both must be positive");
  Watch& watch = *state_->watch;
  watch.options = options;
  watch.options.timeout = bounded(options.timeout);  // bounded, because it is compared with the clock
  watch.options.heartbeat = heartbeat_of(watch.options);
  if (options.size == 1) return;
  state_->connections = options.rank == 0 ? serve(options) : join(options);
  for (std::size_t i = 0; i < state_->connections.watch.size(); ++i) {
    if (!state_->connections.watch[i].is_open()) continue;  // rank 0 has no connection to itself
    Peer peer;
    peer.socket = std::move(state_->connections.watch[i]);
    peer.rank = static_cast<int>(i);  // ranks other than 0 have one peer: rank 0
    peer.last = watch.own_beat();
    peer.last.rank = peer.rank;
    watch.peers.push_back(std::move(peer));
  }
  watch.reserve();
  state_->thread = start_thread("bootstrap: the thread that watches the other ranks",
                                [shared = state_->watch] { shared->run(); });
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
  state_->call([&] {
    std::uint64_t num_bytes = bytes.size();
    if (rank() == 0) {
      for (std::size_t peer = 1; peer < static_cast<std::size_t>(size()); ++peer) {
        state_->send(peer, &num_bytes, sizeof(num_bytes), kBroadcast);
        state_->send(peer, bytes.data(), bytes.size(), kBroadcast);
      }
      return;
    }
    state_->recv(0, &num_bytes, sizeof(num_bytes), kBroadcast);
    HELIX_EXPECTS(num_bytes == bytes.size(), ErrorCode::invalid_argument,
                  "bootstrap broadcast: rank 0 sends ", num_bytes, " bytes, rank ", rank(), " expects ",
                  bytes.size());
    state_->recv(0, bytes.data(), bytes.size(), kBroadcast);
  });
}

std::vector<std::vector<std::byte>> Bootstrap::gather(std::span<const std::byte> bytes) {
  constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 30;  // a larger size is an error
  return state_->call([&] {
    std::vector<std::vector<std::byte>> all;
    std::uint64_t num_bytes = bytes.size();
    if (rank() != 0) {
      state_->send(0, &num_bytes, sizeof(num_bytes), kGather);
      state_->send(0, bytes.data(), bytes.size(), kGather);
      return all;
    }
    all.resize(static_cast<std::size_t>(size()));
    all[0].assign(bytes.begin(), bytes.end());
    for (std::size_t peer = 1; peer < all.size(); ++peer) {
      state_->recv(peer, &num_bytes, sizeof(num_bytes), kGather);
      HELIX_EXPECTS(num_bytes <= kMaxBytes, ErrorCode::invalid_argument, "bootstrap gather: rank ", peer,
                    " announces ", num_bytes, " bytes; at most ", kMaxBytes, " are taken");
      all[peer].resize(static_cast<std::size_t>(num_bytes));
      state_->recv(peer, all[peer].data(), all[peer].size(), kGather);
    }
    return all;
  });
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

std::uint64_t Bootstrap::begin_wait() {
  return state_->watch->waits.begin();
}

void Bootstrap::end_wait(std::uint64_t wait) {
  state_->watch->waits.end(wait);
}

void Bootstrap::on_failure(std::function<void(const Error&)> callback) {
  {
    const std::lock_guard lock(state_->watch->mutex);
    if (!state_->watch->has_failed) {
      state_->watch->callbacks.push_back(std::move(callback));
      return;
    }
  }
  callback(state_->watch->failure);
}

void Bootstrap::fail(std::string_view reason) noexcept {
  Watch& watch = *state_->watch;
  std::array<char, sizeof(Beat::text)> without_memory{};
  std::string text;
  std::string_view told;
  try {
    text = watch.describe(watch.own_beat(), reason);
    told = text;
  } catch (...) {
    std::snprintf(without_memory.data(), without_memory.size(), "rank %d of %d failed: %.*s", rank(), size(),
                  static_cast<int>(std::min(reason.size(), without_memory.size())), reason.data());
    told = without_memory.data();
  }
  state_->end_job(told);
}

bool Bootstrap::has_failed() const {
  return state_->watch->has_failed.load(std::memory_order_acquire);
}

void Bootstrap::check() const {
  state_->check();
}

}  // namespace helix::comm
