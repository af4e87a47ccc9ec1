// SPDX-License-Identifier: Apache-2.0
// The thread of each process that sends heartbeats, listens to those of others, and says who has failed.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <poll.h>
#include <sys/eventfd.h>

#include <helix/comm/bootstrap.hpp>
#include <helix/error.hpp>

#include "comm/bootstrap_messages.hpp"
#include "comm/lag.hpp"
#include "comm/rank_names.hpp"
#include "comm/socket.hpp"

namespace helix::comm {

/// The other end of a watch connection, as its last heartbeat told.
struct Peer {
  Socket socket;
  int rank = 0;
  bool is_watched = true;  // not any more after a farewell
  Beat last;
  Clock::time_point last_heard = Clock::now();
  Clock::time_point last_moved = Clock::now();  // to another step or operation
  std::array<std::byte, sizeof(Beat)> incoming{};
  std::size_t num_incoming = 0;
  std::array<std::byte, sizeof(Beat)> outgoing{};
  std::size_t num_unsent = 0;  // of its last bytes
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

  // The transfer that broadcast(), gather() or barrier() is at: a wait as well, maybe inside the one above.
  std::atomic<Clock::rep> exchange_since = 0;  // 0: at none
  std::atomic<const char*> exchange = "";
  std::atomic<int> exchange_peer = -1;  // -1: none

  mutable std::mutex mutex;
  std::atomic<bool> has_failed = false;
  const Error unnamed{ErrorCode::peer_failed, kUnnamedFailure};
  Error failure = unnamed;          // copies share the text
  std::optional<Beat> own_failure;  // to be told to the others
  std::condition_variable told;     // it has been
  std::vector<std::function<void(const Error&)>> callbacks;

  /// Takes the memory that the thread needs while nothing fails, before it starts.
  void reserve();
  /// The thread: until `is_stopping`, then says farewell. What it throws ends the job, not the process.
  void run() noexcept;
  /// Ends the thread's sleep.
  void wake_up() const;

  /// Begins a transfer with `peer`, for which this rank waits until end_exchange(); `name` is a literal.
  void begin_exchange(const char* name, int peer);
  void end_exchange();

  /// The first failure wins. Callbacks are called without the mutex, each whatever the others throw.
  void set_failure(std::string_view text) noexcept;
  /// The message that this rank has failed, as `text` says.
  Beat failure_beat(std::string_view text) const;
  /// Where this rank stands.
  Beat own_beat(Clock::time_point now = Clock::now()) const;
  /// "rank 1 of 2 failed in all_reduce at step 7 (operation 1): " and `what`.
  std::string describe(const Beat& beat, std::string_view what) const;

 private:
  /// Heartbeats and checks that are due, then a sleep.
  void turn();
  /// Ends the job because this thread cannot go on; takes no memory.
  void give_up(const char* why) noexcept;
  /// Notes the time, between any two steps that take long. Where this process itself slept since the last
  /// time, stopped by a signal or with its machine, nobody has been silent, and no wait has lasted.
  void stay_awake();
  void tell_all(const Beat& beat);
  /// Sends the beat, after what is left of the one before; a peer that takes neither misses this one.
  void tell(Peer& peer, const Beat& beat) const;
  void tell_own_failure();
  /// Ends the job on this rank, and on all others where this is rank 0.
  void judge(std::string_view text);
  void handle(Peer& peer, const Beat& beat);
  void receive(Peer& peer);
  /// Closes the connection of a peer, which has failed unless it has said farewell.
  void lose(Peer& peer, std::string_view why);
  void check_silence();
  /// Rank 0: somebody waits too long, and somebody else keeps it waiting.
  void check_lag();
  /// Takes where all ranks stand into standings_, by rank.
  void look_around();
  /// The rank with which rank 0 is at a transfer, where somebody has waited too long and that rank waits for
  /// nobody. Who keeps the others waiting is known then, whoever else waits for nobody: in an exchange all
  /// wait for rank 0, or are done with it.
  std::optional<Lag> find_absent() const;
  /// Sleeps until a message, a wake-up or the next heartbeat, and handles what came.
  void wait_for_messages();

  Clock::time_point next_beat_ = Clock::now();
  Clock::time_point awake_ = Clock::now();       // what is judged counts to here: a sleep is behind it
  Clock::time_point last_moved_ = Clock::now();  // this rank, as a Peer's
  Beat last_beat_;
  std::vector<pollfd> entries_;  // the wake-up, then the peers
  std::vector<Standing> standings_;
};

}  // namespace helix::comm
