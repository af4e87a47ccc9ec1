// SPDX-License-Identifier: Apache-2.0
// Small text files, read whole with a clear error.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace helix::decode {

/// More than any config, description of a machine or measurement has.
inline constexpr std::uint64_t kMaxTextBytes = 16'000'000;

/// The whole file. @throws Error(io) if it is no regular file or cannot be read, Error(invalid_file) if it
/// has more than `max_bytes`.
std::string read_text(const std::filesystem::path& path, std::uint64_t max_bytes = kMaxTextBytes);

}  // namespace helix::decode
