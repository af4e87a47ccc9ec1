// SPDX-License-Identifier: Apache-2.0
// The ways in which direct() prefetches, a class each. They make rows of keys and values that prefetch other
// rows as they are read. Compiled once a Highway target, hence the toggled guard.
#if defined(HELIX_SRC_CPU_ATTENTION_AHEAD_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_ATTENTION_AHEAD_INL_HPP_
#undef HELIX_SRC_CPU_ATTENTION_AHEAD_INL_HPP_
#else
#define HELIX_SRC_CPU_ATTENTION_AHEAD_INL_HPP_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>

#include <hwy/highway.h>

#include "cpu/attention/state-inl.hpp"
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

/// A tile of direct(), which all of its heads share. Key rows are those of the first head.
template <class T>
struct DirectTile {
  const Heads& heads;
  std::int64_t first_row;  ///< first query row of each head
  std::int64_t num_rows;
  int num_blocks;           ///< blocks of those rows
  std::int64_t streams;     ///< runs of keys that sums take in turn
  std::int64_t read_run;    ///< keys of a head that are read before the next head's
  std::int64_t value_tile;  ///< values that blocks of rows share
  std::int64_t count = 0;
  const T* const* read = nullptr;   ///< key rows as they are read
  const T* const* place = nullptr;  ///< the same rows in the order of the sums
  bool is_permuted = false;         ///< whether those two differ
  const T* const* next = nullptr;   ///< key rows of the next tile; after the last one, of this tile
  std::int64_t next_count = 0;      ///< at least 1

  /// Elements from the key rows to a head's keys, or values.
  HWY_INLINE std::int64_t to_keys(int head) const {
    return elements_between<T>(heads.tasks[0].keys, heads.tasks[head].keys);
  }
  HWY_INLINE std::int64_t to_values(int head) const {
    return elements_between<T>(heads.tasks[0].keys, heads.tasks[head].values);
  }
  HWY_INLINE std::int64_t to_next_head() const { return heads.count > 1 ? to_keys(1) : 0; }
};

/// Rows [begin, begin + count) of a tile, of one head.
struct HeadRun {
  int head;
  std::int64_t begin;
  std::int64_t count;
};

/// Prefetch::none. The other ways replace those of its functions in which they do something else.
template <class T>
class NoPrefetch {
 public:
  struct Rows {
    const T* const* rows;  ///< key rows of the task's first head
    std::int64_t to_rows;  ///< elements from those to this head's
    HWY_INLINE const T* operator[](std::int64_t i) const { return rows[i] + to_rows; }
    HWY_INLINE void advance(std::int64_t n) { rows += n; }
    /// Whether prefetch() is to be called where part of a line of row i is read, from a column on.
    HWY_INLINE bool asks_here(std::int64_t, std::int64_t) const { return false; }
    HWY_INLINE void prefetch(std::int64_t, int, std::int64_t) const {}
  };

  HWY_INLINE void begin_tile(const DirectTile<T>&) {}
  /// The keys that a block of R query rows reads, and the values.
  template <int R>
  HWY_INLINE Rows keys(const DirectTile<T>& tile, const HeadRun& run) {
    return {tile.read + run.begin, tile.to_keys(run.head)};
  }
  template <int R>
  HWY_INLINE Rows values(const DirectTile<T>& tile, const HeadRun& run) {
    return {tile.place + run.begin, tile.to_values(run.head)};
  }
  /// Rows that keys() or values() returned have been read.
  template <class AnyRows>
  HWY_INLINE void end(const AnyRows&) {}
};

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

/// Prefetch::across: values while keys are multiplied, the next tile's keys while values are.
template <class T>
class Across : public NoPrefetch<T> {
 public:
  /// Reading a pair prefetches the same pair of the token's value into L2.
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

  /// The next tile's keys of all heads, in the order in which they will be read. Prefetches a pair each time.
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

  /// In the order of the sums. Reading a pair prefetches a pair of the next tile's keys into L2, row by row,
  /// whatever the order in which columns are read: prefetching in that order, a whole tile took 20 % longer.
  struct ValueRows {
    const T* const* keys;    ///< key rows of the task's first head
    std::int64_t to_values;  ///< elements from those to this head's values
    NextKeys next;
    HWY_INLINE const T* operator[](std::int64_t i) const { return keys[i] + to_values; }
    HWY_INLINE void advance(std::int64_t count) { keys += count; }
    HWY_INLINE bool asks_here(std::int64_t i, std::int64_t) const { return i % (kAsked<T> / kPair) == 0; }
    HWY_INLINE void prefetch(std::int64_t i, int, std::int64_t d) {
      ask_near(keys, i, to_values + d);
      next.prefetch();
    }
  };

  HWY_INLINE void begin_tile(const DirectTile<T>& tile) {
    next_keys_ = {.row = tile.next,
                  .run_end = tile.next + std::min(tile.read_run, tile.next_count),
                  .width = tile.heads.first.d,
                  .run_begin = tile.next,
                  .end = tile.next + tile.next_count,
                  .run = tile.read_run,
                  .head_elements = tile.to_next_head(),
                  .num_heads = tile.heads.count};
  }
  template <int R>
  HWY_INLINE KeyRows keys(const DirectTile<T>& tile, const HeadRun& run) {
    return {tile.read + run.begin, tile.to_keys(run.head), tile.to_values(run.head)};
  }
  template <int R>
  HWY_INLINE ValueRows values(const DirectTile<T>& tile, const HeadRun& run) {
    return {tile.place + run.begin, tile.to_values(run.head), next_keys_};
  }
  HWY_INLINE void end(const KeyRows&) {}
  HWY_INLINE void end(const ValueRows& values) { next_keys_ = values.next; }

 private:
  NextKeys next_keys_{};
};

/// Rows that are read after others.
template <class T>
struct RowsAfter {
  const T* const* rows = nullptr;  ///< key rows of the task's first head
  std::int64_t count = 0;          ///< at least 1
  std::int64_t to_rows = 0;        ///< elements from those to what is read
  /// The row that is read as number `i` after the others; if there are fewer, the last one.
  HWY_INLINE const T* operator[](std::int64_t i) const { return rows[std::min(i, count - 1)] + to_rows; }
};

/// Prefetch::along: what is read kAlongBytes later.
template <class T>
class Along : public NoPrefetch<T> {
 public:
  /// Reading a pair prefetches the same pair of the row `along` further on into L1.
  struct Rows {
    const T* const* rows;  ///< key rows of the task's first head
    std::int64_t to_rows;  ///< elements from those to this head's
    std::int64_t count;
    std::int64_t along;
    RowsAfter<T> after;
    HWY_INLINE const T* operator[](std::int64_t i) const { return rows[i] + to_rows; }
    HWY_INLINE void advance(std::int64_t n) {
      rows += n;
      count -= n;
    }
    HWY_INLINE bool asks_here(std::int64_t, std::int64_t d) const { return d % kAsked<T> == 0; }
    HWY_INLINE void prefetch(std::int64_t i, int, std::int64_t d) const {
      const std::int64_t next = i + along;
      const T* row = next < count ? rows[next] + to_rows : after[next - count];
      ask<3>(row + d);
    }
  };

  template <int R>
  HWY_INLINE Rows keys(const DirectTile<T>& tile, const HeadRun& run) {
    const std::int64_t end = run.begin + run.count;
    RowsAfter<T> after{tile.place, tile.count, tile.to_values(0)};
    if (run.head + 1 < tile.heads.count) {
      after = {tile.read + run.begin, run.count, tile.to_keys(run.head + 1)};
    } else if (end < tile.count) {
      after = {tile.read + end, tile.count - end, 0};
    }
    return {tile.read + run.begin, tile.to_keys(run.head), run.count, rows_along(tile.heads.first.d), after};
  }
  template <int R>
  HWY_INLINE Rows values(const DirectTile<T>& tile, const HeadRun& run) {
    const std::int64_t rest = tile.count - run.begin;
    RowsAfter<T> after{tile.next, tile.next_count, 0};
    if (run.head + 1 < tile.heads.count) after = {tile.place, tile.count, tile.to_values(run.head + 1)};
    return {tile.place + run.begin, tile.to_values(run.head), rest, rows_along(tile.heads.first.dv), after};
  }

 private:
  static constexpr std::int64_t kAlongBytes = 12 << 10;

  /// Rows of `width` elements that are read meanwhile.
  static HWY_INLINE std::int64_t rows_along(std::int64_t width) {
    return std::max(kAlongBytes / (width * static_cast<std::int64_t>(sizeof(T))), std::int64_t{1});
  }
};

/// Prefetch::linear: what lies kLinearBytes further on in memory, and near the end of the last head's rows
/// what is read after them. On Zen 5 4 KiB drew 4 % less, 16 KiB 7 %.
template <class T>
class Linear : public NoPrefetch<T> {
 public:
  struct Rows {
    const T* const* rows;  ///< key rows of the task's first head
    std::int64_t to_rows;  ///< elements from those to this head's
    std::int64_t turn;     ///< from this row on, rows after these are prefetched
    RowsAfter<T> after;
    HWY_INLINE const T* operator[](std::int64_t i) const { return rows[i] + to_rows; }
    HWY_INLINE void advance(std::int64_t n) {
      rows += n;
      turn -= n;
    }
    HWY_INLINE bool asks_here(std::int64_t, std::int64_t d) const { return d % kAsked<T> == 0; }
    HWY_INLINE void prefetch(std::int64_t i, int, std::int64_t d) const {
      const T* row = i < turn ? rows[i] + to_rows + kLinearBytes / static_cast<std::int64_t>(sizeof(T))
                              : after[i - turn];
      ask<0>(row + d);
      keep_order();  // mha on Zen 5: 32 GB/s instead of 30
    }
  };

  template <int R>
  HWY_INLINE Rows keys(const DirectTile<T>& tile, const HeadRun& run) {
    const std::int64_t end = run.begin + run.count;
    RowsAfter<T> after{tile.place, tile.count, tile.to_values(0)};
    if (end < tile.count) after = {tile.read + end, tile.count - end, 0};
    return {tile.read + run.begin, tile.to_keys(run.head), turn_of(tile, run, tile.heads.first.d), after};
  }
  template <int R>
  HWY_INLINE Rows values(const DirectTile<T>& tile, const HeadRun& run) {
    const std::int64_t end = run.begin + run.count;
    RowsAfter<T> after{tile.next, tile.next_count, 0};
    if (end < tile.count) after = {tile.place + end, tile.count - end, tile.to_values(0)};
    return {tile.place + run.begin, tile.to_values(run.head), turn_of(tile, run, tile.heads.first.dv), after};
  }

 private:
  static constexpr std::int64_t kLinearBytes = 8 << 10;

  /// Rows::turn of a run of rows of `width` elements. Behind the rows of all heads but the last, memory has
  /// those of the next one.
  static HWY_INLINE std::int64_t turn_of(const DirectTile<T>& tile, const HeadRun& run, std::int64_t width) {
    if (run.head + 1 < tile.heads.count) return std::numeric_limits<std::int64_t>::max();
    const std::int64_t ahead = kLinearBytes / (width * static_cast<std::int64_t>(sizeof(T)));
    return std::max(run.count - ahead, std::int64_t{0});
  }
};

/// Prefetch::straight and straight_l1: one head's tile ahead of the reads, through a tile's keys of all
/// heads, their values, and those of the next tile, into L2 or L1. Where keys are read as they lie, values
/// are prefetched as they lie too, whatever the order of their sums.
template <class T, int kLevel>
class Straight : public NoPrefetch<T> {
 public:
  /// What is prefetched next, up to the end of a run of a head's rows.
  struct Cursor {
    const T* const* row = nullptr;
    const T* const* end = nullptr;
    std::int64_t to_rows = 0;
    std::int64_t width = 0;
    std::int64_t column = 0;
  };

  /// Reading kBytes prefetches as many contiguous bytes ahead. Into L2, four lines at once were 2 % faster
  /// than as many single ones with 4 rows, and 16 % slower with one; into L1 they were 4 % slower with one.
  /// Prefetching every second line, with the rest left to the hardware, took 40 to 70 % longer. Prefetching
  /// 64 rows ahead instead of 256 took 40 % longer with 4 rows, which read a tile's values twice.
  template <int R>
  struct Rows {
    static constexpr int kAskedBytes = kAsked<T> * static_cast<int>(sizeof(T));
    static constexpr int kBytes = std::max(R == 1 || kLevel == 3 ? 64 : 256, kAskedBytes);
    static constexpr int kCalls = kBytes / kAskedBytes;
    const T* const* rows;  ///< key rows of the task's first head
    std::int64_t to_rows;  ///< elements from those to this head's
    int blocks;            ///< times that each row is read
    Straight* straight;
    Cursor cursor = straight->cursor_;
    int calls = 0;

    HWY_INLINE const T* operator[](std::int64_t i) const { return rows[i] + to_rows; }
    HWY_INLINE void advance(std::int64_t n) { rows += n; }
    HWY_INLINE bool asks_here(std::int64_t i, std::int64_t) const { return i % (kAsked<T> / kPair) == 0; }
    HWY_INLINE void prefetch(std::int64_t i, int, std::int64_t d) {
      if constexpr (kLevel == 2) ask_near(rows, i, to_rows + d);
      if (++calls < kCalls * blocks) return;
      calls = 0;
      HELIX_UNROLL for (int byte = 0; byte < kBytes; byte += 64) {
        __builtin_prefetch(*cursor.row + cursor.to_rows + cursor.column, 0, kLevel);
        cursor.column += 64 / static_cast<std::int64_t>(sizeof(T));
        if (cursor.column >= cursor.width) next_row();
      }
    }
    HWY_INLINE void next_row() {
      cursor.column = 0;
      if (++cursor.row != cursor.end) return;
      straight->next();
      cursor = straight->cursor_;
    }
  };

  /// The first rows of the first tile, one head's tile of them, are not prefetched: the wait for them comes
  /// only once.
  HWY_INLINE void begin_tile(const DirectTile<T>& tile) {
    const State& s = tile.heads.first;
    num_heads_ = tile.heads.count;
    const std::int64_t to_values = tile.to_values(0);
    const std::int64_t to_next_values = num_heads_ > 1 ? tile.to_values(1) - to_values : 0;
    passes_[0] = {tile.read, tile.count, tile.read_run, 0, tile.to_next_head(), s.d};
    passes_[1] = {tile.read, tile.count, tile.count, to_values, to_next_values, s.dv};
    passes_[2] = {tile.next, tile.next_count, tile.read_run, 0, tile.to_next_head(), s.d};
    passes_[3] = {tile.next, tile.next_count, tile.next_count, to_values, to_next_values, s.dv};
    if (pass_ >= 2) {
      pass_ -= 2;  // what was the next tile
      return;
    }
    // The first tile, or reads of the last one asked for fewer rows than they read.
    pass_ = head_ = 0;
    begin_ = 0;
    for (std::int64_t rows = 0; rows < kDirectTile; rows += tile.read_run) next();
  }
  template <int R>
  HWY_INLINE Rows<R> keys(const DirectTile<T>& tile, const HeadRun& run) {
    return {tile.read + run.begin, tile.to_keys(run.head), tile.num_blocks, this};
  }
  template <int R>
  HWY_INLINE Rows<R> values(const DirectTile<T>& tile, const HeadRun& run) {
    return {tile.place + run.begin, tile.to_values(run.head), tile.num_blocks, this};
  }
  template <int R>
  HWY_INLINE void end(const Rows<R>& rows) {
    cursor_ = rows.cursor;
  }

 private:
  /// Rows of all heads, a run of each in turn.
  struct Pass {
    const T* const* rows = nullptr;  ///< key rows of the task's first head
    std::int64_t count = 0;
    std::int64_t run = 0;
    std::int64_t to_rows = 0;       ///< elements from those to the first head's rows
    std::int64_t to_next_head = 0;  ///< elements from a head's rows to the next one's
    std::int64_t width = 0;
  };

  /// Moves to the run that is read next. Stays at the last one of the last pass.
  HWY_NOINLINE void next() {
    const Pass* pass = &passes_[pass_];
    if (head_ + 1 < num_heads_) {
      ++head_;
    } else if (begin_ + pass->run < pass->count) {
      begin_ += pass->run;
      head_ = 0;
    } else if (pass_ + 1 < kPasses) {
      pass = &passes_[++pass_];
      begin_ = 0;
      head_ = 0;
    }
    cursor_ = {.row = pass->rows + begin_,
               .end = pass->rows + std::min(begin_ + pass->run, pass->count),
               .to_rows = pass->to_rows + head_ * pass->to_next_head,
               .width = pass->width};
  }

  Cursor cursor_;
  static constexpr int kPasses = 4;
  Pass passes_[kPasses];  // keys and values of the tile, then of the next one
  int num_heads_ = 0;
  // Where cursor_ is: a pass, the first row of a run of it, and a head.
  int pass_ = 0;
  std::int64_t begin_ = 0;
  int head_ = 0;
};

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
