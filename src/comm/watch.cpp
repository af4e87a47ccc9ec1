// SPDX-License-Identifier: Apache-2.0
// Sends heartbeats, and names the ranks whose heartbeats are missing.
#include "comm/watch.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <thread>
#include <utility>

namespace helix::comm {
namespace {

/// Does not use a stream: when memory runs out, a stream truncates the text and does not throw.
std::string place_of(const Beat& beat) {
  const bool is_known = beat.operation.front() != '\0';
  return message({is_known ? "in " : "", beat.operation.data(), is_known ? " " : "", "at step ", beat.step,
                  " (operation ", beat.operations, ")"});
}

bool has_moved(const Beat& from, const Beat& to) {
  return from.step != to.step || from.operations != to.operations;
}

/// The earlier of two times; 0 means none.
Clock::rep earlier(Clock::rep one, Clock::rep other) {
  return one == 0 || other == 0 ? std::max(one, other) : std::min(one, other);
}

/// Moves the start of a wait to `now`, unless the wait ends meanwhile.
void begin_anew(std::atomic<Clock::rep>& begin, Clock::time_point now) {
  Clock::rep since = begin.load(std::memory_order_relaxed);
  if (since != 0) begin.compare_exchange_strong(since, now.time_since_epoch().count());
}

/// A heartbeat fits in the socket's buffer unless the peer has stopped reading for minutes. Such a peer is
/// dead, so a send waits no longer than this.
constexpr milliseconds kSending{200};

}  // namespace

std::uint64_t Waits::begin() {
  const std::lock_guard lock(mutex_);
  waits_.push_back({++last_, Clock::now().time_since_epoch().count()});
  since_.store(waits_.front().since, std::memory_order_relaxed);
  return last_;
}

void Waits::end(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  std::erase_if(waits_, [&](const Wait& wait) { return wait.number == number; });
  since_.store(waits_.empty() ? 0 : waits_.front().since, std::memory_order_relaxed);
}

void Waits::begin_anew(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (waits_.empty()) return;
  for (Wait& wait : waits_) wait.since = now.time_since_epoch().count();
  since_.store(waits_.front().since, std::memory_order_relaxed);
}

void Watch::wake_up() const {
  const std::uint64_t one = 1;
  (void)!::write(wake.fd(), &one, sizeof(one));
}

void Watch::begin_exchange(const char* name, int peer) {
  exchange.store(name, std::memory_order_relaxed);
  exchange_since.store(Clock::now().time_since_epoch().count(), std::memory_order_release);
  exchange_peer.store(peer, std::memory_order_release);
}

void Watch::end_exchange() {
  exchange_peer.store(-1, std::memory_order_relaxed);
  exchange_since.store(0, std::memory_order_relaxed);
}

void Watch::reserve() {
  entries_.reserve(peers.size() + 1);
  standings_.reserve(peers.size() + 1);
}

void Watch::set_failure(std::string_view text) noexcept {
  Error error = unnamed;
  try {
    error = Error(ErrorCode::peer_failed, text);
  } catch (...) {
    // Out of memory for the text: report the failure without it.
  }
  std::vector<std::function<void(const Error&)>> to_call;
  {
    const std::lock_guard lock(mutex);
    if (has_failed) return;
    failure = error;
    has_failed.store(true, std::memory_order_release);
    to_call.swap(callbacks);
  }
  for (const auto& callback : to_call) {
    try {
      callback(error);
    } catch (...) {
      // Out of memory: still call the others. Whoever checks later learns of the failure.
    }
  }
}

Beat Watch::failure_beat(std::string_view text) const {
  Beat beat = own_beat();
  beat.kind = BeatKind::failure;
  set_text(beat.text, text);
  return beat;
}

Beat Watch::own_beat(Clock::time_point now) const {
  Beat beat;
  beat.rank = options.rank;
  beat.step = step.load(std::memory_order_relaxed);
  beat.operations = operations.load(std::memory_order_relaxed);
  const Clock::rep in_exchange = exchange_since.load(std::memory_order_acquire);
  set_text(beat.operation, (in_exchange != 0 ? exchange : operation).load(std::memory_order_relaxed));
  const Clock::rep since = earlier(waits.since(), in_exchange);
  if (since != 0) {
    const auto waited = now - Clock::time_point(Clock::duration(since));
    beat.waited_ms = static_cast<std::uint32_t>(
        std::max<std::int64_t>(1, std::chrono::ceil<milliseconds>(waited).count()));
  }
  return beat;
}

std::string Watch::describe(const Beat& beat, std::string_view what) const {
  return message({"rank ", beat.rank, " of ", options.size, " failed ", place_of(beat), ": ", what});
}

void Watch::tell_all(const Beat& beat) {
  for (Peer& peer : peers) {
    if (!peer.socket.is_open()) continue;
    tell(peer, beat);
    stay_awake();
  }
}

void Watch::tell(Peer& peer, const Beat& beat) const {
  const auto send_unsent = [&] {
    auto rest = std::span<const std::byte>(peer.outgoing).last(peer.num_unsent);
    (void)send_rest(peer.socket.fd(), rest, Clock::now() + std::min(kSending, options.timeout / 4),
                    kKeepWaiting);
    peer.num_unsent = rest.size();
  };
  send_unsent();
  if (peer.num_unsent > 0) return;
  std::memcpy(peer.outgoing.data(), &beat, sizeof(beat));
  peer.num_unsent = sizeof(beat);
  send_unsent();
}

void Watch::judge(std::string_view text) {
  if (options.rank == 0) tell_all(failure_beat(text));
  set_failure(text);
}

void Watch::handle(Peer& peer, const Beat& beat) {
  peer.last_heard = Clock::now();
  if (has_moved(peer.last, beat)) peer.last_moved = peer.last_heard;
  peer.last = beat;
  peer.last.rank = peer.rank;
  if (beat.kind == BeatKind::farewell) peer.is_watched = false;
  if (beat.kind == BeatKind::failure) judge(beat.text.data());
}

void Watch::lose(Peer& peer, std::string_view why) {
  const bool was_watched = std::exchange(peer.is_watched, false);
  peer.socket = Socket();
  if (was_watched) judge(describe(peer.last, why));
}

void Watch::receive(Peer& peer) {
  for (;;) {
    const ssize_t received = ::recv(peer.socket.fd(), peer.incoming.data() + peer.num_incoming,
                                    peer.incoming.size() - peer.num_incoming, MSG_DONTWAIT);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (received <= 0) return lose(peer, "its connection closed");
    peer.num_incoming += static_cast<std::size_t>(received);
    if (peer.num_incoming < sizeof(Beat)) continue;
    peer.num_incoming = 0;
    const std::optional<Beat> beat = read_beat(peer.incoming);
    if (!beat) return lose(peer, "it sent what is no heartbeat");
    handle(peer, *beat);
  }
}

void Watch::check_silence() {
  for (Peer& peer : peers) {
    if (!peer.is_watched || awake_ - peer.last_heard < options.timeout) continue;
    peer.is_watched = false;
    judge(describe(peer.last, message({"no sign of life for ", seconds(options.timeout), " s"})));
  }
}

void Watch::look_around() {
  const auto is_still = [&](Clock::time_point last_moved) {
    return awake_ - last_moved >= options.timeout / 2;
  };
  standings_.clear();
  standings_.push_back({.beat = &last_beat_, .is_still = is_still(last_moved_)});
  for (const Peer& peer : peers) {
    standings_.push_back(
        {.beat = &peer.last, .has_left = !peer.is_watched, .is_still = is_still(peer.last_moved)});
  }
}

std::optional<Lag> Watch::find_absent() const {
  const int peer = exchange_peer.load(std::memory_order_acquire);
  if (peer < 0) return std::nullopt;
  const Clock::time_point since{Clock::duration(exchange_since.load(std::memory_order_acquire))};
  if (awake_ - since < options.timeout / 2) return std::nullopt;  // others may wait for something else
  const Standing& absent = standings_[static_cast<std::size_t>(peer)];
  if (absent.has_left || absent.beat->waited_ms > 0) return std::nullopt;
  for (const Standing& rank : standings_) {
    if (rank.has_left || milliseconds(rank.beat->waited_ms) < options.timeout) continue;
    return Lag{.waiting = rank.beat, .behind = absent.beat, .how = "it did not arrive"};
  }
  return std::nullopt;
}

void Watch::check_lag() {
  // A rank that has missed some heartbeats may be the one that all others wait for. Its silence or its next
  // heartbeat will tell.
  constexpr int kMissed = 3;
  const auto is_unheard = [&](const Peer& peer) {
    return peer.is_watched && awake_ - peer.last_heard > kMissed * options.heartbeat;
  };
  look_around();
  std::optional<Lag> lag = find_absent();
  if (!lag && std::ranges::none_of(peers, is_unheard)) lag = find_lag(standings_, options.timeout);
  if (!lag) return;
  judge(describe(*lag->behind, message({lag->how, ": rank ", lag->waiting->rank, " has waited for ",
                                        lag->waiting->waited_ms, " ms ", place_of(*lag->waiting)})));
}

void Watch::tell_own_failure() {
  Beat beat;
  {
    const std::lock_guard lock(mutex);
    if (!own_failure) return;
    beat = *own_failure;
  }
  tell_all(beat);
  {
    const std::lock_guard lock(mutex);
    own_failure.reset();
  }
  told.notify_all();
}

void Watch::stay_awake() {
  const Clock::time_point before = std::exchange(awake_, Clock::now());
  if (awake_ - before <= options.timeout / 2) return;  // one step takes at most a quarter
  for (Peer& peer : peers) peer.last_heard = awake_;
  waits.begin_anew(awake_);
  begin_anew(exchange_since, awake_);
}

void Watch::turn() {
  stay_awake();
  tell_own_failure();
  if (awake_ >= next_beat_) {
    const Beat beat = own_beat(awake_);
    if (has_moved(last_beat_, beat)) last_moved_ = awake_;
    last_beat_ = beat;
    tell_all(beat);
    next_beat_ = deadline_after(options.heartbeat);
    if (!has_failed.load(std::memory_order_acquire)) {
      check_silence();
      if (options.rank == 0) check_lag();
    }
  }
  wait_for_messages();
}

void Watch::give_up(const char* why) noexcept {
  if (has_failed.load(std::memory_order_acquire)) return;
  Beat beat = failure_beat("");
  std::snprintf(beat.text.data(), beat.text.size(),
                "rank %d of %d failed: its thread that watches the other ranks met %s", options.rank,
                options.size, why);
  try {
    tell_all(beat);
  } catch (...) {
    // The peers see this process end.
  }
  set_failure(beat.text.data());
}

void Watch::run() noexcept {
  const auto guarded = [this](const auto& body) noexcept {
    try {
      body();
      return;
    } catch (const std::exception& error) {
      give_up(error.what());
    } catch (...) {
      give_up("an exception");
    }
    std::this_thread::sleep_for(milliseconds(10));  // an error may repeat each turn: do not spin
  };
  while (!is_stopping.load(std::memory_order_acquire)) guarded([this] { turn(); });
  guarded([this] {
    tell_own_failure();
    Beat beat = own_beat();
    beat.kind = BeatKind::farewell;
    tell_all(beat);
  });
}

void Watch::wait_for_messages() {
  entries_.clear();
  entries_.push_back({.fd = wake.fd(), .events = POLLIN, .revents = 0});
  for (const Peer& peer : peers) {
    entries_.push_back({.fd = peer.socket.fd(), .events = POLLIN, .revents = 0});  // -1 is skipped
  }
  const auto left = std::chrono::ceil<milliseconds>(next_beat_ - Clock::now()).count();
  const auto limit = static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
  if (::poll(entries_.data(), entries_.size(), limit) <= 0) return;
  std::uint64_t count = 0;
  if (entries_[0].revents != 0) (void)!::read(wake.fd(), &count, sizeof(count));
  for (std::size_t i = 0; i < peers.size(); ++i) {
    if (entries_[i + 1].revents != 0) receive(peers[i]);
  }
}

}  // namespace helix::comm
