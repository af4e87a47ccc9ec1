// SPDX-License-Identifier: Apache-2.0
// ResidentMemory: the resident memory of this process, as reported by Linux.
#pragma once

#include <cstdint>
#include <fstream>
#include <optional>

#include <unistd.h>

namespace helix::test {

/// Sizes in bytes.
struct ResidentMemory {
  std::int64_t files = 0;  ///< Pages of mapped files, and shared pages.
  std::int64_t own = 0;

  std::int64_t all() const { return files + own; }

  /// Nullopt if the system does not report it.
  static std::optional<ResidentMemory> if_told() {
    std::ifstream statm("/proc/self/statm");
    std::int64_t size = 0;
    std::int64_t resident = 0;
    std::int64_t shared = 0;
    if (!(statm >> size >> resident >> shared)) return std::nullopt;
    const std::int64_t page = ::sysconf(_SC_PAGESIZE);
    return ResidentMemory{shared * page, (resident - shared) * page};
  }
  /// Zeros if the system does not report it.
  static ResidentMemory now() { return if_told().value_or(ResidentMemory{}); }
};

}  // namespace helix::test
