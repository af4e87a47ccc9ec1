// SPDX-License-Identifier: Apache-2.0
// Reading generation_config.json.
#include "generate/generation_defaults.hpp"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/error.hpp>

#include "files/object_reader.hpp"
#include "files/strict_json.hpp"
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

/// Reads a number that is finite as a float.
float float_or(const ObjectReader& top, const char* key, double fallback) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return static_cast<float>(top.number_or(key, fallback, -kLargest, kLargest));
}

/// Reads a whole number of 32 bits, which some files write as 20.0.
std::int32_t whole_or(const ObjectReader& top, const char* key, std::int64_t fallback) {
  constexpr std::int64_t kLow = std::numeric_limits<std::int32_t>::min();
  constexpr std::int64_t kHigh = std::numeric_limits<std::int32_t>::max();
  const nlohmann::json* value = top.find(key);
  if (value == nullptr || !value->is_number_float())
    return static_cast<std::int32_t>(top.integer_or(key, fallback, kLow, kHigh));
  const auto number = value->get<double>();
  const bool fits = number >= static_cast<double>(kLow) && number <= static_cast<double>(kHigh);
  if (!fits || number != std::floor(number)) top.fail(key, *value, "an integer from ", kLow, " to ", kHigh);
  return static_cast<std::int32_t>(number);
}

}  // namespace

GenerationDefaults parse_generation_config(std::string_view json, std::string_view file,
                                           bool reads_sampling) {
  GenerationDefaults defaults;
  if (json.empty()) return defaults;
  const nlohmann::json document = parse_strict_json(json, file);
  HELIX_EXPECTS(document.is_object(), ErrorCode::invalid_file, file, ": is ", document.type_name(),
                "; expected an object");
  const ObjectReader top(document, file, "");
  defaults.eos_ids = top.token_ids("eos_token_id", kMaxEosIds);
  defaults.unheeded = unheeded_keys(top);
  defaults.penalties.repetition = float_or(top, "repetition_penalty", 1.0);
  if (!reads_sampling || !top.boolean_or("do_sample", false)) return defaults;
  defaults.sampling.temperature = float_or(top, "temperature", 1.0);
  defaults.sampling.top_p = float_or(top, "top_p", 1.0);
  defaults.sampling.min_p = float_or(top, "min_p", 0.0);
  defaults.sampling.top_k = whole_or(top, "top_k", 0);
  return defaults;
}

}  // namespace helix::decode
