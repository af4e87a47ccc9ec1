// SPDX-License-Identifier: Apache-2.0
// The data that the contract compares: bytes between canaries, filled with a pattern that depends on the
// ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace helix::contract {

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

/// Bytes between canaries. check() finds writes of a collective outside its range.
class GuardedBytes {
 public:
  explicit GuardedBytes(std::int64_t size, std::uint8_t fill = 0xcd)
      : size_(size), bytes_(static_cast<std::size_t>(size) + 2 * kGuard, kCanary) {
    std::fill_n(bytes_.begin() + kGuard, size, fill);
  }
  std::uint8_t* data() { return bytes_.data() + kGuard; }
  const std::uint8_t* data() const { return bytes_.data() + kGuard; }
  std::uint8_t operator[](std::int64_t i) const { return data()[i]; }
  std::int64_t size() const { return size_; }
  void check(std::string_view what) const {
    for (std::size_t i = 0; i < kGuard; ++i) {
      require(bytes_[i] == kCanary, what, ": byte ", static_cast<int>(i) - static_cast<int>(kGuard),
              " was written");
      require(bytes_[bytes_.size() - 1 - i] == kCanary, what, ": a byte past the end was written");
    }
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr std::uint8_t kCanary = 0xa5;
  std::int64_t size_;
  std::vector<std::uint8_t> bytes_;
};

/// Byte i of the data that rank `from` sends to rank `to` in `round`.
inline std::uint8_t pattern(int from, int to, std::int64_t i, int round = 0) {
  return static_cast<std::uint8_t>(from * 37 + to * 101 + i * 7 + i / 251 + round * 13 + 1);
}

inline const std::vector<std::int64_t>& contract_bytes() {
  static const std::vector<std::int64_t> bytes = {0, 1, 3, 64, 4096, 65535, 65536, 65537};
  return bytes;
}

}  // namespace helix::contract
