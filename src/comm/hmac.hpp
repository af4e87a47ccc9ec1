// SPDX-License-Identifier: Apache-2.0
// HMAC-SHA-256 (RFC 2104 over FIPS 180-4), with which ranks prove that they know their job's secret without
// sending it.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace helix::comm {

using Digest = std::array<std::uint8_t, 32>;

/// SHA-256 of the bytes given to update(), in pieces of any size.
class Sha256 {
 public:
  void update(std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes) {
      block_[num_bytes_++ % block_.size()] = static_cast<std::uint8_t>(byte);
      if (num_bytes_ % block_.size() == 0) compress();
    }
  }

  Digest finish() {
    const std::uint64_t num_bits = num_bytes_ * 8;
    constexpr std::byte kEnd{0x80};
    constexpr std::byte kZero{0};
    update({&kEnd, 1});
    while (num_bytes_ % block_.size() != 56) update({&kZero, 1});
    for (int shift = 56; shift >= 0; shift -= 8) {
      const auto byte = static_cast<std::byte>(num_bits >> shift);
      update({&byte, 1});
    }
    Digest digest;
    for (std::size_t i = 0; i < digest.size(); ++i)
      digest[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
  }

 private:
  void compress() {
    std::array<std::uint32_t, 64> w;
    for (std::size_t i = 0; i < 16; ++i) {
      w[i] = std::uint32_t{block_[4 * i]} << 24 | std::uint32_t{block_[4 * i + 1]} << 16 |
             std::uint32_t{block_[4 * i + 2]} << 8 | std::uint32_t{block_[4 * i + 3]};
    }
    for (std::size_t i = 16; i < 64; ++i) {
      const std::uint32_t a = w[i - 15];
      const std::uint32_t b = w[i - 2];
      w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                               ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const std::uint32_t t2 =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<std::uint32_t, 8> sums{a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < state_.size(); ++i) state_[i] += sums[i];
  }

  static constexpr std::array<std::uint32_t, 64> kRound = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, 64> block_{};
  std::uint64_t num_bytes_ = 0;
};

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

/// HMAC-SHA-256 of `message` under a `key` of any length.
inline Digest hmac_sha256(std::string_view key, std::span<const std::byte> message) {
  std::array<std::uint8_t, 64> block{};
  if (key.size() > block.size()) {
    Sha256 hash;
    hash.update(bytes_of(key));
    std::ranges::copy(hash.finish(), block.begin());
  } else {
    std::ranges::copy(key, block.begin());
  }
  const auto padded = [&](std::uint8_t pad) {
    auto copy = block;
    for (std::uint8_t& byte : copy) byte ^= pad;
    return copy;
  };
  const auto inner_key = padded(0x36);
  const auto outer_key = padded(0x5c);
  Sha256 inner;
  inner.update(std::as_bytes(std::span(inner_key)));
  inner.update(message);
  const Digest inner_digest = inner.finish();
  Sha256 outer;
  outer.update(std::as_bytes(std::span(outer_key)));
  outer.update(std::as_bytes(std::span(inner_digest)));
  return outer.finish();
}

/// Compares in constant time, so that timing does not reveal where the two differ.
inline bool equal_in_constant_time(const Digest& a, const Digest& b) {
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

}  // namespace helix::comm
