// SPDX-License-Identifier: Apache-2.0
// Parses counts as people write them: 131072, 128K, 1e6.
#pragma once

#include <cstdint>
#include <string_view>

namespace helix::decode {

/// Parses `text` as a whole number: digits, optionally with a fraction, and a power of ten (1e6, 2.5e3) or a
/// suffix K, M or G, also k, m, g, Ki, Mi, Gi (1024, 1024^2, 1024^3). A context of 128K tokens is 131072
/// tokens. Negative numbers are accepted; the caller checks the range.
/// @throws Error(invalid_argument) naming the text if it is not a number, not whole, or beyond int64.
std::int64_t parse_count(std::string_view text);

}  // namespace helix::decode
