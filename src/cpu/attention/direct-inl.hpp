// SPDX-License-Identifier: Apache-2.0
// Attention of few query rows: stored rows are widened on the way into registers.
//
// Every stored row is read from memory once for all query rows. A block of R query rows multiplies kLanes / R
// keys at a time, so that every block has kLanes accumulators, each a partial dot product along the head
// dimension. One sum across vectors turns them into scores in [key][row] order. In that order the softmax has
// full vectors whatever R is, and the value product finds a key's R weights side by side. What is prefetched
// meanwhile, ahead-inl.hpp says. Several KV heads may share a task: their rows of a page lie one after the
// other. Compiled once a Highway target, hence the toggled guard.
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
  // Sums of 16 keys and a row of queries are more than registers hold: g++ spilled the keys (Zen 5: 10 %).
  constexpr int kKeys = R == 1 && kLanes == 16 ? 4 : kLanes / R;
  dot_block<R, false, kKeys>(keys, count, q, s.d, scores);
}

/// Adds a tile's sums of a block of R rows to those of the tiles before.
template <int R>
HWY_INLINE void add_sums(const State& s, const Block& block, const float* sums) {
  for (int r = 0; r < block.valid; ++r) {
    float* const acc = s.acc + (block.row + r) * s.dv;
    const Vec correction = hn::Set(kF32, s.correction[block.row + r]);
    for (std::int64_t i = 0; i < s.dv; i += kLanes) {
      const Vec sum = hn::LoadU(kF32, sums + r * s.dv + i);
      hn::StoreU(hn::MulAdd(hn::LoadU(kF32, acc + i), correction, sum), kF32, acc + i);
    }
  }
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
  add_sums<R>(s, block, sums);
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

HWY_INLINE int blocks_of(std::int64_t num_rows) {
  int blocks = 0;
  for (std::int64_t row = 0; row < num_rows; row += block_rows(num_rows - row)) ++blocks;
  return blocks;
}

/// Computes the scores of R rows of a head with a run of its keys.
template <class T, int R, class Prefetcher>
HWY_INLINE void score_block(const State& s, const DirectTile<T>& tile, Prefetcher& prefetcher,
                            const HeadRun& run, const float* q, float* scores) {
  auto keys = prefetcher.template keys<R>(tile, run);
  direct_scores<T, R>(keys, run.count, s, q, scores);
  prefetcher.end(keys);
}

/// Adds a run of a head's values, weighted, to the sums of one block.
template <class T, int R, class Prefetcher>
HWY_INLINE void add_block(const State& s, const DirectTile<T>& tile, Prefetcher& prefetcher,
                          const HeadRun& run, const Block& block) {
  auto values = prefetcher.template values<R>(tile, run);
  direct_values<R>(s, block, values, run.begin, run.count, run.count == tile.count);
  prefetcher.end(values);
}

/// Computes the scores of all heads' rows with a tile's keys.
template <class T, class Prefetcher>
HWY_NOINLINE void score_tile(const DirectTile<T>& tile, Prefetcher& prefetcher) {
  for (std::int64_t begin = 0; begin < tile.count; begin += tile.read_run) {
    for (int head = 0; head < tile.heads.count; ++head) {
      const State s = tile.heads[head];
      const HeadRun run{head, begin, std::min(tile.read_run, tile.count - begin)};
      int rows = 0;
      for (std::int64_t row = 0; row < tile.num_rows; row += rows) {
        rows = block_rows(tile.num_rows - row);
        const float* q = s.q + row * s.d;
        float* scores = s.read_scores + row * kDirectTile + begin * rows;
        HELIX_WITH_ROWS(rows, (score_block<T, R>(s, tile, prefetcher, run, q, scores)))
      }
    }
  }
}

/// Turns the scores of one head into weights. Returns them.
template <class T>
HWY_NOINLINE float* weigh_tile(const DirectTile<T>& tile, const State& s) {
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
  return scores;
}

/// Turns the scores of one head into weights, and adds its weighted values.
template <class T, class Prefetcher>
HWY_NOINLINE void add_tile(const DirectTile<T>& tile, int head, Prefetcher& prefetcher) {
  const State s = tile.heads[head];
  float* const scores = weigh_tile(tile, s);
  int rows = 0;
  for (std::int64_t begin = 0; begin < tile.count; begin += tile.value_tile) {
    const HeadRun run{head, begin, std::min(tile.value_tile, tile.count - begin)};
    for (std::int64_t row = 0; row < tile.num_rows; row += rows) {
      rows = block_rows(tile.num_rows - row);
      const Block block = block_at(s, tile.first_row, tile.num_rows, row, rows, scores);
      HELIX_WITH_ROWS(rows, (add_block<T, R>(s, tile, prefetcher, run, block)))
    }
  }
}

/// Adds a run of a head's values, weighted, to the tile's sums of one block. The last run adds these to the
/// sums of the tiles before.
template <class T, int R, class Prefetcher>
HWY_INLINE void add_stored_block(const State& s, const DirectTile<T>& tile, Prefetcher& prefetcher,
                                 const HeadRun& run, const Block& block, float* sums) {
  if (run.begin == 0) std::fill_n(sums, R * s.dv, 0.0f);
  auto values = prefetcher.template values<R>(tile, run);
  value_columns<R, kMaxRows / R, Sums::go_on>(values, run.count, block.scores + run.begin * R, R, nullptr,
                                              sums, s.dv, 0);
  prefetcher.end(values);
  if (run.begin + run.count == tile.count) add_sums<R>(s, block, sums);
}

/// add_tile() of all heads, one block of rows each, that reads values as they lie: a page of one head and
/// then that page of the next. Gives the same bits.
template <class T, class Prefetcher>
HWY_NOINLINE void add_stored_tile(const DirectTile<T>& tile, Prefetcher& prefetcher) {
  for (int head = 0; head < tile.heads.count; ++head) weigh_tile(tile, tile.heads[head]);
  for (std::int64_t begin = 0; begin < tile.count; begin += kReadRun) {
    for (int head = 0; head < tile.heads.count; ++head) {
      const State s = tile.heads[head];
      const HeadRun run{head, begin, std::min(kReadRun, tile.count - begin)};
      const int rows = block_rows(tile.num_rows);
      const Block block = block_at(s, tile.first_row, tile.num_rows, 0, rows, s.read_scores);
      float* sums = s.keys + head * rows * s.dv;  // direct() has no other use for them
      HELIX_WITH_ROWS(rows, (add_stored_block<T, R>(s, tile, prefetcher, run, block, sums)))
    }
  }
}

/// Runs that the sums of a whole tile take in turn. 4 beat 8 by 3 % with 8 rows, 8 beat 4 by 2 % with one
/// (interleaved, Xeon).
HWY_INLINE std::int64_t streams_of(SumOrder order, std::int64_t num_rows) {
  if (order == SumOrder::in_order) return 1;
  return num_rows > 1 ? 4 : 8;
}

/// Attends with the same rows of several heads to the keys of `range`.
template <class T, class Prefetcher>
HWY_NOINLINE void direct(const Heads& heads, std::int64_t first_row, std::int64_t num_rows,
                         TokenRange range) {
  const AttentionTask& task = heads.tasks[0];
  const AttentionVariant& variant = task.variant;
  DirectTile<T> tile{.heads = heads,
                     .first_row = first_row,
                     .num_rows = num_rows,
                     .num_blocks = blocks_of(num_rows),
                     .streams = streams_of(task.sum_order, num_rows),
                     .read_run = variant.follows_sums ? kDirectTile : kReadRun,
                     // With one block every V row is read once: none need stay in L1, and the sums leave
                     // registers once a tile.
                     .value_tile = num_rows <= kMaxRows ? kDirectTile : kValueTile};
  Prefetcher prefetcher;
  const bool keeps_sums =
      num_rows <= kMaxRows && heads.count * block_rows(num_rows) * heads.first.dv <= kSumFloats;
  const std::int64_t read_streams = variant.follows_sums ? tile.streams : 1;
  const void** read = heads.first.key_rows;
  const void** next_read = heads.first.next_key_rows;
  const void** place = heads.first.value_rows;
  tile.count = std::min(kDirectTile, range.size());
  find_interleaved_keys(task, range.begin, tile.count, read_streams, read);
  for (std::int64_t begin = range.begin; begin < range.end; begin += kDirectTile) {
    const std::int64_t next_count = std::min(kDirectTile, range.end - begin - tile.count);
    if (next_count > 0) {
      find_interleaved_keys(task, begin + tile.count, next_count, read_streams, next_read);
    }
    tile.is_permuted = read_streams != tile.streams && tile.count == kDirectTile;
    tile.read = reinterpret_cast<const T* const*>(read);
    tile.place = tile.read;
    if (tile.is_permuted) {
      find_interleaved_keys(task, begin, tile.count, tile.streams, place);
      tile.place = reinterpret_cast<const T* const*>(place);
    }
    // After the last tile the next keys are those of this tile: prefetching them again is harmless.
    tile.next = reinterpret_cast<const T* const*>(next_count > 0 ? next_read : read);
    tile.next_count = std::max<std::int64_t>(next_count, 1);
    prefetcher.begin_tile(tile);
    score_tile(tile, prefetcher);
    if (variant.has_stored_values && keeps_sums && !tile.is_permuted) {
      add_stored_tile(tile, prefetcher);
    } else {
      for (int head = 0; head < heads.count; ++head) add_tile(tile, head, prefetcher);
    }
    std::swap(read, next_read);
    tile.count = next_count;
  }
}

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
