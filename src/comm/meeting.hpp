// SPDX-License-Identifier: Apache-2.0
// Where the ranks of one process meet: bounded waits, and one failure state for all groups of a root.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <helix/error.hpp>

#include "comm/call.hpp"
#include "comm/move.hpp"
#include "comm/rank_names.hpp"
#include "comm/timeout.hpp"

namespace helix::comm {

/// A place where a fixed set of ranks meets round after round: all ranks of a group, or a sender and a
/// receiver. Root::mutex guards it. While `is_moving`, `calls` and `move` are read without the mutex, and do
/// not change until every rank has left the move.
struct Meeting {
  explicit Meeting(std::vector<int> names)
      : root_ranks(std::move(names)), calls(root_ranks.size(), nullptr) {}

  const std::vector<int> root_ranks;  // who meets here, as named in messages
  std::vector<Call*> calls;           // null: not arrived
  std::size_t arrived = 0;
  std::uint64_t round = 0;
  bool is_moving = false;
  Move move;
  std::atomic<std::int64_t> next_unit = 0;
  int inside = 0;                       // ranks that are moving data
  std::optional<ErrorCode> error_code;  // why this meeting failed; the root has failed then too
  std::string error_text;
  std::condition_variable changed;

  std::vector<int> missing_ranks() const {
    std::vector<int> missing;
    for (std::size_t i = 0; i < calls.size(); ++i)
      if (calls[i] == nullptr) missing.push_back(root_ranks[i]);
    return missing;
  }
  /// The call in which a rank waits here; null: it does not.
  const Call* waiting_call(int root_rank) const {
    const auto at = std::find(root_ranks.begin(), root_ranks.end(), root_rank);
    return at == root_ranks.end() || is_moving ? nullptr
                                               : calls[static_cast<std::size_t>(at - root_ranks.begin())];
  }

  /// The error of a round in which some calls failed and others did not, or nothing.
  std::optional<Error> failure_of_some() const {
    const auto has_failed = [](const Call* call) { return call->failure.has_value(); };
    const auto failed = std::ranges::find_if(calls, has_failed);
    if (failed == calls.end() || std::ranges::all_of(calls, has_failed)) return std::nullopt;
    return Error(ErrorCode::peer_failed, "rank ",
                 root_ranks[static_cast<std::size_t>(failed - calls.begin())],
                 " failed: ", *(*failed)->failure);
  }

  /// The first disagreement between the calls, or nothing.
  std::optional<Error> disagreement() const {
    if (const auto error = failure_of_some()) return error;
    std::ostringstream text;
    const Call& first = *calls.front();
    const bool is_pair = first.operation == Operation::send;
    for (std::size_t i = 1; i < calls.size(); ++i) {
      const Call& call = *calls[i];
      const bool agrees = call.count == first.count &&
                          (is_pair || (call.operation == first.operation && call.kernel == first.kernel &&
                                       call.dtype == first.dtype && call.root == first.root &&
                                       call.multiple == first.multiple));
      if (agrees) continue;
      text << "ranks disagree: rank " << root_ranks[0] << " calls " << first.describe() << ", rank "
           << root_ranks[i] << " calls " << call.describe()
           << "; all must make the same calls in the same order with the same sizes";
      return Error(ErrorCode::invalid_argument, text.str());
    }
    if (first.operation != Operation::all_to_all_v) return std::nullopt;
    for (std::size_t from = 0; from < calls.size(); ++from) {
      for (std::size_t to = 0; to < calls.size(); ++to) {
        const std::int64_t sent = calls[from]->send_bytes[to];
        const std::int64_t expected = calls[to]->recv_bytes[from];
        if (sent == expected) continue;
        text << "all_to_all_v: rank " << root_ranks[from] << " sends " << sent << " bytes to rank "
             << root_ranks[to] << ", which expects " << expected;
        return Error(ErrorCode::invalid_argument, text.str());
      }
    }
    return std::nullopt;
  }
};

/// All groups split from one create_group.
struct Root {
  std::mutex mutex;
  milliseconds timeout{0};
  std::atomic<bool> has_failed = false;          // written under mutex
  std::string failure;                           // "rank 2 failed: why"; empty: out of memory
  int silent_rank = -1;                          // the failed rank, if `failure` is empty; -1: unknown
  std::vector<std::weak_ptr<Meeting>> meetings;  // to wake on failure

  std::shared_ptr<Meeting> open_meeting(std::vector<int> root_ranks) {  // mutex held
    std::erase_if(meetings, [](const std::weak_ptr<Meeting>& meeting) { return meeting.expired(); });
    auto meeting = std::make_shared<Meeting>(std::move(root_ranks));
    meetings.push_back(meeting);
    return meeting;
  }

  static std::string failure_of(int rank, std::string_view reason) {
    return "rank " + std::to_string(rank) + " failed: " + std::string(reason);
  }

  /// Fails the group because of `rank`. If no memory is left for the text, the group fails without it.
  void fail(int rank, std::string_view reason) noexcept {  // mutex held
    std::string text;
    try {
      text = failure_of(rank, reason);
    } catch (...) {
      if (!has_failed) silent_rank = rank;
    }
    fail(std::move(text));
  }

  /// The first failure wins.
  void fail(std::string reason) noexcept {  // mutex held
    if (has_failed) return;
    failure = std::move(reason);
    has_failed = true;
    for (const std::weak_ptr<Meeting>& meeting : meetings) {
      if (const auto open = meeting.lock()) open->changed.notify_all();
    }
  }

  void throw_if_failed() {  // mutex held
    if (!has_failed) return;
    if (!failure.empty()) throw Error(ErrorCode::peer_failed, failure);
    if (silent_rank < 0) throw Error(ErrorCode::peer_failed, kUnnamedFailure);
    throw Error(ErrorCode::peer_failed, failure_of(silent_rank, "no memory was left to say why"));
  }

  /// Fails the meeting and its root; `failure_text` is for ranks at other meetings.
  [[noreturn]] void fail_meeting(Meeting& meeting, ErrorCode code, std::string text,
                                 std::string failure_text) {  // mutex held
    meeting.error_code = code;
    meeting.error_text = std::move(text);
    fail(std::move(failure_text));
    throw Error(code, meeting.error_text);
  }

  [[noreturn]] void fail_meeting(Meeting& meeting, std::size_t place, ErrorCode code,
                                 const std::string& text) {  // mutex held
    fail_meeting(meeting, code, text, failure_of(meeting.root_ranks[place], text));
  }

  /// Names the ranks that hold up all others: follows the waits from `missing` to the ranks that wait for
  /// nobody. Empty if these are `missing` themselves.
  std::string culprits(const std::vector<int>& missing) const {  // mutex held
    std::set<int> known(missing.begin(), missing.end());
    std::vector<int> open = missing;
    std::vector<int> found;
    std::string places;
    while (!open.empty()) {
      const int rank = open.back();
      open.pop_back();
      bool waits = false;
      for (const std::weak_ptr<Meeting>& weak : meetings) {
        const auto meeting = weak.lock();
        const Call* const call = meeting ? meeting->waiting_call(rank) : nullptr;
        if (call == nullptr) continue;
        waits = true;
        places.append(places.empty() ? "" : ", ").append("rank " + std::to_string(rank) + " in ");
        places.append(call->describe());
        for (const int next : meeting->missing_ranks())
          if (known.insert(next).second) open.push_back(next);
      }
      if (!waits) found.push_back(rank);
    }
    if (found.empty()) return ", all wait for each other: " + places;
    std::sort(found.begin(), found.end());
    return found == missing ? "" : ", held up by " + rank_names(found);
  }

  /// Plans the move of a meeting at which all ranks have arrived. An Error of it becomes that of all ranks;
  /// running out of memory stays with the calling rank.
  template <class Plan>
  void plan_move(Meeting& meeting, std::size_t place, Plan& plan) {
    try {
      if (const auto error = meeting.disagreement()) throw Error(*error);
      meeting.move = plan(std::as_const(meeting.calls));
    } catch (const Error& error) {
      if (error.code() == ErrorCode::peer_failed)  // already names the failed rank
        fail_meeting(meeting, error.code(), error.what(), error.what());
      fail_meeting(meeting, place, error.code(), error.what());
    }
  }

  /// Blocks until all ranks are here and the data has moved. The last to arrive calls `plan(calls)`, mutex
  /// held, which returns the Move; its exception is the error of all ranks.
  template <class Plan>
  void meet(Meeting& meeting, std::size_t place, Call& call, Plan&& plan) {
    std::unique_lock lock(mutex);
    throw_if_failed();
    if (meeting.calls[place] != nullptr) {
      std::ostringstream text;
      text << "rank " << meeting.root_ranks[place] << " calls " << call.describe() << " while its "
           << meeting.calls[place]->describe()
           << " is still waiting; use one stream for each communicator, or order the streams by events";
      fail_meeting(meeting, place, ErrorCode::invalid_argument, text.str());
    }
    const std::uint64_t round = meeting.round;
    meeting.calls[place] = &call;
    if (++meeting.arrived == meeting.calls.size()) {
      try {
        plan_move(meeting, place, plan);
      } catch (...) {  // withdraw the call: its memory ends with this frame
        meeting.calls[place] = nullptr;
        --meeting.arrived;
        throw;
      }
      meeting.next_unit.store(0, std::memory_order_relaxed);
      meeting.is_moving = true;
      if (meeting.move.units() > 1 && meeting.move.total_bytes() >= kSharedMoveBytes)
        meeting.changed.notify_all();
      help(meeting, lock);
    } else {
      try {
        gather(meeting, place, call, round, lock);
      } catch (...) {  // withdraw the call: its memory ends with this frame
        if (meeting.round == round && !meeting.is_moving) {
          meeting.calls[place] = nullptr;
          --meeting.arrived;
        }
        throw;
      }
      if (meeting.round == round && has_units(meeting)) help(meeting, lock);
    }
    // A move is bounded and reads this rank's memory, so nothing may interrupt it, not even an abort.
    meeting.changed.wait(lock, [&] { return meeting.round != round; });
  }

 private:
  static bool has_units(const Meeting& meeting) {
    return meeting.is_moving && meeting.next_unit.load(std::memory_order_relaxed) < meeting.move.units();
  }

  /// Waits until the data of this round is moving or has moved.
  void gather(Meeting& meeting, std::size_t place, const Call& call, std::uint64_t round,
              std::unique_lock<std::mutex>& lock) {
    Patience patience(deadline_after(timeout));
    const auto moved_or_failed = [&] {
      return meeting.round != round || meeting.is_moving || meeting.error_code.has_value() || has_failed;
    };
    bool has_come = false;
    do {
      has_come = meeting.changed.wait_until(lock, patience.next_look(), moved_or_failed);
    } while (!has_come && !patience.is_over());
    if (!has_come) {
      const std::vector<int> missing = meeting.missing_ranks();
      std::ostringstream text;
      text << call.name() << ": " << rank_names(missing) << " did not arrive within " << seconds(timeout)
           << " s" << culprits(missing) << "; rank " << meeting.root_ranks[place] << " waited in "
           << call.describe();
      fail_meeting(meeting, ErrorCode::timeout, text.str(), text.str());
    }
    if (meeting.round != round || meeting.is_moving) return;
    if (meeting.error_code) throw Error(*meeting.error_code, meeting.error_text);
    throw_if_failed();
  }

  /// Does units until none is left. The last rank to leave closes the round.
  void help(Meeting& meeting, std::unique_lock<std::mutex>& lock) {
    ++meeting.inside;
    lock.unlock();
    for (;;) {
      const std::int64_t unit = meeting.next_unit.fetch_add(1, std::memory_order_relaxed);
      if (unit >= meeting.move.units()) break;
      meeting.move.run(unit);
    }
    lock.lock();
    if (--meeting.inside > 0) return;
    std::fill(meeting.calls.begin(), meeting.calls.end(), nullptr);
    meeting.arrived = 0;
    meeting.is_moving = false;
    ++meeting.round;
    meeting.changed.notify_all();
  }
};

}  // namespace helix::comm
