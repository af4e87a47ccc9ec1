// SPDX-License-Identifier: Apache-2.0
// GenerationDefaults: the sampling defaults of a checkpoint, from generation_config.json.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <helix/backend/vocabulary.hpp>

#include "generate/generation.hpp"

namespace helix::decode {

struct GenerationDefaults {
  std::vector<std::int64_t> eos_ids;  ///< Empty: the ids of config.json are used.
  SamplingConfig sampling;            ///< Greedy unless the file has do_sample, as in transformers.
  Penalties penalties;
  std::vector<std::string> unheeded;  ///< Keys whose feature is not built, such as beams.
};

/// Parses the text of the file; an empty text gives the defaults. Numbers are finite, but may be out of range
/// for sampling, because the command line may replace them: check_sampling() and check_penalties() tell.
/// Unless `reads_sampling`, the keys of draws are not read and may have any value.
/// @throws Error(invalid_file) naming `file`, key and value.
GenerationDefaults parse_generation_config(std::string_view json, std::string_view file,
                                           bool reads_sampling = true);

}  // namespace helix::decode
