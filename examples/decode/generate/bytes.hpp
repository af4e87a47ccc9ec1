// SPDX-License-Identifier: Apache-2.0
// Serializes values as their bytes in memory, for messages between ranks of this program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <helix/error.hpp>

namespace helix::decode {

/// Appends values and arrays; a ByteReader takes them in the same order.
class ByteWriter {
 public:
  template <class T>
  void operator()(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    append(&value, sizeof(T));
  }
  template <class T>
  void operator()(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    (*this)(static_cast<std::uint64_t>(values.size()));
    append(values.data(), values.size() * sizeof(T));
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void append(const void* data, std::size_t size) {
    const auto* const bytes = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), bytes, bytes + size);
  }

  std::vector<std::byte> bytes_;
};

/// Takes what a ByteWriter wrote.
/// @throws Error(internal) if bytes are missing.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : left_(bytes) {}

  template <class T>
  void operator()(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
  }
  template <class T>
  void operator()(std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::uint64_t size = 0;
    (*this)(size);
    HELIX_EXPECTS(size <= left_.size() / sizeof(T), ErrorCode::internal, "a message of a rank says ", size,
                  " values and has ", left_.size(), " bytes left");
    values.resize(static_cast<std::size_t>(size));
    if (size > 0) std::memcpy(values.data(), take(values.size() * sizeof(T)), values.size() * sizeof(T));
  }
  bool is_at_end() const { return left_.empty(); }
  void expect_end() const {
    HELIX_EXPECTS(is_at_end(), ErrorCode::internal, "a message of a rank has ", left_.size(),
                  " bytes behind its end");
  }

 private:
  const std::byte* take(std::size_t size) {
    HELIX_EXPECTS(size <= left_.size(), ErrorCode::internal, "a message of a rank ends ", size - left_.size(),
                  " bytes early");
    const std::byte* const data = left_.data();
    left_ = left_.subspan(size);
    return data;
  }

  std::span<const std::byte> left_;
};

}  // namespace helix::decode
