// SPDX-License-Identifier: Apache-2.0
// Reading generation_config.json.
#include "generate/generation_defaults.hpp"

#include <limits>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>

#include "checkpoint/object_reader.hpp"
#include "checkpoint/strict_json.hpp"

namespace helix::decode {

GenerationDefaults parse_generation_config(std::string_view json, std::string_view file) {
  constexpr double kMostTemperature = 100.0;
  constexpr double kLeastPositive = 1e-6;
  constexpr double kMostPenalty = 100.0;
  constexpr std::size_t kMaxEosIds = 64;
  constexpr std::int64_t kMaxTokenId = std::numeric_limits<std::int32_t>::max();
  GenerationDefaults defaults;
  if (json.empty()) return defaults;
  const nlohmann::json document = parse_strict_json(json, file);
  HELIX_EXPECTS(document.is_object(), ErrorCode::invalid_file, file, ": is ", document.type_name(),
                "; expected an object");
  const ObjectReader top(document, file, "");
  defaults.eos_ids = top.integers("eos_token_id", 0, kMaxTokenId, kMaxEosIds);
  defaults.penalties.repetition =
      static_cast<float>(top.number_or("repetition_penalty", 1.0, kLeastPositive, kMostPenalty));
  if (!top.boolean_or("do_sample", false)) return defaults;
  defaults.sampling.temperature =
      static_cast<float>(top.number_or("temperature", 1.0, 0.0, kMostTemperature));
  defaults.sampling.top_p = static_cast<float>(top.number_or("top_p", 1.0, kLeastPositive, 1.0));
  defaults.sampling.min_p = static_cast<float>(top.number_or("min_p", 0.0, 0.0, 1.0));
  defaults.sampling.top_k = static_cast<std::int32_t>(top.integer_or("top_k", 0, 0, kMaxTokenId));
  return defaults;
}

}  // namespace helix::decode
