// SPDX-License-Identifier: Apache-2.0
// What the fuzz targets share: how to report a finding, and input that may be refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <helix/error.hpp>

namespace helix::fuzz {

/// Reports a finding if the condition does not hold.
inline void require(bool holds) {
  if (!holds) std::abort();
}

/// Calls read(text) with the input. The only accepted refusal is Error(invalid_file).
template <class Read>
void read_file(const std::uint8_t* data, std::size_t size, const Read& read) {
  try {
    read(std::string_view(reinterpret_cast<const char*>(data), size));
  } catch (const Error& error) {
    require(error.code() == ErrorCode::invalid_file);
  }
}

}  // namespace helix::fuzz
