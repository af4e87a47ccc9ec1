// SPDX-License-Identifier: Apache-2.0
// A model of the time that HOP-B takes, and the number of slices that takes the least. HopB and the planner
// share it.
#pragma once

#include <cstdint>

#include <helix/integers.hpp>

namespace helix {

/// Time of `num_slices` equal slices if the exchange of each overlaps the attention of the next. `attention`
/// and `exchange` are the totals of all slices (any unit). The time is that of the first attention, then of
/// the longer of the two for each further slice, then of the last exchange. The paper's figure 3: totals of
/// 16 and 9.6 units take 17.2 in 8 slices, 25.6 in one.
constexpr double hop_b_time(int num_slices, double attention, double exchange) {
  const double n = num_slices;
  return (attention + (n - 1) * larger(attention, exchange) + exchange) / n;
}

/// Returns the number of slices in [1, max_slices] with the least hop_b_time() when each slice costs
/// `hand_over` more (its events, and smaller kernels); the fewest on ties. A slice holds at least one
/// sequence. A pure function: ranks that pass equal values agree.
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

/// Measured costs by which HopB chooses the number of slices. A backend may state its own as `kHopBCosts`.
struct HopBCosts {
  double us_per_mb = 0.0;     ///< Time that 10^6 bytes of a rank's messages add to an exchange.
  double hand_over_us = 0.0;  ///< Cost of each slice after the first: attention starts and ends once more.
};

}  // namespace helix
