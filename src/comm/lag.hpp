// SPDX-License-Identifier: Apache-2.0
// Who keeps a rank waiting that has waited too long.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <tuple>

#include "comm/bootstrap_messages.hpp"
#include "comm/timeout.hpp"

namespace helix::comm {

/// A rank as its last heartbeat and the clock tell of it.
struct Standing {
  const Beat* beat = nullptr;
  bool has_left = false;  // in good order
  bool is_still = true;   // for half of the timeout at one step and operation
};

/// `behind` keeps `waiting` waiting; `how` tells why that is thought of it.
struct Lag {
  const Beat* waiting = nullptr;
  const Beat* behind = nullptr;
  std::string_view how;
};

/// Who keeps ranks waiting of which one has waited for the timeout; nothing: none has, or nobody can be told
/// from the others. Stages of a pipeline make different numbers of operations, so that these order suspects
/// but make nobody one: suspected are a rank that waits for nobody, and has not moved on lately unless it is
/// steps behind, and one that has left before the operation that is waited in; only where there is neither, a
/// rank that waits itself, but in an earlier step.
inline std::optional<Lag> find_lag(std::span<const Standing> ranks, milliseconds timeout) {
  const Beat* waiting = nullptr;  // the one farthest on: the others may wait for those that keep it waiting
  for (const Standing& rank : ranks) {
    if (rank.has_left || milliseconds(rank.beat->waited_ms) < timeout) continue;
    if (waiting == nullptr || rank.beat->step > waiting->step) waiting = rank.beat;
  }
  if (waiting == nullptr) return std::nullopt;

  const auto place = [](const Beat& beat) { return std::tuple(beat.step, beat.operations); };
  const Standing* suspect = nullptr;
  bool is_idle = false;  // whether the suspect waits for nobody
  bool may_wait = true;  // whether a rank that waits may be the suspect
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
