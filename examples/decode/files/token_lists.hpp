// SPDX-License-Identifier: Apache-2.0
// Reads files of prompts and continuations.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

namespace helix::decode {

/// Parses a JSON array of arrays of token ids in one pass, with 4 bytes of memory per token.
/// @throws Error(invalid_file) naming `file` and the entry.
std::vector<std::vector<std::int32_t>> parse_token_lists(std::string_view json, std::string_view file);

/// Reads `file` and parses it with parse_token_lists().
/// @throws Error(io) too.
std::vector<std::vector<std::int32_t>> read_token_lists(const std::filesystem::path& file);

}  // namespace helix::decode
