// SPDX-License-Identifier: Apache-2.0
// Counts as people write them: 131072, 128K, 1e6.
#pragma once

#include <cstdint>
#include <string_view>

namespace helix::decode {

/// The whole number that `text` writes: digits, with a fraction, and a power of ten (1e6, 2.5e3) or a suffix
/// K, M or G, also k, m, g, Ki, Mi, Gi (1024, 1024^2, 1024^3). A context of 128K tokens is 131072 of them.
/// Negative numbers are read too; ranges are for the caller to check.
/// @throws Error(invalid_argument) naming the text where it is no number, not whole, or beyond int64.
std::int64_t parse_count(std::string_view text);

}  // namespace helix::decode
