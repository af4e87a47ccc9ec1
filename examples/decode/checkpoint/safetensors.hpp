// SPDX-License-Identifier: Apache-2.0
// SafetensorsFile: a safetensors file mapped read-only, every byte of its header validated before use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <helix/dtype.hpp>

namespace helix::decode {

/// One tensor as a header describes it; row-major.
struct TensorInfo {
  std::string name;
  std::string_view dtype_name;  ///< as the format spells it, "BF16"; static storage
  std::optional<DType> dtype;   ///< empty: a legal type that nothing here reads
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< first byte, counted from the start of the data
  std::uint64_t end = 0;    ///< one past the last byte

  /// As a matrix: 1-D tensors are one row, higher ranks keep the last dimension as columns.
  std::int64_t rows() const;
  std::int64_t cols() const;
};

/// "[512, 256]".
std::string shape_string(std::span<const std::int64_t> shape);

/// A parsed and validated header.
struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  ///< sorted by name
  std::uint64_t data_offset = 0;    ///< of the data from the start of the file, bytes
};

/// Parses and validates the header of a file of `file_size` bytes whose first bytes are `bytes` (at least the
/// whole header unless the file is shorter). Afterwards all tensors lie inside the data, cover it without
/// holes or overlaps, and have sizes that agree with type and shape. Alignment is not promised.
/// @throws Error(invalid_file) naming `file`, the tensor and the values.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> bytes, std::uint64_t file_size,
                                           std::string_view file);

/// A mapped file. Const functions may be called from many threads at once.
class SafetensorsFile {
 public:
  /// Maps the file and validates its header. Reads no tensor data.
  /// @throws Error(io) if it cannot be opened or mapped, Error(invalid_file) if its header is not sound.
  explicit SafetensorsFile(std::string path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;

  const std::string& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }

  /// nullptr if there is none of that name.
  const TensorInfo* find(std::string_view name) const;

  /// The bytes of one of this file's tensors, at any alignment.
  std::span<const std::byte> data(const TensorInfo& tensor) const;

  /// Gives back the resident pages under `bytes` (part of data()): reading them again faults them in from the
  /// file.
  void release(std::span<const std::byte> bytes) const noexcept;

 private:
  void unmap() noexcept;

  std::string path_;
  std::span<const std::byte> mapping_;
  SafetensorsHeader header_;
};

}  // namespace helix::decode
