// SPDX-License-Identifier: Apache-2.0
// The command line of helix-plan.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <helix/plan/model.hpp>
#include <helix/plan/search.hpp>
#include <helix/plan/workload.hpp>

namespace helix::plan_cli {

struct Options {
  std::string model;  ///< Empty only with `checks`.
  std::string hardware = "h200";
  std::vector<std::filesystem::path> calibrations;
  std::vector<std::filesystem::path> checks;  ///< Results to predict instead of planning, if not empty.
  plan::Precision precision;
  /// Whether KV is fp8_ds_mla: only for latent attention, with bits that follow from the model.
  bool has_mixed_rows = false;
  plan::Workload workload;  ///< The search replaces its batch.
  plan::SearchSpace space;
  bool shows_frontier = false;
  int top = 5;                     ///< Number of layouts in the table.
  std::filesystem::path json;      ///< File; empty: none.
  std::filesystem::path csv;       ///< File; empty: none.
  std::filesystem::path pictures;  ///< Folder; empty: none.
};

/// Parses the command line. Returns nullopt after --help and --version, which it prints.
/// @throws Error(invalid_argument) naming option and value.
std::optional<Options> parse_options(int argc, char** argv);

}  // namespace helix::plan_cli
