// SPDX-License-Identifier: Apache-2.0
// Rows of keys and values that prefetch other rows as they are read. Compiled once a Highway target, hence
// the toggled guard.
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

/// Reading part of row i prefetches the same part of row i + kNear into L1: loads that miss L1, even if they
/// hit L2, queue behind requests to memory for the buffers that both use (8 rows: 5 %). A block's rows and
/// kNear are together no more than the rows that repeat after the last one.
constexpr int kNear = kPair / 2;

/// Prefetches what lies `offset` elements into row i + kNear. Not with AVX2, where the products leave no room
/// for it (8 rows on Zen 3: 7 %).
template <class T>
HWY_INLINE void ask_near([[maybe_unused]] const T* const* rows, [[maybe_unused]] std::int64_t i,
                         [[maybe_unused]] std::int64_t offset) {
  if constexpr (kLanes != 8) ask<3>(rows[i + kNear] + offset);
}

/// Key rows of one head. Reading a pair prefetches the same pair of the token's value into L2.
template <class T>
struct KeyRows {
  const T* const* rows;    ///< key rows of the task's first head
  std::int64_t to_keys;    ///< elements from those to this head's keys
  std::int64_t to_values;  ///< elements from those to this head's values
  HWY_INLINE const T* operator[](std::int64_t i) const { return rows[i] + to_keys; }
  HWY_INLINE void prefetch(std::int64_t i, int, std::int64_t d) const {
    ask_near(rows, i, to_keys + d);
    ask<2>(rows[i] + to_values + d);
  }
};

/// Prefetches the next tile's keys of all heads, in the order in which they will be read, a pair each time.
template <class T>
struct NextKeys {
  // What is prefetched next, up to the end of the run.
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
    ask<2>(*row + to_keys + column);
    column += kAsked<T>;
    if (column >= width) next_row();
  }

  HWY_INLINE void next_row() {
    column = 0;
    if (++row != run_end) return;
    to_keys += head_elements;
    if (++head == num_heads) {
      head = 0;
      to_keys = 0;
      if (run_end == end) {  // values wider than keys prefetch further
        run_begin = end - 1;
      } else {
        run_begin = run_end;
        run_end = std::min(run_begin + run, end);
      }
    }
    row = run_begin;
  }
};

/// Value rows of one head, in the order of the sums. Reading a pair prefetches a pair of the next tile's keys
/// into L2, row by row, whatever the order in which columns are read: prefetching in that order, a whole tile
/// took 20 % longer.
template <class T>
struct ValueRows {
  const T* const* keys;    ///< key rows of the task's first head
  std::int64_t to_values;  ///< elements from those to this head's values
  NextKeys<T> next;
  HWY_INLINE const T* operator[](std::int64_t i) const { return keys[i] + to_values; }
  HWY_INLINE void advance(std::int64_t count) { keys += count; }
  /// Whether prefetch() is to be called where part of a line of row i is read, from column d on.
  HWY_INLINE bool asks_here(std::int64_t i, std::int64_t) const { return i % (kAsked<T> / kPair) == 0; }
  HWY_INLINE void prefetch(std::int64_t i, int, std::int64_t d) {
    ask_near(keys, i, to_values + d);
    next.prefetch();
  }
};

/// Rows of one head. Reading them prefetches nothing.
template <class T>
struct PlainRows {
  const T* const* rows;  ///< key rows of the task's first head
  std::int64_t to_rows;  ///< elements from those to this head's
  HWY_INLINE const T* operator[](std::int64_t i) const { return rows[i] + to_rows; }
  HWY_INLINE void advance(std::int64_t n) { rows += n; }
  HWY_INLINE bool asks_here(std::int64_t, std::int64_t) const { return false; }
  HWY_INLINE void prefetch(std::int64_t, int, std::int64_t) const {}
};

/// How far ahead of the reads AlongRows prefetches.
constexpr std::int64_t kAlongBytes = 12 << 10;

/// The rows that are read after the current ones.
template <class T>
struct Behind {
  const T* const* rows = nullptr;  ///< key rows of the task's first head
  std::int64_t count = 0;          ///< at least 1
  std::int64_t to_rows = 0;        ///< elements from those to what is read
};

/// Rows of one head. Reading a pair prefetches the same pair of the row `along` further on into L1.
template <class T>
struct AlongRows {
  const T* const* rows;  ///< key rows of the task's first head
  std::int64_t to_rows;  ///< elements from those to this head's
  std::int64_t count;
  std::int64_t along;
  Behind<T> behind;
  HWY_INLINE const T* operator[](std::int64_t i) const { return rows[i] + to_rows; }
  HWY_INLINE void advance(std::int64_t n) {
    rows += n;
    count -= n;
  }
  HWY_INLINE bool asks_here(std::int64_t, std::int64_t d) const { return d % kAsked<T> == 0; }
  HWY_INLINE void prefetch(std::int64_t i, int, std::int64_t d) const {
    const std::int64_t next = i + along;
    const T* row = next < count ? rows[next] + to_rows
                                : behind.rows[std::min(next - count, behind.count - 1)] + behind.to_rows;
    ask<3>(row + d);
  }
};

/// Rows of all heads, one head after the other.
template <class T>
struct Pass {
  const T* const* rows = nullptr;  ///< keys of the first head
  std::int64_t count = 0;
  std::int64_t to_rows = 0;  ///< elements from those to what is read of the first head
  std::int64_t width = 0;
};

/// What a Course prefetches next, up to the end of the head's rows.
template <class T>
struct Place {
  const T* const* row = nullptr;
  const T* const* end = nullptr;
  std::int64_t to_rows = 0;
  std::int64_t width = 0;
  std::int64_t column = 0;
};

/// The order in which direct() reads rows: a tile's keys of all heads, their values, the next tile's keys. It
/// runs one head's tile ahead of the reads.
template <class T>
class Course {
 public:
  Course(std::int64_t head_elements, int num_heads) : head_elements_(head_elements), num_heads_(num_heads) {}

  /// Begins a tile, whose lists of rows must stay until the next one begins. After the last tile, `next_keys`
  /// are any rows that may be prefetched again. The first tile's first head is not prefetched: the wait for
  /// it comes only once.
  void begin(const Pass<T>& keys, const Pass<T>& values, const Pass<T>& next_keys) {
    passes_[0] = keys;
    passes_[1] = values;
    passes_[2] = next_keys;
    if (place.row == nullptr) {
      next();
    } else {
      pass_ = std::max(pass_ - 2, 0);
    }
  }

  /// Moves to the next head's rows. Stays at the last head of the last pass.
  HWY_NOINLINE void next() {
    if (head_ + 1 < num_heads_) {
      ++head_;
    } else if (pass_ < 2) {
      ++pass_;
      head_ = 0;
    }
    const Pass<T>& pass = passes_[pass_];
    place = {pass.rows, pass.rows + pass.count, pass.to_rows + head_ * head_elements_, pass.width, 0};
  }

  Place<T> place;

 private:
  Pass<T> passes_[3];
  std::int64_t head_elements_;  ///< from one head's rows to the next one's
  int num_heads_;
  int pass_ = 0;
  int head_ = 0;
};

/// Rows of one head. Reading kBytes prefetches as many contiguous bytes of the Course into L2. Four lines at
/// once were 2 % faster than as many single ones with 4 rows, and 16 % slower with one. Prefetching every
/// second line, with the rest left to the hardware, took 40 to 70 % longer. Prefetching 64 rows ahead instead
/// of 256 took 40 % longer with 4 rows, which read a tile's values twice.
template <class T, int R>
struct CourseRows {
  static constexpr int kAskedBytes = kAsked<T> * static_cast<int>(sizeof(T));
  static constexpr int kBytes = std::max(R == 1 ? 64 : 256, kAskedBytes);
  static constexpr int kCalls = kBytes / kAskedBytes;
  const T* const* rows;  ///< key rows of the task's first head
  std::int64_t to_rows;  ///< elements from those to this head's
  int blocks;            ///< times that each row is read
  Course<T>* course;
  Place<T> place = course->place;
  int calls = 0;

  HWY_INLINE const T* operator[](std::int64_t i) const { return rows[i] + to_rows; }
  HWY_INLINE void advance(std::int64_t n) { rows += n; }
  HWY_INLINE bool asks_here(std::int64_t i, std::int64_t) const { return i % (kAsked<T> / kPair) == 0; }
  HWY_INLINE void prefetch(std::int64_t i, int, std::int64_t d) {
    ask_near(rows, i, to_rows + d);
    if (++calls < kCalls * blocks) return;
    calls = 0;
    HELIX_UNROLL for (int byte = 0; byte < kBytes; byte += 64) {
      __builtin_prefetch(*place.row + place.to_rows + place.column, 0, 2);
      place.column += 64 / static_cast<std::int64_t>(sizeof(T));
      if (place.column >= place.width) next_row();
    }
  }
  HWY_INLINE void next_row() {
    place.column = 0;
    if (++place.row != place.end) return;
    course->next();
    place = course->place;
  }
};

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
