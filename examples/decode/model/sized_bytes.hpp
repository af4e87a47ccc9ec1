// SPDX-License-Identifier: Apache-2.0
// Messages of fixed length that begin with how many bytes there are: what does not fit goes in a second one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace helix::decode {

/// What goes in the first message: the tokens of a step, or the order of some dozen sequences.
inline constexpr std::size_t kFirstBytes = 8192;
/// Of its bytes, those of the number.
inline constexpr std::size_t kSizeBytes = sizeof(std::uint64_t);

/// The first message of `bytes`: their number, and as many of them as fit; zeros behind.
inline std::vector<std::byte> first_message(std::span<const std::byte> bytes) {
  std::vector<std::byte> message(kFirstBytes);
  const std::uint64_t size = bytes.size();
  std::memcpy(message.data(), &size, kSizeBytes);
  std::ranges::copy(bytes.first(std::min(bytes.size(), kFirstBytes - kSizeBytes)),
                    message.begin() + kSizeBytes);
  return message;
}

/// The number that the first message at `message` begins with.
inline std::uint64_t size_in(const std::byte* message) {
  std::uint64_t size = 0;
  std::memcpy(&size, message, kSizeBytes);
  return size;
}

/// Whether that many bytes fit in the first message.
inline bool fits_first_message(std::uint64_t size) {
  return size <= kFirstBytes - kSizeBytes;
}

}  // namespace helix::decode
