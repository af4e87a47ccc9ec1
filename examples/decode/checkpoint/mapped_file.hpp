// SPDX-License-Identifier: Apache-2.0
// MappedFile: a file's bytes mapped into memory, and a clear error when the mapped bytes disappear.
#pragma once

#include <cstddef>
#include <span>

#include "files/regular_file.hpp"

namespace helix::decode {

/// A regular file mapped read-only. Const functions may be called from many threads at once.
class MappedFile {
 public:
  /// Maps the whole of `file`, which may be closed afterwards.
  /// @throws Error(io).
  explicit MappedFile(const RegularFile& file);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

  /// Makes `bytes` (part of bytes()) resident, reading uncached pages from the file, so that later accesses
  /// do not wait. Raises SIGBUS, as any access does, if the file no longer holds them.
  void prefault(std::span<const std::byte> bytes) const noexcept;

  /// Gives back the resident pages under `bytes` (part of bytes()). A later access faults them in from the
  /// file again.
  void release(std::span<const std::byte> bytes) const noexcept;

 private:
  std::span<const std::byte> bytes_;
};

/// Installs a SIGBUS handler for files that shrink or become unreadable while mapped. For an access to a
/// MappedFile it ends the process with exit code 1 and one line on standard error that begins with `program`
/// and names the file. Any other SIGBUS ends the process as before. Call it first in main of a program; a
/// library must not change signal handlers. `program` must live until the process ends.
void guard_mappings(const char* program);

}  // namespace helix::decode
