// SPDX-License-Identifier: Apache-2.0
// A bounded parser for untrusted JSON, and functions that make file contents safe to print.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace helix::decode {

/// Maximum number of values in a document that is kept in memory: array elements count, keys do not. The
/// largest real documents, configs that name 21,000 classes twice, have 45,000. A value with its key takes
/// up to 160 bytes, so no document takes more than 11 MB besides its text.
inline constexpr std::size_t kMaxJsonValues = 65'536;

/// Parses `text` in time linear in its size. Unlike nlohmann::json::parse it rejects repeated keys in an
/// object (where the last one would silently win), nesting deeper than 16 and more than kMaxJsonValues
/// values.
/// @throws Error(invalid_file) naming `file`, for these and for any malformed text.
nlohmann::json parse_strict_json(std::string_view text, std::string_view file);

/// `text` in single quotes, at most 100 bytes of it, control and non-ASCII bytes as '?': for error messages.
std::string printable(std::string_view text);

/// The whole of `text` on one line: control characters as \n, \t or \x1b.
std::string one_line(std::string_view text);

}  // namespace helix::decode
