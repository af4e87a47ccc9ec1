// SPDX-License-Identifier: Apache-2.0
// RegularFile: the one way in which files of others are opened and read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace helix::decode {

/// An open file with a size: no FIFO, device, socket or directory, whose opening or reading may wait for
/// ever. Const functions may be called from many threads at once.
class RegularFile {
 public:
  /// Opens for reading; waits for nobody, whatever lies under the name.
  /// @throws Error(io) naming the file if it cannot be opened or is of another kind.
  explicit RegularFile(const std::filesystem::path& path);
  ~RegularFile();
  RegularFile(RegularFile&& other) noexcept;
  RegularFile& operator=(RegularFile&& other) noexcept;

  const std::string& path() const { return path_; }
  /// Bytes of the file as it was opened.
  std::uint64_t size() const { return size_; }

  /// Fills `target` with the bytes from `offset` on.
  /// @throws Error(io) naming the file if it ends before, because it shrank since it was opened, or cannot be
  /// read.
  void read(std::uint64_t offset, std::span<std::byte> target) const;

  /// @throws Error(io) naming the file if it shrank since it was opened.
  void expect_whole() const;

  /// Descriptor for mmap and the like; stays this object's.
  int descriptor() const { return descriptor_; }

 private:
  std::string path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

}  // namespace helix::decode
