// SPDX-License-Identifier: Apache-2.0
// Reading generation_config.json.
#include "generate/generation_defaults.hpp"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>

#include "checkpoint/object_reader.hpp"
#include "checkpoint/strict_json.hpp"
#include "model/parse_config.hpp"

namespace helix::decode {
namespace {

/// Keys that change the generated text, and the value of each that has no effect.
constexpr struct {
  const char* key;
  double neutral;
} kNotBuilt[] = {{"num_beams", 1.0},
                 {"min_length", 0.0},
                 {"min_new_tokens", 0.0},
                 {"no_repeat_ngram_size", 0.0},
                 {"encoder_repetition_penalty", 1.0},
                 {"encoder_no_repeat_ngram_size", 0.0},
                 {"max_time", 0.0},
                 {"typical_p", 1.0},
                 {"top_h", 1.0},
                 {"epsilon_cutoff", 0.0},
                 {"eta_cutoff", 0.0},
                 {"penalty_alpha", 0.0},
                 {"guidance_scale", 1.0},
                 {"suppress_tokens", 0.0},
                 {"begin_suppress_tokens", 0.0},
                 {"bad_words_ids", 0.0},
                 {"sequence_bias", 0.0},
                 {"exponential_decay_length_penalty", 0.0},
                 {"forced_bos_token_id", -1.0},
                 {"forced_eos_token_id", -1.0},
                 {"stop_strings", 0.0},
                 {"watermarking_config", 0.0}};

std::vector<std::string> unheeded_keys(const ObjectReader& top) {
  std::vector<std::string> keys;
  for (const auto& [key, neutral] : kNotBuilt) {
    const nlohmann::json* value = top.find(key);
    if (value == nullptr || value->empty() || *value == neutral || *value == false) continue;
    keys.emplace_back(key);
  }
  return keys;
}

/// Reads a whole number, which some files write as 20.0.
std::int64_t whole_or(const ObjectReader& top, const char* key, std::int64_t fallback, std::int64_t low,
                      std::int64_t high) {
  const nlohmann::json* value = top.find(key);
  if (value == nullptr || !value->is_number_float()) return top.integer_or(key, fallback, low, high);
  const auto number = value->get<double>();
  const bool fits = number >= static_cast<double>(low) && number <= static_cast<double>(high);
  if (!fits || number != std::floor(number)) top.fail(key, *value, "an integer from ", low, " to ", high);
  return static_cast<std::int64_t>(number);
}

}  // namespace

GenerationDefaults parse_generation_config(std::string_view json, std::string_view file,
                                           bool reads_sampling) {
  constexpr double kMaxTemperature = 100.0;
  constexpr double kMinPositive = 1e-6;
  constexpr double kMaxPenalty = 100.0;
  constexpr std::int64_t kMaxDrawnIds = std::numeric_limits<std::int32_t>::max();
  GenerationDefaults defaults;
  if (json.empty()) return defaults;
  const nlohmann::json document = parse_strict_json(json, file);
  HELIX_EXPECTS(document.is_object(), ErrorCode::invalid_file, file, ": is ", document.type_name(),
                "; expected an object");
  const ObjectReader top(document, file, "");
  defaults.eos_ids = top.token_ids("eos_token_id", kMaxEosIds);
  defaults.unheeded = unheeded_keys(top);
  defaults.penalties.repetition =
      static_cast<float>(top.number_or("repetition_penalty", 1.0, kMinPositive, kMaxPenalty));
  if (!reads_sampling || !top.boolean_or("do_sample", false)) return defaults;
  defaults.sampling.temperature = static_cast<float>(top.number_or("temperature", 1.0, 0.0, kMaxTemperature));
  defaults.sampling.top_p = static_cast<float>(top.number_or("top_p", 1.0, kMinPositive, 1.0));
  defaults.sampling.min_p = static_cast<float>(top.number_or("min_p", 0.0, 0.0, 1.0));
  defaults.sampling.top_k = static_cast<std::int32_t>(whole_or(top, "top_k", 0, 0, kMaxDrawnIds));
  return defaults;
}

}  // namespace helix::decode
