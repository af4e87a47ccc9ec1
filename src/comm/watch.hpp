// SPDX-License-Identifier: Apache-2.0
// The thread of each process that sends heartbeats, listens to those of others, and says who has failed.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <poll.h>
#include <sys/eventfd.h>

#include <helix/comm/bootstrap.hpp>
#include <helix/error.hpp>

#include "comm/bootstrap_messages.hpp"
#include "comm/socket.hpp"

namespace helix::comm {

/// The other end of a watch connection, as its last heartbeat told.
struct Peer {
  Socket socket;
  int rank = 0;
  bool is_watched = true;  // not any more after a farewell
  Beat last;
  Clock::time_point last_heard = Clock::now();
  std::array<std::byte, sizeof(Beat)> incoming{};
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

  /// The thread: until `is_stopping`, then says farewell.
  void run();
  /// Ends the thread's sleep.
  void wake_up() const;

  /// The first failure wins. Callbacks are called without the mutex.
  void set_failure(const std::string& text);
  /// Where this rank stands.
  Beat own_beat() const;
  /// "rank 1 of 2 failed in all_reduce at step 7 (operation 1): " and `what`.
  std::string describe(const Beat& beat, std::string_view what) const;

 private:
  void tell_all(const Beat& beat);
  void tell_own_failure();
  /// Ends the job on this rank, and on all others where this is rank 0.
  void judge(const std::string& text);
  void handle(Peer& peer, const Beat& beat);
  void receive(Peer& peer);
  /// Closes the connection of a peer, which has failed unless it has said farewell.
  void lose(Peer& peer, std::string_view why);
  void check_silence();
  /// Rank 0: somebody waits too long, and somebody else is behind.
  void check_lag();
  /// Sleeps until a message, a wake-up or the next heartbeat, and handles what came.
  void wait_for_messages(Clock::time_point next_beat);

  std::vector<pollfd> entries_;  // the wake-up, then the peers
};

}  // namespace helix::comm
