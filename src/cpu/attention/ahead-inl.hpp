// SPDX-License-Identifier: Apache-2.0
// Rows of keys and values that ask for others ahead of their use. Compiled once a Highway target, hence the
// toggled guard.
#if defined(HELIX_SRC_CPU_ATTENTION_AHEAD_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_ATTENTION_AHEAD_INL_HPP_
#undef HELIX_SRC_CPU_ATTENTION_AHEAD_INL_HPP_
#else
#define HELIX_SRC_CPU_ATTENTION_AHEAD_INL_HPP_
#endif

#include <algorithm>
#include <cstdint>

#include <hwy/highway.h>

#include "cpu/attention/task.hpp"
#include "cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

/// Elements from a row of `from` to the row of the same token in `to`. The two may lie in different pools,
/// which pointers cannot be subtracted across.
template <class T>
HWY_INLINE std::int64_t elements_between(const StoredRows& from, const StoredRows& to) {
  const auto begin = reinterpret_cast<std::intptr_t>(from.first);
  const auto end = reinterpret_cast<std::intptr_t>(to.first);
  return static_cast<std::int64_t>(end - begin) / static_cast<std::int64_t>(sizeof(T));
}

/// Asks for the elements of a pair. kLevel as in __builtin_prefetch: 3 is L1, 2 is L2.
template <int kLevel, class T>
HWY_INLINE void prefetch_pair(const T* from) {
  const char* line = reinterpret_cast<const char*>(from);
  HELIX_UNROLL for (int byte = 0; byte < kPair * static_cast<int>(sizeof(T)); byte += 64) {
    __builtin_prefetch(line + byte, 0, kLevel);
  }
}

/// Reading a pair of row i asks for that of row i + kNear in L1: loads that miss L1, though they hit L2,
/// queue up behind requests to memory for the buffers that both take (8 rows: 5 %). The rows of a block and
/// these are no more than repeat behind the last one.
constexpr int kNear = kPair / 2;

/// Key rows of one head. Reading a pair asks for the same one of the token's value in L2.
template <class T, bool kAhead>
struct KeyRows {
  const T* const* rows;    ///< of the task's first head
  std::int64_t to_keys;    ///< elements from those to this head's keys
  std::int64_t to_values;  ///< ... and to this head's values
  HWY_INLINE const T* operator[](std::int64_t i) const { return rows[i] + to_keys; }
  HWY_INLINE void prefetch(std::int64_t i, int, std::int64_t d) const {
    if constexpr (kAhead) {
      prefetch_pair<3>(rows[i + kNear] + to_keys + d);
      prefetch_pair<2>(rows[i] + to_values + d);
    }
  }
};

/// The next tile's keys of all heads, in the order in which they will be read: a pair each time.
template <class T>
struct NextKeys {
  // What is asked for next, up to the end of the run.
  const T* const* row;
  const T* const* run_end;
  std::int64_t to_keys = 0;
  std::int64_t column = 0;
  std::int64_t width;

  const T* const* run_begin;
  const T* const* end;
  std::int64_t run;
  std::int64_t head_elements;  ///< from one head's keys to the next one's
  int num_heads;
  int head = 0;

  HWY_INLINE void prefetch() {
    prefetch_pair<2>(*row + to_keys + column);
    column += kPair;
    if (column == width) next_row();
  }

  HWY_INLINE void next_row() {
    column = 0;
    if (++row != run_end) return;
    to_keys += head_elements;
    if (++head == num_heads) {
      head = 0;
      to_keys = 0;
      if (run_end == end) {  // values wider than keys have gone further
        run_begin = end - 1;
      } else {
        run_begin = run_end;
        run_end = std::min(run_begin + run, end);
      }
    }
    row = run_begin;
  }
};

/// Value rows of one head, in the order of sums. Reading a pair asks for one of the next tile's keys in L2,
/// row by row whatever order the columns are walked in: in that order, a whole tile took 20 % longer.
template <class T, bool kAhead>
struct ValueRows {
  const T* const* keys;    ///< of the task's first head
  std::int64_t to_values;  ///< elements from those to this head's values
  NextKeys<T> next;
  HWY_INLINE const T* operator[](std::int64_t i) const { return keys[i] + to_values; }
  HWY_INLINE void prefetch(std::int64_t i, int, std::int64_t d) {
    if constexpr (kAhead) {
      prefetch_pair<3>(keys[i + kNear] + to_values + d);
      next.prefetch();
    }
  }
};

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
