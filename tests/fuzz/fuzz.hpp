// SPDX-License-Identifier: Apache-2.0
// What the fuzz targets share: a finding, and bytes that may be refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <helix/error.hpp>

namespace helix::fuzz {

/// A finding unless it holds.
inline void require(bool holds) {
  if (!holds) std::abort();
}

/// Calls read(text) with the input, which may be refused as an invalid file, and in no other way.
template <class Read>
void read_file(const std::uint8_t* data, std::size_t size, const Read& read) {
  try {
    read(std::string_view(reinterpret_cast<const char*>(data), size));
  } catch (const Error& error) {
    require(error.code() == ErrorCode::invalid_file);
  }
}

}  // namespace helix::fuzz
