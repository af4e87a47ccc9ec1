// SPDX-License-Identifier: Apache-2.0
// GenerationDefaults: how a checkpoint's authors let it write, generation_config.json.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <helix/backend/vocabulary.hpp>

#include "generate/generation.hpp"

namespace helix::decode {

struct GenerationDefaults {
  std::vector<std::int64_t> eos_ids;  ///< Empty: those of config.json count.
  SamplingConfig sampling;            ///< Greedy unless the file says do_sample, as in transformers.
  Penalties penalties;
  std::vector<std::string> unheeded;  ///< Keys that ask for what is not built, such as beams.
};

/// Reads the file's text; defaults from an empty one. @throws Error(invalid_file) naming `file`, key and
/// value.
GenerationDefaults parse_generation_config(std::string_view json, std::string_view file);

}  // namespace helix::decode
