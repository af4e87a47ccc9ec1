// SPDX-License-Identifier: Apache-2.0
// RollCall: keeps ranks that work for different lengths of time within each other's deadlines.
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

/// Ranks that work without each other, as replicas do and as all do while they load, come to their next
/// collective at different times: who is done first would wait there for longer than it may. So all meet
/// about once in `interval`, and those that are done meet on until none works any more. Ranks of one `team`
/// work in step: they have collectives of their own, so that they meet after the same one of their pieces of
/// work, of which each meeting says how many come before the next. A rank alone goes by its clock.
template <DecoderBackend B>
class RollCall {
 public:
  /// Collective over `comm`, as all of it: every rank constructs one, calls work_goes_on() after each of its
  /// pieces of work, as often as the others of its team, and finish() last. Allocates.
  /// `team_size`: ranks with this rank's `team`.
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

  /// Returns when all ranks have called it. As the function above, @throws Error(out_of_step) if a rank has
  /// left out a meeting.
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

  /// Returns whether all are done.
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

  /// As many as took `interval` at the speed of the last ones, but no more than twice those.
  std::int64_t pieces_in_interval() const {
    const std::chrono::duration<double> taken = Clock::now() - last_meeting_;
    const double pieces =
        static_cast<double>(num_pieces_) *
        std::min(std::chrono::duration<double>(interval_) / std::max(taken, kShortest), 2.0);
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(pieces));
  }

  static constexpr std::chrono::duration<double> kShortest{1e-9};

  std::optional<BytesGather<B>> gather_;  // nothing where all are one team
  std::int64_t team_;
  int team_size_;
  std::chrono::milliseconds interval_;
  Clock::time_point last_meeting_ = Clock::now();
  std::int64_t num_pieces_ = 0;         // since the last one
  std::int64_t pieces_until_next_ = 1;  // of a team
};

}  // namespace helix::decode
