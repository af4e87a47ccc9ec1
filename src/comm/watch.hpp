// SPDX-License-Identifier: Apache-2.0
// The thread of each process that sends heartbeats, receives those of its peers, and decides who has failed.
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

/// The other end of a watch connection, as its last heartbeat described it.
struct Peer {
  Socket socket;
  int rank = 0;
  bool is_watched = true;  // false after a farewell
  Beat last;
  Clock::time_point last_heard = Clock::now();
  Clock::time_point last_moved = Clock::now();  // to another step or operation, by its heartbeats
  std::array<std::byte, sizeof(Beat)> incoming{};
  std::size_t num_incoming = 0;
  std::array<std::byte, sizeof(Beat)> outgoing{};
  std::size_t num_unsent = 0;  // at the end of `outgoing`
};

/// The waits of this rank for others. Several threads may wait at once.
class Waits {
 public:
  Waits() { waits_.reserve(8); }  // so that few waits allocate nothing

  /// Begins a wait and returns its number.
  std::uint64_t begin();
  void end(std::uint64_t number);
  /// When the oldest wait began; 0: this rank does not wait.
  Clock::rep since() const { return since_.load(std::memory_order_relaxed); }
  /// Moves the start of all waits to `now`.
  void begin_anew(Clock::time_point now);

 private:
  struct Wait {
    std::uint64_t number;
    Clock::rep since;
  };

  std::mutex mutex_;
  std::vector<Wait> waits_;  // oldest first
  std::uint64_t last_ = 0;   // number of a wait
  std::atomic<Clock::rep> since_ = 0;
};

/// State shared with the watching thread. That thread may outlive the Bootstrap, if it drops the last copy
/// itself.
struct Watch {
  BootstrapOptions options;
  std::vector<Peer> peers;  // used by the watching thread only
  Socket wake{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<bool> is_stopping = false;

  std::atomic<std::uint64_t> step = 0;
  std::atomic<std::uint64_t> operations = 0;
  std::atomic<const char*> operation = "start";
  Waits waits;

  // The transfer of broadcast(), gather() or barrier(): a wait too, maybe inside the one above.
  std::atomic<Clock::rep> exchange_since = 0;  // 0: none
  std::atomic<const char*> exchange = "";
  std::atomic<int> exchange_peer = -1;  // -1: none

  mutable std::mutex mutex;
  std::atomic<bool> has_failed = false;
  const Error unnamed{ErrorCode::peer_failed, kUnnamedFailure};
  Error failure = unnamed;          // copies share the text
  std::optional<Beat> own_failure;  // not yet told to the others
  std::condition_variable told;     // own_failure has been told
  std::vector<std::function<void(const Error&)>> callbacks;

  /// Allocates, before the thread starts, the memory that it needs while nothing fails.
  void reserve();
  /// Body of the thread: runs until `is_stopping`, then says farewell. Its exceptions end the job, not the
  /// process.
  void run() noexcept;
  /// Ends the thread's sleep.
  void wake_up() const;

  /// Begins a transfer with `peer`; this rank counts as waiting until end_exchange(). `name` is a string
  /// literal.
  void begin_exchange(const char* name, int peer);
  void end_exchange();

  /// Sets the failure unless one is set. Calls the callbacks without the mutex; one that throws stops no
  /// other.
  void set_failure(std::string_view text) noexcept;
  /// The heartbeat that says that this rank has failed, with `text`.
  Beat failure_beat(std::string_view text) const;
  /// The heartbeat that describes this rank now.
  Beat own_beat(Clock::time_point now = Clock::now()) const;
  /// "rank 1 of 2 failed in all_reduce at step 7 (operation 1): " and `what`.
  std::string describe(const Beat& beat, std::string_view what) const;

 private:
  /// Sends heartbeats and makes checks that are due, then sleeps.
  void turn();
  /// Ends the job because this thread cannot continue; allocates nothing.
  void give_up(const char* why) noexcept;
  /// Notes the time; called between any two steps that may take long. If the process itself slept since the
  /// last call (stopped by a signal, or with its machine), restarts all silences and waits.
  void stay_awake();
  void tell_all(const Beat& beat);
  /// Sends what is left of the previous heartbeat, then this one. A peer that does not take them misses this
  /// one.
  void tell(Peer& peer, const Beat& beat) const;
  void tell_own_failure();
  /// Ends the job on this rank; rank 0 ends it on all others too.
  void judge(std::string_view text);
  void handle(Peer& peer, const Beat& beat);
  void receive(Peer& peer);
  /// Closes the connection of a peer. The peer has failed unless it said farewell.
  void lose(Peer& peer, std::string_view why);
  void check_silence();
  /// Rank 0 only: ends the job if a rank has waited too long and another rank keeps it waiting.
  void check_lag();
  /// Fills standings_, by rank.
  void look_around();
  /// The peer of rank 0's current transfer, if some rank has waited for the timeout and that peer waits for
  /// nobody. It is to blame even if other ranks wait for nobody too: in an exchange all ranks either wait for
  /// rank 0 or are done with it.
  std::optional<Lag> find_absent() const;
  /// Sleeps until a message, a wake-up or the next heartbeat, and handles what came.
  void wait_for_messages();

  Clock::time_point next_beat_ = Clock::now();
  Clock::time_point awake_ = Clock::now();       // checks count time up to here
  Clock::time_point last_moved_ = Clock::now();  // of this rank, as in Peer
  Beat last_beat_;
  std::vector<pollfd> entries_;  // the wake-up descriptor, then the peers
  std::vector<Standing> standings_;
};

}  // namespace helix::comm
