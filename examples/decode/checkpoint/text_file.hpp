// SPDX-License-Identifier: Apache-2.0
// Small text files, read whole with a clear error.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace helix::decode {

/// More than any config, description of a machine or measurement has.
inline constexpr std::uint64_t kMaxTextBytes = 16'000'000;

/// The whole file. @throws Error(io) if it is no regular file or cannot be read, Error(invalid_file) if it
/// has more than `max_bytes` or is a Git LFS pointer.
std::string read_text(const std::filesystem::path& path, std::uint64_t max_bytes = kMaxTextBytes);

/// @throws Error(invalid_file) if `begin`, the first 8 bytes of `file` or more, is that of a Git LFS pointer,
/// what a clone without Git LFS has in place of a large file. No JSON and no safetensors file begins so.
void expect_no_lfs_pointer(std::string_view begin, std::string_view file);

}  // namespace helix::decode
