// SPDX-License-Identifier: Apache-2.0
// RegularFile: the one way in which the program opens and reads input files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace helix::decode {

/// An open regular file. FIFOs, devices, sockets and directories are refused, because opening or reading them
/// may wait for ever. Const functions may be called from many threads at once.
class RegularFile {
 public:
  /// Opens `path` for reading; never blocks, whatever kind of file it is.
  /// @throws Error(io) naming the file if it cannot be opened or is not a regular file.
  explicit RegularFile(const std::filesystem::path& path);
  ~RegularFile();
  RegularFile(RegularFile&& other) noexcept;
  RegularFile& operator=(RegularFile&& other) noexcept;

  const std::string& path() const { return path_; }
  /// Size of the file in bytes when it was opened.
  std::uint64_t size() const { return size_; }

  /// Fills `target` with the bytes that begin at `offset`.
  /// @throws Error(io) naming the file if it cannot be read, or if it ends too early because it shrank since
  /// it was opened.
  void read(std::uint64_t offset, std::span<std::byte> target) const;

  /// @throws Error(io) naming the file if it shrank since it was opened.
  void expect_whole() const;

  /// Descriptor for calls such as mmap; this object keeps ownership.
  int descriptor() const { return descriptor_; }

 private:
  std::string path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

}  // namespace helix::decode
