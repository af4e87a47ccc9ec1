// SPDX-License-Identifier: Apache-2.0
// Times of collectives from a latency and a bandwidth term: the fastest of the usual algorithms.
#pragma once

#include <cstdint>
#include <string_view>

#include <helix/export.hpp>
#include <helix/plan/hardware.hpp>
#include <helix/plan/units.hpp>

namespace helix::plan {

/// How a collective moves its bytes; a is a link's latency, b its bandwidth, p the ranks, n the bytes.
enum class CollectiveAlgorithm : std::uint8_t {
  none,          ///< One rank, or nothing to send
  one_shot,      ///< Each to each at once: a + (p - 1) n / b for all_reduce
  two_shot,      ///< Direct reduce-scatter, then all-gather: 2 a + 2 (p - 1) / p n / b
  ring,          ///< 2 (p - 1) a + 2 (p - 1) / p n / b; half of that for all_gather and reduce_scatter
  tree,          ///< Broadcast: ceil(log2 p) (a + n / b)
  hierarchical,  ///< Inside each NVLink domain, between the domains, inside again
  measured       ///< Hardware::measured, or the least time that it allows
};
/// Name of the algorithm: "two_shot".
HELIX_API std::string_view to_string(CollectiveAlgorithm algorithm);

/// How long a collective takes, and by which algorithm.
struct CollectiveTime {
  Time time{};
  CollectiveAlgorithm algorithm = CollectiveAlgorithm::none;
};

/// A group of `ranks` ranks, `stride` apart in the stage. Ranks of a domain are consecutive.
struct CommGroup {
  int ranks = 1;
  int stride = 1;
};

/// The fastest time of `collective` over `group`, without declared overheads. Inside a domain it is as
/// measured, or no less than what was measured allows (see MeasuredCollective). `size` is the bytes a rank as
/// there; for `send` the message. The group begins at a domain's edge or lies whole in one domain; if it
/// fills domains unevenly, a rank of the emptiest counts. @throws Error(invalid_argument) for fewer than one
/// rank, a stride below 1, and a size that is negative or NaN.
HELIX_API CollectiveTime collective_time(const Hardware& hardware, Collective collective, CommGroup group,
                                         Bytes size);

}  // namespace helix::plan
