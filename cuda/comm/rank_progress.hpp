// SPDX-License-Identifier: Apache-2.0
// RankProgress: how many calls a rank of this process has made; shared by NcclComm and PeerComm.
#pragma once

#include <atomic>
#include <cstdint>
#include <ostream>
#include <string_view>

namespace helix::cuda {

/// Counts the calls of one rank, so that errors can name ranks that are behind.
struct RankProgress {
  std::atomic<std::uint64_t> operations = 0;
  std::atomic<const char*> last = "start";  // "": the start of a step

  /// Records the call that the rank makes next.
  void begin(const char* operation) {
    last.store(operation, std::memory_order_relaxed);
    count();
  }
  /// Counts one more call.
  void count() { operations.fetch_add(1, std::memory_order_relaxed); }
  std::uint64_t made() const { return operations.load(std::memory_order_relaxed); }
  std::string_view last_call() const {
    const std::string_view name = last.load(std::memory_order_relaxed);
    return name.empty() ? "the start of a step" : name;
  }
};

/// Adds "; rank 2 is behind: its call 7 was all_reduce, this rank made 8" to the text, or nothing.
inline void name_if_behind(std::ostream& text, int rank, const RankProgress& progress, std::uint64_t made) {
  const std::uint64_t operations = progress.made();
  if (operations >= made) return;
  text << "; rank " << rank << " is behind: its call " << operations << " was " << progress.last_call()
       << ", this rank made " << made;
}

}  // namespace helix::cuda
