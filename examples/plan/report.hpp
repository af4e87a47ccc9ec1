// SPDX-License-Identifier: Apache-2.0
// Writes the plan as text, JSON and CSV.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <helix/plan/search.hpp>

#include "options.hpp"

namespace helix::plan_cli {

/// The result of a search, with its explanation.
struct Plan {
  const plan::StepModel& model;
  const Options& options;
  plan::SearchResult result;  ///< Contains a best candidate.
  plan::StepReport best;      ///< Operators of the best candidate.
  std::vector<plan::Loss> losses;

  const plan::Candidate& best_candidate() const { return result.candidates[*result.best]; }
};

/// Indices of the best `count` candidates by the plan's objective, at most one per layout.
std::vector<std::size_t> best_layouts(const Plan& plan, std::size_t count);

std::string format_plan(const Plan& plan);

/// @throws Error(io).
void write_json(const std::filesystem::path& file, const Plan& plan);

/// One line per candidate.
/// @throws Error(io).
void write_csv(const std::filesystem::path& file, const Plan& plan);

}  // namespace helix::plan_cli
