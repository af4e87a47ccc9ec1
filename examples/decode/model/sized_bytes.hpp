// SPDX-License-Identifier: Apache-2.0
// Messages of fixed length that begin with their byte count; bytes that do not fit go into a second message.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace helix::decode {

/// Size of the first message. The tokens of a step fit, or an order for some dozen sequences.
inline constexpr std::size_t kFirstBytes = 8192;
/// Bytes of the count at its beginning.
inline constexpr std::size_t kSizeBytes = sizeof(std::uint64_t);

/// The first message of `bytes`, `first_bytes` long: their count, as many of them as fit, then zeros.
inline std::vector<std::byte> first_message(std::span<const std::byte> bytes,
                                            std::size_t first_bytes = kFirstBytes) {
  std::vector<std::byte> message(first_bytes);
  const std::uint64_t size = bytes.size();
  std::memcpy(message.data(), &size, kSizeBytes);
  std::ranges::copy(bytes.first(std::min(bytes.size(), first_bytes - kSizeBytes)),
                    message.begin() + kSizeBytes);
  return message;
}

/// The count at the beginning of the first message.
inline std::uint64_t size_in(const std::byte* message) {
  std::uint64_t size = 0;
  std::memcpy(&size, message, kSizeBytes);
  return size;
}

/// Whether `size` bytes fit in a first message of `first_bytes`.
inline bool fits_first_message(std::uint64_t size, std::size_t first_bytes = kFirstBytes) {
  return size <= first_bytes - kSizeBytes;
}

}  // namespace helix::decode
