// SPDX-License-Identifier: Apache-2.0
// Any bytes as a description of a machine give helix::Error, or a machine for which step times can be
// computed. A machine without 16-bit products is valid but cannot run the model: Error(unsupported).
#include <cmath>
#include <cstdint>
#include <string_view>

#include <helix/error.hpp>
#include <helix/plan/step_time.hpp>

#include "fuzz.hpp"
#include "hardware_source.hpp"

namespace {

using helix::fuzz::require;

void read(std::string_view text) {
  using namespace helix::plan;
  try {
    const Hardware hardware = helix::plan_cli::parse_hardware(text, "fuzz");
    Layout layout;
    layout.kvp = layout.tpf = 4;
    Workload load;
    load.batch = 3;
    load.context = tokens(100000);
    const StepModel model(model_preset("llama-3.1-8b"), Precision{}, hardware);
    const double us = in_microseconds(model.explain(layout, load).totals.ttl);
    require(std::isfinite(us) && us >= 0);
  } catch (const helix::Error& error) {
    using helix::ErrorCode;
    require(error.code() == ErrorCode::invalid_file || error.code() == ErrorCode::invalid_argument ||
            error.code() == ErrorCode::unsupported);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  read({reinterpret_cast<const char*>(data), size});
  return 0;
}
