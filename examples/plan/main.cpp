// SPDX-License-Identifier: Apache-2.0
// helix-plan: tells which layout to use, how much memory it takes and how fast it is, before the GPUs are
// rented.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <helix/error.hpp>
#include <helix/plan/search.hpp>

#include "bench_results.hpp"
#include "calibration.hpp"
#include "check.hpp"
#include "files/output_file.hpp"
#include "files/standard_streams.hpp"
#include "files/strict_json.hpp"
#include "hardware_source.hpp"
#include "model_source.hpp"
#include "options.hpp"
#include "pictures.hpp"
#include "report.hpp"

namespace helix::plan_cli {
namespace {

/// Writes to standard output. Buffered text is flushed at the end of the program, but the reason of a failed
/// larger write is known only here.
void print(const std::string& text) {
  HELIX_EXPECTS(std::fputs(text.c_str(), stdout) != EOF, ErrorCode::io,
                "standard output cannot be written: ", std::strerror(errno));
}

void run(const Options& options) {
  if (!options.json.empty()) decode::check_output(options.json);
  if (!options.csv.empty()) decode::check_output(options.csv);
  if (!options.pictures.empty()) decode::check_output_folder(options.pictures);
  plan::Hardware hardware = load_hardware(options.hardware);
  const bool is_check = !options.checks.empty();
  const auto& calibrations = is_check && options.calibrations.empty() ? options.checks : options.calibrations;
  const std::vector<BenchCase> measured =
      calibrations.empty() ? std::vector<BenchCase>{} : read_bench_results(calibrations);
  if (is_check) {
    const CheckResult checked = check_predictions(hardware, measured, read_bench_results(options.checks));
    print(format_check(checked));
    return;
  }
  if (!measured.empty()) hardware = calibrate(hardware, measured);

  const plan::Model described = load_model(options.model);
  HELIX_EXPECTS(!options.has_mixed_rows || described.shape.is_mla(), ErrorCode::invalid_argument,
                "--kv-dtype is fp8_ds_mla, but ", described.name, " has no latent attention; give fp8");
  plan::Precision precision = options.precision;
  if (options.has_mixed_rows) precision.kv_bits = plan::kv_element_bits(described.shape, DType::fp8_ds_mla);
  const plan::StepModel model(described, precision, hardware);
  plan::SearchResult result = plan::search_or_throw(model, options.workload, options.space);
  const plan::Candidate& best = result.candidates[*result.best];
  plan::Workload workload = options.workload;
  workload.batch = best.totals.batch;
  plan::StepReport report = model.explain(best.layout, workload);
  std::vector<plan::Loss> losses = explain_losses(model, options.workload, options.space, result);
  const Plan plan{.model = model,
                  .options = options,
                  .result = std::move(result),
                  .best = std::move(report),
                  .losses = std::move(losses)};
  // Write files first: if one cannot be written, its error is then the only output.
  if (!options.json.empty()) write_json(options.json, plan);
  if (!options.csv.empty()) write_csv(options.csv, plan);
  std::string pictures;
  if (!options.pictures.empty()) pictures = write_pictures(options.pictures, plan);
  print(format_plan(plan));
  if (!pictures.empty()) print("\n" + pictures);
}

}  // namespace
}  // namespace helix::plan_cli

int main(int argc, char** argv) {
  helix::decode::prepare_standard_streams();
  try {
    const std::optional<helix::plan_cli::Options> options = helix::plan_cli::parse_options(argc, argv);
    if (options) helix::plan_cli::run(*options);
    helix::decode::flush_standard_output();
    return 0;
  } catch (const std::exception& error) {
    helix::decode::print_error(fmt::format("helix-plan: {}\n", helix::decode::one_line(error.what())));
    return 1;
  }
}
