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

/// The cores that a thread may use. Made and used by that thread.
class AllowedCores {
 public:
#if defined(__linux__)
  AllowedCores() noexcept {
    if (!read(allowed_)) CPU_ZERO(&allowed_);
    in_force_ = allowed_;
  }

  /// Moves the calling thread from `core`, and from now on lets it use only the others of its cores. Changes
  /// nothing if it may use fewer than `least`, or no other, or if the system refuses. Whoever changes the
  /// thread's cores in between decides which are its own from then on.
  void leave(int core, int least) noexcept {
    cpu_set_t now;
    if (core < 0 || core >= CPU_SETSIZE || !read(now)) return;
    if (!CPU_EQUAL(&now, &in_force_)) allowed_ = in_force_ = now;
    if (CPU_COUNT(&allowed_) < least) return;
    cpu_set_t others = allowed_;
    CPU_CLR(static_cast<unsigned>(core), &others);
    if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof(others), &others) == 0) in_force_ = others;
  }

 private:
  static bool read(cpu_set_t& cores) noexcept {
    return sched_getaffinity(0, sizeof(cores), &cores) == 0;
  }

  cpu_set_t allowed_;   // the thread's own, of which leave() takes one away for a time
  cpu_set_t in_force_;  // what leave() has last seen or set
#else
  void leave(int, int) noexcept {}
#endif
};

}  // namespace helix::cpu
