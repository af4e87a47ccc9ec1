// SPDX-License-Identifier: Apache-2.0
// Compares predictions with measurements, for every bench case that the model covers.
#pragma once

#include <string>
#include <vector>

#include <helix/plan/hardware.hpp>

#include "bench_results.hpp"

namespace helix::plan_cli {

struct CheckRow {
  std::string name;
  double measured_us = 0.0;
  double predicted_us = 0.0;

  double error_percent() const { return 100.0 * (predicted_us / measured_us - 1.0); }
};

struct CheckResult {
  std::vector<CheckRow> rows;
  std::vector<std::string> not_covered;  ///< Names of the other cases.
};

/// Composes each prediction from the reads, operators and collectives of `base`, calibrated with
/// `calibration`. A partial_attention or exchange case is predicted with a calibration that leaves out this
/// case.
/// @throws Error(invalid_file) naming the file and the case whose name or counters are not those of the
/// bench.
CheckResult check_predictions(const plan::Hardware& base, const std::vector<BenchCase>& calibration,
                              const std::vector<BenchCase>& cases);

/// A table in Markdown; rows with an error of more than 10 % are marked.
std::string format_check(const CheckResult& result);

}  // namespace helix::plan_cli
