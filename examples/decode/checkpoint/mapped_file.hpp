// SPDX-License-Identifier: Apache-2.0
// MappedFile: a file's bytes in place, and what becomes of a program that touches those that are gone.
#pragma once

#include <cstddef>
#include <span>

#include "checkpoint/regular_file.hpp"

namespace helix::decode {

/// A regular file mapped read-only. Const functions may be called from many threads at once.
class MappedFile {
 public:
  /// Maps the whole of `file`, which may be closed afterwards. @throws Error(io).
  explicit MappedFile(const RegularFile& file);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

  /// Makes `bytes` (part of bytes()) resident, reading from the file what no cache holds, so that touching
  /// them later waits for nothing. Raises SIGBUS, as any touch does, if they are gone.
  void prefault(std::span<const std::byte> bytes) const noexcept;

  /// Gives back the resident pages under `bytes` (part of bytes()): touching them again faults them in from
  /// the file.
  void release(std::span<const std::byte> bytes) const noexcept;

 private:
  std::span<const std::byte> bytes_;
};

/// Makes SIGBUS on a MappedFile, whose file shrank or cannot be read any more, end the process with exit code
/// 1 and one line on standard error that begins with `program` and names the file. Any other SIGBUS ends it
/// as before. For programs, first in main: a library leaves signals alone. `program` outlives the process.
void guard_mappings(const char* program);

}  // namespace helix::decode
