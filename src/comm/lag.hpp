// SPDX-License-Identifier: Apache-2.0
// Finds the rank that keeps others waiting too long.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <tuple>

#include "comm/bootstrap_messages.hpp"
#include "comm/timeout.hpp"

namespace helix::comm {

/// A rank's state, from its last heartbeat and the clock.
struct Standing {
  const Beat* beat = nullptr;
  bool has_left = false;  // after a farewell
  bool is_still = true;   // at one step and operation for half of the timeout
};

/// `behind` keeps `waiting` waiting; `how` says why it is suspected.
struct Lag {
  const Beat* waiting = nullptr;
  const Beat* behind = nullptr;
  std::string_view how;
};

/// Finds the rank that keeps others waiting, once some rank has waited for `timeout`. Compares all ranks with
/// the waiting rank farthest ahead, and suspects, in this order:
/// 1. A rank that waits for nobody and is at an earlier step, or has been still at the same step; or a rank
///    that has left before the operation in which the other waits.
/// 2. A rank that waits too, but at an earlier step; not if a rank that waits for nobody has been still at a
///    later step.
///
/// Pipeline stages make different numbers of operations, so for ranks that have not left these numbers order
/// suspects but create none. Returns nothing if no rank has waited that long, or if there is no suspect.
inline std::optional<Lag> find_lag(std::span<const Standing> ranks, milliseconds timeout) {
  const Beat* waiting = nullptr;  // farthest ahead; the others may wait for what it waits for
  for (const Standing& rank : ranks) {
    if (rank.has_left || milliseconds(rank.beat->waited_ms) < timeout) continue;
    if (waiting == nullptr || rank.beat->step > waiting->step) waiting = rank.beat;
  }
  if (waiting == nullptr) return std::nullopt;

  const auto place = [](const Beat& beat) { return std::tuple(beat.step, beat.operations); };
  const Standing* suspect = nullptr;
  bool is_idle = false;  // whether the suspect waits for nobody
  bool may_wait = true;  // whether a waiting rank may be the suspect
  const auto order = [](bool waits, const Standing& rank) {
    return std::tuple(waits, !rank.is_still, rank.beat->step, rank.has_left, rank.beat->operations);
  };
  for (const Standing& rank : ranks) {
    const Beat& beat = *rank.beat;
    const bool waits = !rank.has_left && beat.waited_ms > 0;
    if (!rank.has_left && !waits && rank.is_still && beat.step > waiting->step) may_wait = false;
    const bool is_early = beat.step < waiting->step;
    const bool is_suspect =
        is_early || (rank.has_left ? place(beat) < place(*waiting)
                                   : !waits && rank.is_still && beat.step == waiting->step);
    if (!is_suspect) continue;
    if (suspect == nullptr || order(waits, rank) < order(!is_idle, *suspect)) {
      suspect = &rank;
      is_idle = !waits;
    }
  }
  if (suspect == nullptr || (!is_idle && !may_wait)) return std::nullopt;
  const bool is_behind = place(*suspect->beat) < place(*waiting);
  return Lag{.waiting = waiting,
             .behind = suspect->beat,
             .how = suspect->has_left ? "it has left"
                    : !is_idle        ? "it is behind, and waits too"
                    : is_behind       ? "it is behind"
                                      : "it waits for nobody"};
}

}  // namespace helix::comm
