// SPDX-License-Identifier: Apache-2.0
// SafetensorsFile: a safetensors file, every byte of its header validated before use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <helix/dtype.hpp>

#include "checkpoint/mapped_file.hpp"
#include "checkpoint/regular_file.hpp"

namespace helix::decode {

/// One tensor as a header describes it; row-major.
struct TensorInfo {
  std::string name;
  std::string_view dtype_name;  ///< Spelling of the format, "BF16"; static storage.
  std::optional<DType> dtype;   ///< Empty: a legal type that nothing here reads.
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< First byte, counted from the start of the data.
  std::uint64_t end = 0;    ///< One past the last byte.

  /// As a matrix: 1-D tensors are one row, higher ranks keep the last dimension as columns.
  std::int64_t rows() const;
  std::int64_t cols() const;
};

/// "[512, 256]".
std::string shape_string(std::span<const std::int64_t> shape);

/// A parsed and validated header.
struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  ///< Tensors, sorted by name.
  std::uint64_t data_offset = 0;    ///< Bytes from the start of the file to the data.
};

/// Parses and validates the header of a file of `file_size` bytes whose first bytes are `bytes` (at least the
/// whole header unless the file is shorter). Afterwards all tensors lie inside the data, cover it without
/// holes or overlaps, and have sizes that agree with type and shape. Alignment is not promised.
/// @throws Error(invalid_file) naming `file`, the tensor and the values.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> bytes, std::uint64_t file_size,
                                           std::string_view file);

/// Most tensors of a checkpoint. The largest have 300,000.
inline constexpr std::size_t kMaxTensors = std::size_t{1} << 19;

/// An open file. Const functions may be called from many threads at once.
class SafetensorsFile {
 public:
  /// Opens the file and validates its header. Reads no tensor data.
  /// @throws Error(io) if it cannot be opened, read or mapped, Error(invalid_file) if its header is not
  /// sound.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  /// Bytes of the file.
  std::uint64_t size() const { return file_.size(); }
  /// Bytes before the data.
  std::uint64_t header_bytes() const { return header_.data_offset; }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }

  /// nullptr if there is none of that name.
  const TensorInfo* find(std::string_view name) const;

  /// Copies the bytes from `offset` of one of this file's tensors on to `target`. Leaves nothing resident but
  /// `target`.
  /// @throws Error(io) naming the file if it is shorter than it was when it was opened.
  void read(const TensorInfo& tensor, std::uint64_t offset, std::span<std::byte> target) const;

  /// Place of the first byte of one of this file's tensors in the file.
  std::uint64_t offset(const TensorInfo& tensor) const { return header_.data_offset + tensor.begin; }

  /// The bytes of one of this file's tensors in place, at any alignment. Touching them after the file shrank
  /// raises SIGBUS, which guard_mappings() turns into a message: what is read once is better read().
  std::span<const std::byte> data(const TensorInfo& tensor) const;

  /// Makes `bytes` (part of data(), or of several that follow each other) resident: see MappedFile.
  /// @throws Error(io) naming the file if it is shorter than it was when it was opened.
  void prefault(std::span<const std::byte> bytes) const;

  /// The whole file in place, for those that use it longer than this object lives.
  std::shared_ptr<const MappedFile> mapping() const { return mapping_; }

  /// Gives back the resident pages under `bytes` (part of data()): touching them again faults them in from
  /// the file.
  void release(std::span<const std::byte> bytes) const noexcept;

 private:
  RegularFile file_;
  SafetensorsHeader header_;
  std::shared_ptr<const MappedFile> mapping_;
};

}  // namespace helix::decode
