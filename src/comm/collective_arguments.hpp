// SPDX-License-Identifier: Apache-2.0
// Checks of a collective's arguments that need no other rank, and the per-peer counts that a queued task
// keeps.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include <helix/dtype.hpp>
#include <helix/error.hpp>

namespace helix::comm {

inline void expect_buffer(std::string_view operation, std::string_view what, const void* pointer,
                          std::int64_t count) {
  HELIX_EXPECTS(count >= 0, ErrorCode::invalid_argument, operation, ": the count of ", what, " is ", count,
                "; it must not be negative");
  HELIX_EXPECTS(pointer != nullptr || count == 0, ErrorCode::invalid_argument, operation, ": ", what,
                " is null, but its count is ", count);
}

inline void expect_buffers(std::string_view operation, const void* in, const void* out, std::int64_t count) {
  expect_buffer(operation, "in", in, count);
  expect_buffer(operation, "out", out, count);
}

inline void expect_reduction(std::string_view operation, const void* in, const void* out, std::int64_t count,
                             DType dtype) {
  expect_buffers(operation, in, out, count);
  HELIX_EXPECTS(detail::is_arithmetic(dtype), ErrorCode::unsupported, operation, ": cannot sum ",
                to_string(dtype), "; use f32, f16 or bf16");
  const std::size_t width = size_bytes(dtype);
  const auto remainder = (std::bit_cast<std::uintptr_t>(in) | std::bit_cast<std::uintptr_t>(out)) % width;
  HELIX_EXPECTS(remainder == 0, ErrorCode::invalid_argument, operation, ": in ", in, " and out ", out,
                " must be aligned to the ", width, " bytes of ", to_string(dtype));
}

inline void expect_peer_bytes(const void* in, std::span<const std::int64_t> send_bytes, const void* out,
                              std::span<const std::int64_t> recv_bytes, int size) {
  const auto expect = [&](std::string_view what, const void* buffer, std::span<const std::int64_t> bytes) {
    HELIX_EXPECTS(std::ssize(bytes) == size, ErrorCode::invalid_argument, "all_to_all_v: ", what, " has ",
                  bytes.size(), " peer counts; the group has ", size, " ranks");
    for (const std::int64_t count : bytes) expect_buffer("all_to_all_v", what, buffer, count);
  };
  expect("in", in, send_bytes);
  expect("out", out, recv_bytes);
}

/// A rank must send itself as many bytes as it receives from itself.
inline void expect_own_bytes(std::span<const std::int64_t> send_bytes,
                             std::span<const std::int64_t> recv_bytes, int rank) {
  const auto own = static_cast<std::size_t>(rank);
  HELIX_EXPECTS(send_bytes[own] == recv_bytes[own], ErrorCode::invalid_argument, "all_to_all_v: rank ", own,
                " sends ", send_bytes[own], " bytes to itself, but expects ", recv_bytes[own]);
}

inline void expect_root(std::string_view operation, int root, int size) {
  HELIX_EXPECTS(root >= 0 && root < size, ErrorCode::invalid_argument, operation, ": root is ", root,
                "; the group has ranks 0 to ", size - 1);
}

inline void expect_peer(std::string_view operation, int peer, int rank, int size) {
  HELIX_EXPECTS(peer >= 0 && peer < size && peer != rank, ErrorCode::invalid_argument, operation,
                ": peer is ", peer, "; it must be another rank than ", rank, " of this group of ", size);
}

/// One rank's counts to and from each peer. Groups of up to kInline ranks keep them inside the queued task.
class PeerBytes {
 public:
  static constexpr std::size_t kInline = 32;

  PeerBytes(std::span<const std::int64_t> send, std::span<const std::int64_t> recv) : size_(send.size()) {
    if (size_ > kInline) large_ = std::make_unique_for_overwrite<std::int64_t[]>(2 * size_);
    std::copy(send.begin(), send.end(), data());
    std::copy(recv.begin(), recv.end(), data() + size_);
  }
  PeerBytes(PeerBytes&& other) noexcept : size_(other.size_), large_(std::move(other.large_)) {
    if (!large_) std::copy_n(other.small_.data(), 2 * size_, small_.data());
  }

  const std::int64_t* send() const { return large_ ? large_.get() : small_.data(); }
  const std::int64_t* recv() const { return send() + size_; }

 private:
  std::int64_t* data() { return large_ ? large_.get() : small_.data(); }

  std::size_t size_;
  std::unique_ptr<std::int64_t[]> large_;
  std::array<std::int64_t, 2 * kInline> small_;
};

}  // namespace helix::comm
