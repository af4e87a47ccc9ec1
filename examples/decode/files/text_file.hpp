// SPDX-License-Identifier: Apache-2.0
// Small text files, read whole with a clear error.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace helix::decode {

/// Size limit of text files: larger than any config, hardware description or measurement.
inline constexpr std::uint64_t kMaxTextBytes = 16'000'000;

/// Reads the whole file.
/// @throws Error(io) if it is not a regular file or cannot be read, Error(invalid_file) if it has more than
/// `max_bytes` or is a Git LFS pointer.
std::string read_text(const std::filesystem::path& path, std::uint64_t max_bytes = kMaxTextBytes);

/// Checks that `file`, whose first bytes (8 or more) are `begin`, is not a Git LFS pointer: the short text
/// that a clone without Git LFS has in place of a large file. No JSON and no safetensors file begins like
/// one.
/// @throws Error(invalid_file) if it is.
void expect_no_lfs_pointer(std::string_view begin, std::string_view file);

}  // namespace helix::decode
