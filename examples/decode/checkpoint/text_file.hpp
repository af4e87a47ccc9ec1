// SPDX-License-Identifier: Apache-2.0
// Small text files, read and written whole with a clear error.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace helix::decode {

/// The whole file. @throws Error(io) if it cannot be read, Error(invalid_file) above 100 MB, which no config,
/// index or measurement has.
std::string read_text(const std::filesystem::path& file);

/// @throws Error(io).
void write_text(const std::filesystem::path& file, std::string_view text);

}  // namespace helix::decode
