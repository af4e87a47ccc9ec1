// SPDX-License-Identifier: Apache-2.0
// A short spin before a thread goes to sleep.
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace helix::cpu {

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Polls `ready` up to `kPolls` times; returns whether it became true.
template <int kPolls, class Ready>
bool spin_until(Ready&& ready) {
  for (int i = 0; i < kPolls; ++i) {
    if (ready()) return true;
    pause_core();
  }
  return ready();
}

}  // namespace helix::cpu
