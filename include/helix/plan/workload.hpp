// SPDX-License-Identifier: Apache-2.0
// Workload: what is decoded at a time, and how its KV cache is cut.
#pragma once

#include <cstdint>

#include <helix/export.hpp>
#include <helix/plan/units.hpp>

namespace helix::plan {

/// Which routed experts a step reads, since routing is not known.
enum class ExpertHits : std::uint8_t {
  expectation,  ///< expected_expert_hits(), spread evenly over EP
  worst_case  ///< As many different experts as tokens choose, all on the rank that counts, up to all it holds
};

/// Largest batch, and most tokens of a step, chunk or page, that the planner takes.
inline constexpr std::int64_t kMaxWorkloadCount = std::int64_t{1} << 24;

/// What is decoded: sequences, their length, and how their KV is stored.
struct HELIX_API Workload {
  Tokens context{};              ///< Tokens of each sequence, this step's tokens included
  std::int64_t batch = 1;        ///< Sequences in flight over all replicas
  std::int64_t step_tokens = 1;  ///< Query tokens a sequence and step (drafts included)
  ExpertHits expert_hits = ExpertHits::expectation;
  std::int64_t chunk = 16;        ///< KvLayout's chunk, tokens
  std::int64_t page_tokens = 64;  ///< Local tokens a page

  /// Checks every field. @throws Error(invalid_argument) for a value out of range or NaN, naming it.
  void check() const;
};

}  // namespace helix::plan
