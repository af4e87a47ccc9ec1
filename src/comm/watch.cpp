// SPDX-License-Identifier: Apache-2.0
// Heartbeats, and who is named by their absence.
#include "comm/watch.hpp"

#include <algorithm>
#include <cerrno>
#include <optional>
#include <sstream>
#include <utility>

namespace helix::comm {
namespace {

std::string place_of(const Beat& beat) {
  std::ostringstream text;
  if (beat.operation.front() != '\0') text << "in " << beat.operation.data() << " ";
  text << "at step " << beat.step << " (operation " << beat.operations << ")";
  return text.str();
}

/// A heartbeat fits in the socket's buffer unless the peer has stopped reading for minutes; then it is
/// dead.
void send_beat(Peer& peer, const Beat& beat) {
  if (peer.socket.is_open())
    (void)send_all(peer.socket.fd(), &beat, sizeof(beat), Clock::now() + milliseconds(200));
}

}  // namespace

void Watch::wake_up() const {
  const std::uint64_t one = 1;
  (void)!::write(wake.fd(), &one, sizeof(one));
}

void Watch::set_failure(const std::string& text) {
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

Beat Watch::own_beat() const {
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

std::string Watch::describe(const Beat& beat, std::string_view what) const {
  std::ostringstream text;
  text << "rank " << beat.rank << " of " << options.size << " failed " << place_of(beat) << ": " << what;
  return text.str();
}

void Watch::tell_all(const Beat& beat) {
  for (Peer& peer : peers) send_beat(peer, beat);
}

void Watch::judge(const std::string& text) {
  if (options.rank == 0) {
    Beat beat = own_beat();
    beat.kind = BeatKind::failure;
    set_text(beat.text, text);
    tell_all(beat);
  }
  set_failure(text);
}

void Watch::handle(Peer& peer, const Beat& beat) {
  peer.last_heard = Clock::now();
  peer.last = beat;
  peer.last.rank = peer.rank;
  if (beat.kind == BeatKind::farewell) peer.is_watched = false;
  if (beat.kind == BeatKind::failure) judge(beat.text.data());
}

void Watch::lose(Peer& peer, std::string_view why) {
  if (peer.is_watched) judge(describe(peer.last, why));
  peer.is_watched = false;
  peer.socket = Socket();
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
    if (!peer.is_watched || Clock::now() - peer.last_heard < options.timeout) continue;
    std::ostringstream text;
    text << "no sign of life for " << seconds(options.timeout) << " s";
    peer.is_watched = false;
    judge(describe(peer.last, text.str()));
  }
}

void Watch::check_lag() {
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

void Watch::tell_own_failure() {
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

void Watch::run() {
  Clock::time_point next_beat = Clock::now();
  while (!is_stopping.load(std::memory_order_acquire)) {
    tell_own_failure();
    if (Clock::now() >= next_beat) {
      tell_all(own_beat());
      next_beat = deadline_after(options.heartbeat);
      if (!has_failed.load(std::memory_order_acquire)) {
        check_silence();
        if (options.rank == 0) check_lag();
      }
    }
    wait_for_messages(next_beat);
  }
  tell_own_failure();
  Beat beat = own_beat();
  beat.kind = BeatKind::farewell;
  tell_all(beat);
}

void Watch::wait_for_messages(Clock::time_point next_beat) {
  entries_.clear();
  entries_.push_back({.fd = wake.fd(), .events = POLLIN, .revents = 0});
  for (const Peer& peer : peers) {
    entries_.push_back({.fd = peer.socket.fd(), .events = POLLIN, .revents = 0});  // -1 is skipped
  }
  const auto left = std::chrono::ceil<milliseconds>(next_beat - Clock::now()).count();
  const auto limit = static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
  if (::poll(entries_.data(), entries_.size(), limit) <= 0) return;
  std::uint64_t count = 0;
  if (entries_[0].revents != 0) (void)!::read(wake.fd(), &count, sizeof(count));
  for (std::size_t i = 0; i < peers.size(); ++i) {
    if (entries_[i + 1].revents != 0) receive(peers[i]);
  }
}

}  // namespace helix::comm
