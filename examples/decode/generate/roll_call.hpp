// SPDX-License-Identifier: Apache-2.0
// RollCall: keeps ranks that work for different times from timing out while they wait for each other.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "generate/gather_results.hpp"
#include "model/decoder_backend.hpp"

namespace helix::decode {

/// Ranks that work independently, such as replicas or all ranks while they load, reach their next collective
/// at different times. The first to arrive would wait there until it times out. So all ranks meet about once
/// per `interval`, and ranks that are done keep meeting until no rank works any more. The ranks of one `team`
/// work in step, because they have collectives of their own: they must all meet after the same piece of work,
/// so each meeting agrees how many pieces come before the next. A team of one rank uses the clock.
template <DecoderBackend B>
class RollCall {
 public:
  /// Every function is collective over `comm`: every rank constructs a RollCall, calls work_goes_on() after
  /// each piece of its work, as often as the other ranks of its team, and calls finish() last. Allocates.
  /// `team_size` is the number of ranks in this rank's `team`.
  RollCall(B& backend, typename B::Comm& comm, typename B::Stream stream, int team, int team_size,
           std::chrono::milliseconds interval)
      : team_(team), team_size_(team_size), interval_(interval) {
    if (comm.size() > team_size) gather_.emplace(backend, comm, stream);
  }

  void work_goes_on() {
    ++num_pieces_;
    const bool is_time =
        team_size_ == 1 ? Clock::now() - last_meeting_ >= interval_ : num_pieces_ >= pieces_until_next_;
    if (gather_ && is_time) meet(/*is_done=*/false);
  }

  /// Returns when all ranks have called it.
  /// @throws Error(out_of_step), as work_goes_on() does, if a rank has skipped a meeting.
  void finish() {
    while (gather_ && !meet(/*is_done=*/true)) {
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Message {
    std::int64_t team = 0;
    std::int64_t is_done = 0;
    std::int64_t pieces_until_next = 0;
  };

  /// Returns whether all ranks are done.
  bool meet(bool is_done) {
    const Message mine{team_, is_done ? 1 : 0, pieces_in_interval()};
    pieces_until_next_ = mine.pieces_until_next;
    bool are_all_done = true;
    for (const std::vector<std::byte>& bytes : gather_->gather(std::as_bytes(std::span(&mine, 1)))) {
      Message message;
      std::memcpy(&message, bytes.data(), sizeof(Message));
      are_all_done = are_all_done && message.is_done != 0;
      if (message.team == team_) pieces_until_next_ = std::min(pieces_until_next_, message.pieces_until_next);
    }
    num_pieces_ = 0;
    last_meeting_ = Clock::now();
    return are_all_done;
  }

  /// The number of pieces that take `interval` at the speed of the last ones, but at most twice the last
  /// number.
  std::int64_t pieces_in_interval() const {
    const std::chrono::duration<double> taken = Clock::now() - last_meeting_;
    const double pieces =
        static_cast<double>(num_pieces_) *
        std::min(std::chrono::duration<double>(interval_) / std::max(taken, kShortest), 2.0);
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(pieces));
  }

  static constexpr std::chrono::duration<double> kShortest{1e-9};

  std::optional<BytesGather<B>> gather_;  // empty if all ranks are one team
  std::int64_t team_;
  int team_size_;
  std::chrono::milliseconds interval_;
  Clock::time_point last_meeting_ = Clock::now();
  std::int64_t num_pieces_ = 0;         // since the last meeting
  std::int64_t pieces_until_next_ = 1;  // of this rank's team
};

}  // namespace helix::decode
