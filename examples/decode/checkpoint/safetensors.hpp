// SPDX-License-Identifier: Apache-2.0
// SafetensorsFile: a safetensors file whose header is fully validated before use.
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
#include "files/regular_file.hpp"

namespace helix::decode {

/// One tensor as a header describes it; row-major.
struct TensorInfo {
  std::string name;
  std::string_view dtype_name;  ///< Name of the type in the format, such as "BF16"; static storage.
  std::optional<DType> dtype;   ///< Empty for a legal type that this program cannot read.
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< First byte, counted from the start of the data.
  std::uint64_t end = 0;    ///< One past the last byte.

  /// The tensor as a matrix: a 1-D tensor is one row, and higher ranks keep the last dimension as columns.
  std::int64_t rows() const;
  std::int64_t cols() const;
};

/// The shape as text, such as "[512, 256]".
std::string shape_string(std::span<const std::int64_t> shape);

/// A parsed and validated header.
struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  ///< Tensors, sorted by name.
  std::uint64_t data_offset = 0;    ///< Bytes from the start of the file to the data.
};

/// Parses and validates the header of a file of `file_size` bytes. `bytes` is the beginning of the file and
/// holds the whole header, unless the file is shorter. After this call all tensors lie inside the data, cover
/// it without holes or overlaps, and have sizes that agree with type and shape. Alignment is not promised.
/// @throws Error(invalid_file) naming `file`, the tensor and the values.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> bytes, std::uint64_t file_size,
                                           std::string_view file);

/// Maximum number of tensors of a checkpoint. The largest real ones have 300,000.
inline constexpr std::size_t kMaxTensors = std::size_t{1} << 19;

/// An open file. Const functions may be called from many threads at once.
class SafetensorsFile {
 public:
  /// Opens the file and validates its header. Reads no tensor data.
  /// @throws Error(io) if the file cannot be opened, read or mapped, Error(invalid_file) if its header is
  /// malformed.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  /// Size of the file in bytes.
  std::uint64_t size() const { return file_.size(); }
  /// Number of bytes before the data.
  std::uint64_t header_bytes() const { return header_.data_offset; }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }

  /// The tensor named `name`; nullptr if there is none.
  const TensorInfo* find(std::string_view name) const;

  /// Copies bytes of one of this file's tensors, beginning at `offset` within the tensor, to `target`. Makes
  /// no other memory resident.
  /// @throws Error(io) naming the file if it is shorter than when it was opened.
  void read(const TensorInfo& tensor, std::uint64_t offset, std::span<std::byte> target) const;

  /// Position in the file of the first byte of one of its tensors.
  std::uint64_t offset(const TensorInfo& tensor) const { return header_.data_offset + tensor.begin; }

  /// The bytes of one of this file's tensors in the mapped file, at any alignment. If the file shrinks, an
  /// access raises SIGBUS, which guard_mappings() turns into a message. Use read() for data that is read only
  /// once.
  std::span<const std::byte> data(const TensorInfo& tensor) const;

  /// Makes `bytes` resident, which are part of data() or of several tensors in a row: see MappedFile.
  /// @throws Error(io) naming the file if it is shorter than when it was opened.
  void prefault(std::span<const std::byte> bytes) const;

  /// The mapping of the whole file, for users that outlive this object.
  std::shared_ptr<const MappedFile> mapping() const { return mapping_; }

  /// Gives back the resident pages under `bytes` (part of data()). A later access faults them in from the
  /// file again.
  void release(std::span<const std::byte> bytes) const noexcept;

 private:
  RegularFile file_;
  SafetensorsHeader header_;
  std::shared_ptr<const MappedFile> mapping_;
};

}  // namespace helix::decode
