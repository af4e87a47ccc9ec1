// SPDX-License-Identifier: Apache-2.0
// Any bytes as generation_config.json give helix::Error, or values that sampling accepts.
#include <cstdint>
#include <limits>
#include <string_view>

#include "fuzz.hpp"
#include "generate/generation_defaults.hpp"

namespace {

using helix::fuzz::require;

void check(std::string_view json) {
  const auto defaults = helix::decode::parse_generation_config(json, "fuzz");
  const helix::SamplingConfig& sampling = defaults.sampling;
  require(sampling.temperature >= 0.0f && sampling.temperature <= 100.0f);
  require(sampling.top_p > 0.0f && sampling.top_p <= 1.0f);
  require(sampling.min_p >= 0.0f && sampling.min_p <= 1.0f);
  require(sampling.top_k >= 0);
  require(defaults.penalties.repetition > 0.0f && defaults.penalties.repetition <= 100.0f);
  for (const std::int64_t id : defaults.eos_ids)
    require(id >= 0 && id <= std::numeric_limits<std::int32_t>::max());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  helix::fuzz::read_file(data, size, check);
  return 0;
}
