// SPDX-License-Identifier: Apache-2.0
// Byte offsets into untyped buffers, and copies that may find the data in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace helix::comm {

inline std::byte* at(void* base, std::int64_t offset) {
  return static_cast<std::byte*>(base) + offset;
}
inline const std::byte* at(const void* base, std::int64_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

inline void copy_bytes(void* target, const void* source, std::int64_t bytes) {
  // A rank's own slice may already be in place.
  if (bytes > 0 && target != source) std::memcpy(target, source, static_cast<std::size_t>(bytes));
}

}  // namespace helix::comm
