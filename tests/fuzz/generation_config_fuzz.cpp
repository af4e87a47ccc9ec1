// SPDX-License-Identifier: Apache-2.0
// Any bytes as generation_config.json give helix::Error, or finite numbers and token ids.
#include <cmath>
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
  require(std::isfinite(sampling.temperature) && std::isfinite(sampling.top_p) &&
          std::isfinite(sampling.min_p) && std::isfinite(defaults.penalties.repetition));
  for (const std::int64_t id : defaults.eos_ids)
    require(id >= 0 && id <= std::numeric_limits<std::int32_t>::max());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  helix::fuzz::read_file(data, size, check);
  return 0;
}
