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

/// The first message of `bytes`: their count, as many of them as fit, then zeros.
inline std::vector<std::byte> first_message(std::span<const std::byte> bytes) {
  std::vector<std::byte> message(kFirstBytes);
  const std::uint64_t size = bytes.size();
  std::memcpy(message.data(), &size, kSizeBytes);
  std::ranges::copy(bytes.first(std::min(bytes.size(), kFirstBytes - kSizeBytes)),
                    message.begin() + kSizeBytes);
  return message;
}

/// The count at the beginning of the first message.
inline std::uint64_t size_in(const std::byte* message) {
  std::uint64_t size = 0;
  std::memcpy(&size, message, kSizeBytes);
  return size;
}

/// Whether `size` bytes fit in the first message.
inline bool fits_first_message(std::uint64_t size) {
  return size <= kFirstBytes - kSizeBytes;
}

}  // namespace helix::decode
