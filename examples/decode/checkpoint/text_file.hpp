// SPDX-License-Identifier: Apache-2.0
// Small text files, read and written whole with a clear error.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace helix::decode {

/// More than any config, description of a machine or measurement has.
inline constexpr std::uint64_t kMaxTextBytes = 16'000'000;

/// The whole file. @throws Error(io) if it is no regular file or cannot be read, Error(invalid_file) if it
/// has more than `max_bytes`.
std::string read_text(const std::filesystem::path& path, std::uint64_t max_bytes = kMaxTextBytes);

/// @throws Error(io).
void write_text(const std::filesystem::path& file, std::string_view text);

}  // namespace helix::decode
