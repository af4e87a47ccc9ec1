// SPDX-License-Identifier: Apache-2.0
// JSON from files that nobody vouches for: a bounded parser, and file contents made safe to print.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace helix::decode {

/// Parses `text`. Unlike nlohmann::json::parse it rejects keys that appear twice in an object (the last would
/// silently win) and nesting deeper than 16.
/// @throws Error(invalid_file) naming `file`, for these and for any malformed text.
nlohmann::json parse_strict_json(std::string_view text, std::string_view file);

/// `text` in single quotes, at most 100 bytes of it, control and non-ASCII bytes as '?': for error messages.
std::string printable(std::string_view text);

}  // namespace helix::decode
