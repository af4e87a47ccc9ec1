// SPDX-License-Identifier: Apache-2.0
// Which core a thread runs on, and how a thread stays off one.
#pragma once

#if defined(__linux__)
#include <sched.h>
#endif

namespace helix::cpu {

/// The system's number of the core that the calling thread runs on; negative if unknown.
inline int current_core() noexcept {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

/// The cores that a thread may use.
class AllowedCores {
 public:
#if defined(__linux__)
  /// Those of the calling thread, as of now.
  AllowedCores() noexcept {
    if (sched_getaffinity(0, sizeof(cores_), &cores_) != 0) CPU_ZERO(&cores_);
  }

  int count() const noexcept {
    return CPU_COUNT(&cores_);
  }

  /// Moves the calling thread from `core`, and from now on lets it use only the others of these cores.
  /// Changes nothing if there are none, or if the system refuses.
  void leave(int core) const noexcept {
    if (core < 0 || core >= CPU_SETSIZE) return;
    cpu_set_t others = cores_;
    CPU_CLR(static_cast<unsigned>(core), &others);
    if (CPU_COUNT(&others) > 0) (void)sched_setaffinity(0, sizeof(others), &others);
  }

 private:
  cpu_set_t cores_;
#else
  int count() const noexcept {
    return 0;
  }
  void leave(int) const noexcept {}
#endif
};

}  // namespace helix::cpu
