// SPDX-License-Identifier: Apache-2.0
// Any bytes as results of helix-bench-cuda give helix::Error, or a calibrated machine and its predictions.
#include <cmath>
#include <cstdint>
#include <string_view>
#include <vector>

#include <helix/error.hpp>

#include "bench_results.hpp"
#include "calibration.hpp"
#include "check.hpp"
#include "fuzz.hpp"

namespace {

using helix::fuzz::require;

void read(std::string_view text) {
  using namespace helix;
  try {
    const plan::Hardware h200 = plan::hardware_preset("h200");
    const std::vector<plan_cli::BenchCase> cases = plan_cli::parse_bench_results(text, "fuzz");
    plan_cli::calibrate(h200, cases).check();
    const plan_cli::CheckResult checked = plan_cli::check_predictions(h200, cases, cases);
    for (const plan_cli::CheckRow& row : checked.rows) require(std::isfinite(row.predicted_us));
    require(!plan_cli::format_check(checked).empty());
  } catch (const Error& error) {
    require(error.code() != ErrorCode::internal);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  read({reinterpret_cast<const char*>(data), size});
  return 0;
}
