// SPDX-License-Identifier: Apache-2.0
// The time that slices of HOP-B take, and the number of them that takes the least: what HopB and the planner
// share.
#pragma once

#include <cstdint>

#include <helix/integers.hpp>

namespace helix {

/// Time of `num_slices` equal slices, when the exchange of each runs beside the attention of the next and
/// both come to `attention` and `exchange` in all (any unit): the first attention, then the longer of the two
/// for each further slice, then the last exchange. The paper's figure 3: 8 slices of 16 and 9.6 units take
/// 17.2, one slice 25.6.
constexpr double hop_b_time(int num_slices, double attention, double exchange) {
  const double n = num_slices;
  return (attention + (n - 1) * larger(attention, exchange) + exchange) / n;
}

/// The number of slices in [1, max_slices] with the least hop_b_time() when each slice costs `hand_over` more
/// (its events, and smaller kernels); the fewest on ties. A slice holds at least one sequence. A pure
/// function: ranks that pass equal values agree.
constexpr int best_hop_b_slices(int max_slices, std::int64_t num_sequences, double attention, double exchange,
                                double hand_over) {
  int best = 1;
  for (int n = 2; n <= max_slices && n <= num_sequences; ++n) {
    if (hop_b_time(n, attention, exchange) + n * hand_over <
        hop_b_time(best, attention, exchange) + best * hand_over) {
      best = n;
    }
  }
  return best;
}

/// The costs that HopB chooses the number of slices by, as measured: a backend may state its own as
/// `kHopBCosts`.
struct HopBCosts {
  double us_per_mb = 0.0;     ///< Growth of an exchange with 10^6 bytes of a rank's messages.
  double hand_over_us = 0.0;  ///< Cost of each slice after the first: attention starts and ends once more.
};

}  // namespace helix
