// SPDX-License-Identifier: Apache-2.0
// parse_model_config: config.json, read and checked.
#pragma once

#include <string_view>

#include "model/model_config.hpp"

namespace helix::decode {

/// Parses and checks config.json.
/// @throws Error(invalid_file) naming `file`, the key, its value and what was expected; Error(unsupported)
/// for a model, activation, rope or quantization that is not built.
ModelConfig parse_model_config(std::string_view json, std::string_view file);

}  // namespace helix::decode
