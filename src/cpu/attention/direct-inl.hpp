// SPDX-License-Identifier: Apache-2.0
// Attention of few query rows: stored rows are widened on the way into registers.
//
// Every stored row is read from memory once for all query rows. A block of R query rows multiplies kLanes / R
// keys at a time, so that every block has kLanes accumulators, each a partial dot product along the head
// dimension. One sum across vectors turns them into scores in [key][row] order. In that order the softmax has
// full vectors whatever R is, and the value product finds a key's R weights side by side. V is prefetched
// while K is multiplied, and the next K while V is. Several KV heads may share a task: their rows of a page
// lie one after the other. Compiled once a Highway target, hence the toggled guard.
#if defined(HELIX_SRC_CPU_ATTENTION_DIRECT_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_ATTENTION_DIRECT_INL_HPP_
#undef HELIX_SRC_CPU_ATTENTION_DIRECT_INL_HPP_
#else
#define HELIX_SRC_CPU_ATTENTION_DIRECT_INL_HPP_
#endif

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <type_traits>
#include <utility>

#include <hwy/highway.h>

#include "cpu/attention/ahead-inl.hpp"
#include "cpu/attention/key_pairs-inl.hpp"
#include "cpu/attention/product-inl.hpp"
#include "cpu/attention/softmax-inl.hpp"
#include "cpu/attention/state-inl.hpp"
#include "cpu/dots-inl.hpp"
#include "cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

/// Adds all columns of a block's weighted values, as many pairs at once as fill kLanes accumulators.
template <int R, int C, Sums kSums, class Rows>
HWY_INLINE void value_columns(Rows& values, std::int64_t count, const float* weights, int valid,
                              const float* correction, float* acc, std::int64_t acc_stride,
                              std::int64_t column) {
  for (; column + C * kPair <= acc_stride; column += C * kPair) {
    product<R, C, R, 1, kSums>(values, count, weights, valid, correction, acc + column, acc_stride, column);
  }
  if constexpr (C > 1) {
    value_columns<R, C / 2, kSums>(values, count, weights, valid, correction, acc, acc_stride, column);
  }
}

template <class T, int R, class Rows>
HWY_NOINLINE void direct_scores(Rows& keys, std::int64_t count, const State& s, const float* q,
                                float* scores) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  if constexpr (std::is_same_v<T, bf16> && R == kMaxRows) {
    if (s.task.variant.is_narrow) return dot_keys_256(keys, count, q, s.d, scores);
    return dot_key_pairs(keys, count, q, s.d, scores);
  }
#endif
  dot_block<R, false>(keys, count, q, s.d, scores);
}

/// direct_values() of a whole tile that takes a few value rows at a time through all groups of columns, so
/// that all groups but the first find them in L1. Gives the same bits.
template <int R, class Rows>
HWY_NOINLINE void short_passes(const State& s, const Block& block, Rows& values, std::int64_t count) {
  float* const sums = s.keys;  // direct() has no other use for them
  std::fill_n(sums, R * s.dv, 0.0f);
  for (std::int64_t begin = 0; begin < count; begin += kShortPass) {
    value_columns<R, kMaxRows / R, Sums::go_on>(values, std::min(kShortPass, count - begin),
                                                block.scores + begin * R, R, nullptr, sums, s.dv, 0);
    values.advance(kShortPass);
  }
  for (int r = 0; r < block.valid; ++r) {
    float* const acc = s.acc + (block.row + r) * s.dv;
    const Vec correction = hn::Set(kF32, s.correction[block.row + r]);
    for (std::int64_t i = 0; i < s.dv; i += kLanes) {
      const Vec sum = hn::LoadU(kF32, sums + r * s.dv + i);
      hn::StoreU(hn::MulAdd(hn::LoadU(kF32, acc + i), correction, sum), kF32, acc + i);
    }
  }
}

template <int R, class Rows>
HWY_NOINLINE void direct_values(const State& s, const Block& block, Rows& values, std::int64_t begin,
                                std::int64_t count, bool is_whole) {
  if (s.task.variant.has_short_passes && is_whole && s.dv > kMaxRows / R * kPair && R * s.dv <= kSumFloats)
    return short_passes<R>(s, block, values, count);
  // The first part of a tile rescales the sums. Later parts rescale them by 1, which only adds, with half the
  // code.
  static constexpr float kOnes[] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
  static_assert(kMaxRows <= std::size(kOnes));
  const float* correction = begin == 0 ? s.correction + block.row : kOnes;
  value_columns<R, kMaxRows / R, Sums::shrink>(values, count, block.scores + begin * R, block.valid,
                                               correction, s.acc + block.row * s.dv, s.dv, 0);
}

/// Calls `call` with the compile-time R of block_rows(). A macro, because a lambda would not inherit the
/// target's instructions in every compiler.
#ifndef HELIX_WITH_ROWS
#define HELIX_WITH_ROWS(rows, call)           \
  switch (rows) {                             \
    case 1: {                                 \
      constexpr int R = 1;                    \
      call;                                   \
    } break;                                  \
    case 2: {                                 \
      constexpr int R = 2;                    \
      call;                                   \
    } break;                                  \
    case 4: {                                 \
      constexpr int R = kMaxRows < 4 ? 1 : 4; \
      call;                                   \
    } break;                                  \
    default: {                                \
      constexpr int R = kMaxRows;             \
      call;                                   \
    } break;                                  \
  }
#endif

/// Packs query rows [first_row, + num_rows) into blocks, with zero rows to the end of the last one.
template <class T>
HWY_NOINLINE void pack_queries(const State& s, std::int64_t first_row, std::int64_t num_rows) {
  const AttentionTask& task = s.task;
  int rows = 0;
  for (std::int64_t begin = 0; begin < num_rows; begin += rows) {
    rows = block_rows(num_rows - begin);
    float* block = s.q + begin * s.d;
    if (begin + rows > num_rows) std::fill_n(block, rows * s.d, 0.0f);
    for (std::int64_t row = begin; row < std::min(begin + rows, num_rows); ++row) {
      const std::int64_t t = (first_row + row) / task.group;
      const std::int64_t g = (first_row + row) % task.group;
      load_pair_order<T>(task.q + t * task.q_token_stride + g * task.q_head_stride, task.head_dim,
                         task.key_scale * kLog2E * kDecodeFactor<T>, block + (row - begin) * kPair,
                         rows * kPair);
    }
  }
}

/// The block that starts `offset` rows into the rows [first_row, + num_rows).
HWY_INLINE Block block_at(const State& s, std::int64_t first_row, std::int64_t num_rows, std::int64_t offset,
                          int rows, float* scores) {
  return {first_row + offset, static_cast<int>(std::min<std::int64_t>(rows, num_rows - offset)),
          s.q + offset * s.d, scores + offset * kDirectTile};
}

/// A tile of direct(), which all of its heads share.
template <class T>
struct DirectTile {
  const AttentionTask* first_head;
  std::int64_t first_row;  ///< first row of each head
  std::int64_t num_rows;
  int num_blocks;           ///< blocks of those rows
  std::int64_t streams;     ///< runs of keys that sums take in turn
  std::int64_t read_run;    ///< keys of a head that are read before the next head's
  std::int64_t value_tile;  ///< values that blocks of rows share
  std::int64_t to_head;     ///< elements from one head's rows to the next one's
  std::int64_t to_values;   ///< elements from a row of keys to that of the token's values
  std::int64_t count = 0;
  const T* const* read = nullptr;   ///< the first head's key rows as they are read
  const T* const* place = nullptr;  ///< the same rows in the order of the sums
  bool is_permuted = false;         ///< whether those two differ
};

/// State of the ways to prefetch; each uses its own.
template <class T>
struct Asked {
  NextKeys<T> next_keys;
  Course<T> course;
  Behind<T> behind;
};

template <class T>
HWY_INLINE AlongRows<T> along_rows(const T* const* rows, std::int64_t to_rows, std::int64_t count,
                                   std::int64_t width, const Behind<T>& behind) {
  const std::int64_t row_bytes = width * static_cast<std::int64_t>(sizeof(T));
  return {rows, to_rows, count, std::max(kAlongBytes / row_bytes, std::int64_t{1}), behind};
}

HWY_INLINE int blocks_of(std::int64_t num_rows) {
  int blocks = 0;
  for (std::int64_t row = 0; row < num_rows; row += block_rows(num_rows - row)) ++blocks;
  return blocks;
}

/// Computes the scores of R rows of a head with `count` of its keys, from the tile's `begin` on.
template <class T, Prefetch kPrefetch, int R>
HWY_INLINE void score_block(const State& s, const DirectTile<T>& tile, Asked<T>& asked, std::int64_t begin,
                            std::int64_t count, const float* q, float* scores) {
  const std::int64_t to_keys = elements_between<T>(tile.first_head->keys, s.task.keys);
  if constexpr (kPrefetch == Prefetch::none) {
    PlainRows<T> keys{tile.read + begin, to_keys};
    direct_scores<T, R>(keys, count, s, q, scores);
  } else if constexpr (kPrefetch == Prefetch::across) {
    KeyRows<T> keys{tile.read + begin, to_keys, elements_between<T>(tile.first_head->keys, s.task.values)};
    direct_scores<T, R>(keys, count, s, q, scores);
  } else if constexpr (kPrefetch == Prefetch::along) {
    AlongRows<T> keys = along_rows<T>(tile.read + begin, to_keys, count, s.d, asked.behind);
    direct_scores<T, R>(keys, count, s, q, scores);
  } else {
    CourseRows<T, R> keys{tile.read + begin, to_keys, tile.num_blocks, &asked.course};
    direct_scores<T, R>(keys, count, s, q, scores);
    asked.course.place = keys.place;
  }
}

/// Adds values [begin, begin + count) of the tile, of one head, to the sums of one block, weighted.
template <class T, Prefetch kPrefetch, int R>
HWY_INLINE void add_block(const State& s, const DirectTile<T>& tile, Asked<T>& asked, std::int64_t begin,
                          std::int64_t count, const Block& block) {
  const T* const* rows = tile.place + begin;
  const std::int64_t to_values = elements_between<T>(tile.first_head->keys, s.task.values);
  const bool is_whole = count == tile.count;
  if constexpr (kPrefetch == Prefetch::none) {
    PlainRows<T> values{rows, to_values};
    direct_values<R>(s, block, values, begin, count, is_whole);
  } else if constexpr (kPrefetch == Prefetch::across) {
    ValueRows<T> values{rows, to_values, asked.next_keys};
    direct_values<R>(s, block, values, begin, count, is_whole);
    asked.next_keys = values.next;
  } else if constexpr (kPrefetch == Prefetch::along) {
    AlongRows<T> values = along_rows<T>(rows, to_values, tile.count - begin, s.dv, asked.behind);
    direct_values<R>(s, block, values, begin, count, is_whole);
  } else {
    CourseRows<T, R> values{rows, to_values, tile.num_blocks, &asked.course};
    direct_values<R>(s, block, values, begin, count, is_whole);
    asked.course.place = values.place;
  }
}

/// Computes the scores of all heads' rows with a tile's keys.
template <class T, Prefetch kPrefetch>
HWY_NOINLINE void score_tile(const Heads& heads, const DirectTile<T>& tile, Asked<T>& asked) {
  for (std::int64_t begin = 0; begin < tile.count; begin += tile.read_run) {
    const std::int64_t count = std::min(tile.read_run, tile.count - begin);
    for (int head = 0; head < heads.count; ++head) {
      const State s = heads[head];
      if constexpr (kPrefetch == Prefetch::along) {
        if (head + 1 < heads.count) {
          asked.behind = {tile.read + begin, count, (head + 1) * tile.to_head};
        } else if (begin + count < tile.count) {
          asked.behind = {tile.read + begin + count, tile.count - begin - count, 0};
        } else {
          asked.behind = {tile.place, tile.count, tile.to_values};
        }
      }
      int rows = 0;
      for (std::int64_t row = 0; row < tile.num_rows; row += rows) {
        rows = block_rows(tile.num_rows - row);
        const float* q = s.q + row * s.d;
        float* scores = s.read_scores + row * kDirectTile + begin * rows;
        HELIX_WITH_ROWS(rows, (score_block<T, kPrefetch, R>(s, tile, asked, begin, count, q, scores)))
      }
    }
  }
}

/// Turns the scores of one head into weights, and adds its weighted values.
template <class T, Prefetch kPrefetch>
HWY_NOINLINE void add_tile(const State& s, const DirectTile<T>& tile, Asked<T>& asked) {
  float* scores = tile.is_permuted ? s.scores : s.read_scores;
  int rows = 0;
  for (std::int64_t row = 0; row < tile.num_rows; row += rows) {
    rows = block_rows(tile.num_rows - row);
    const Block block = block_at(s, tile.first_row, tile.num_rows, row, rows, scores);
    if (tile.is_permuted) {
      const float* read = s.read_scores + row * kDirectTile;
      HELIX_WITH_ROWS(rows, (interleave_scores<R>(read, tile.streams, block.scores)))
    }
    HELIX_WITH_ROWS(rows, (softmax_block<R>(s, block, tile.count)))
  }
  for (std::int64_t part = 0; part < tile.count; part += tile.value_tile) {
    const std::int64_t count = std::min(tile.value_tile, tile.count - part);
    for (std::int64_t row = 0; row < tile.num_rows; row += rows) {
      rows = block_rows(tile.num_rows - row);
      const Block block = block_at(s, tile.first_row, tile.num_rows, row, rows, scores);
      HELIX_WITH_ROWS(rows, (add_block<T, kPrefetch, R>(s, tile, asked, part, count, block)))
    }
  }
}

/// Attends with the same rows of several heads to the keys of `range`.
template <class T, Prefetch kPrefetch>
HWY_NOINLINE void direct(const Heads& heads, std::int64_t first_row, std::int64_t num_rows,
                         TokenRange range) {
  const AttentionTask& task = heads.tasks[0];
  const AttentionVariant& variant = task.variant;
  DirectTile<T> tile;
  tile.first_head = &task;
  tile.first_row = first_row;
  tile.num_rows = num_rows;
  tile.num_blocks = blocks_of(num_rows);
  // 4 streams beat 8 by 3 % with 8 rows, 8 beat 4 by 2 % with one (interleaved, Xeon).
  tile.streams = num_rows > 1 ? 4 : 8;
  tile.read_run = variant.is_interleaved ? kDirectTile : kReadRun;
  // With one block every V row is read once: none need stay in L1, and the sums leave registers once a tile.
  tile.value_tile = num_rows <= kMaxRows ? kDirectTile : kValueTile;
  const std::int64_t read_streams = variant.is_interleaved ? tile.streams : 1;
  const void** read = heads.first.key_rows;
  const void** next_read = heads.first.next_key_rows;
  const void** place = heads.first.value_rows;
  tile.to_head = heads.count > 1 ? elements_between<T>(task.keys, heads.tasks[1].keys) : std::int64_t{0};
  tile.to_values = elements_between<T>(task.keys, task.values);
  Asked<T> asked{{}, {tile.to_head, heads.count}, {}};
  tile.count = std::min(kDirectTile, range.size());
  find_interleaved_keys(task, range.begin, tile.count, read_streams, read);
  for (std::int64_t begin = range.begin; begin < range.end; begin += kDirectTile) {
    const std::int64_t next_count = std::min(kDirectTile, range.end - begin - tile.count);
    if (next_count > 0) {
      find_interleaved_keys(task, begin + tile.count, next_count, read_streams, next_read);
    }
    tile.is_permuted = !variant.is_interleaved && tile.count == kDirectTile;
    tile.read = reinterpret_cast<const T* const*>(read);
    tile.place = tile.read;
    if (tile.is_permuted) {
      find_interleaved_keys(task, begin, tile.count, tile.streams, place);
      tile.place = reinterpret_cast<const T* const*>(place);
    }
    // After the last tile the next keys are those of this tile: prefetching them again is harmless.
    const auto* next_rows = reinterpret_cast<const T* const*>(next_count > 0 ? next_read : read);
    const std::int64_t next_rows_count = std::max<std::int64_t>(next_count, 1);
    if constexpr (kPrefetch == Prefetch::across) {
      asked.next_keys = {.row = next_rows,
                         .run_end = next_rows + std::min(tile.read_run, next_rows_count),
                         .width = heads.first.d,
                         .run_begin = next_rows,
                         .end = next_rows + next_rows_count,
                         .run = tile.read_run,
                         .head_elements = tile.to_head,
                         .num_heads = heads.count};
    } else if constexpr (kPrefetch == Prefetch::straight) {
      asked.course.begin({tile.read, tile.count, 0, heads.first.d},
                         {tile.place, tile.count, tile.to_values, heads.first.dv},
                         {next_rows, next_rows_count, 0, heads.first.d});
    }
    score_tile<T, kPrefetch>(heads, tile, asked);
    for (int head = 0; head < heads.count; ++head) {
      if constexpr (kPrefetch == Prefetch::along) {
        if (head + 1 < heads.count) {
          asked.behind = {tile.place, tile.count, tile.to_values + (head + 1) * tile.to_head};
        } else {
          asked.behind = {next_rows, next_rows_count, 0};
        }
      }
      add_tile<T, kPrefetch>(heads[head], tile, asked);
    }
    std::swap(read, next_read);
    tile.count = next_count;
  }
}

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
