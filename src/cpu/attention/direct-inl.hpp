// SPDX-License-Identifier: Apache-2.0
// Attention of few rows: stored rows are widened on the way into registers.
//
// Every stored row comes from memory once for all query rows. A block of R rows meets kLanes / R keys at a
// time, so that every block has kLanes accumulators, each a partial dot product along the head dimension; one
// sum across vectors turns them into scores in [key][row] order. That order gives the softmax full vectors
// whatever R is, and the value product its R weights of a key side by side. While K is multiplied V is
// prefetched, and the other way round. Compiled once a Highway target, hence the toggled guard.
#if defined(HELIX_SRC_CPU_ATTENTION_DIRECT_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_ATTENTION_DIRECT_INL_HPP_
#undef HELIX_SRC_CPU_ATTENTION_DIRECT_INL_HPP_
#else
#define HELIX_SRC_CPU_ATTENTION_DIRECT_INL_HPP_
#endif

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <hwy/highway.h>

#include "cpu/attention/product-inl.hpp"
#include "cpu/attention/softmax-inl.hpp"
#include "cpu/attention/state-inl.hpp"
#include "cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

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

/// Key rows of a tile. Reading a pair asks for the same one of the token's value in L2.
template <class T>
struct KeyRows {
  const T* const* rows;
  std::int64_t to_values;  ///< elements from a key to its value
  HWY_INLINE const T* operator[](std::int64_t i) const { return rows[i]; }
  HWY_INLINE void prefetch(std::int64_t i, int, std::int64_t d) const {
    prefetch_pair<3>(rows[i + kNear] + d);
    prefetch_pair<2>(rows[i] + to_values + d);
  }
};

/// Value rows. Reading a pair asks for one of the next tile's keys in L2, row by row whatever order the
/// columns are walked in: in that order, a whole tile took 20 % longer.
template <class T>
struct ValueRows {
  const T* const* keys;
  std::int64_t to_values;
  const T* const* next;  ///< the key to ask for
  const T* const* last_next;
  std::int64_t next_width;
  std::int64_t next_column = 0;
  HWY_INLINE const T* operator[](std::int64_t i) const { return keys[i] + to_values; }
  HWY_INLINE void prefetch(std::int64_t i, int, std::int64_t d) {
    prefetch_pair<3>(keys[i + kNear] + to_values + d);
    prefetch_pair<2>(*next + next_column);
    next_column += kPair;
    if (next_column == next_width) {
      next_column = 0;
      if (next != last_next) ++next;  // values wider than keys have gone further
    }
  }
};

/// All columns of a block, as many pairs at once as fill kLanes accumulators.
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

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
/// Eight floats in either half: of a load alone (hn::Combine costs an insertion).
HWY_INLINE Vec load_twice(const float* from) {
  Vec twice{_mm512_broadcast_f32x8(_mm256_loadu_ps(from))};
  pin(twice);
  return twice;
}

/// dot_block() of bf16 keys with kMaxRows queries, two keys to an accumulator, one in either half: that
/// halves the sums across vectors, a quarter of the operations, for an insertion each time keys are loaded.
/// Attention is 1.5 % faster where it reads memory, 6 % where it reads L2. `count` is in effect rounded up
/// to 4.
template <class Rows>
HWY_INLINE void dot_key_pairs(Rows rows, std::int64_t count, const float* x, std::int64_t length,
                              float* dots) {
  constexpr int R = kMaxRows;
  constexpr int kHalf = kLanes / 2;
  const hn::Repartition<std::uint16_t, F32> d16;
  const hn::Repartition<std::uint32_t, F32> d32;
  const hn::Half<decltype(d16)> half16;
  for (std::int64_t row = 0; row < count; row += 4) {
    Vec acc[2][R];
    HELIX_UNROLL for (int r = 0; r < R; ++r) acc[0][r] = acc[1][r] = hn::Zero(kF32);
    for (std::int64_t d = 0; d < length; d += kPair) {
      HELIX_UNROLL for (int part = 0; part < 2; ++part) {
        Pair w[2];
        HELIX_UNROLL for (int p = 0; p < 2; ++p) {
          const std::int64_t key = row + 2 * p;
          const std::int64_t from = d + part * kLanes;
          const auto words = hn::BitCast(d32, hn::Combine(d16, hn::LoadU(half16, &rows[key + 1][from].bits),
                                                          hn::LoadU(half16, &rows[key][from].bits)));
          w[p] = {hn::BitCast(kF32, hn::ShiftLeft<16>(words)),
                  hn::BitCast(kF32, hn::And(words, hn::Set(d32, 0xffff0000u)))};
          rows.prefetch(row + 2 * part + p, 4, d);
        }
        const float* q = x + d * R + part * kHalf;
        HELIX_UNROLL for (int r = 0; r < R; ++r) {
          const Vec a = load_twice(q + r * kPair);
          HELIX_UNROLL for (int p = 0; p < 2; ++p) acc[p][r] = hn::MulAdd(w[p].a, a, acc[p][r]);
        }
        HELIX_UNROLL for (int r = 0; r < R; ++r) {
          const Vec b = load_twice(q + r * kPair + kLanes);
          HELIX_UNROLL for (int p = 0; p < 2; ++p) acc[p][r] = hn::MulAdd(w[p].b, b, acc[p][r]);
        }
      }
    }
    HELIX_UNROLL for (int p = 0; p < 2; ++p) {
      const Vec lower = fold_block(acc[p][0], acc[p][1], acc[p][2], acc[p][3]);
      const Vec upper = fold_block(acc[p][4], acc[p][5], acc[p][6], acc[p][7]);
      hn::StoreU(
          hn::Add(hn::OddEvenBlocks(upper, lower), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(lower, upper))),
          kF32, dots + (row + 2 * p) * R);
    }
  }
}
#endif

/// Elements from a key row to the value row of the same token. The two may lie in different pools, which
/// pointers cannot be subtracted across.
template <class T>
HWY_INLINE std::int64_t key_to_value(const AttentionTask& task) {
  const auto keys = reinterpret_cast<std::intptr_t>(task.keys.first);
  const auto values = reinterpret_cast<std::intptr_t>(task.values.first);
  return static_cast<std::int64_t>(values - keys) / static_cast<std::int64_t>(sizeof(T));
}

template <class T, int R>
HWY_NOINLINE void direct_scores(const State& s, const Block& block, std::int64_t count) {
  const auto* rows = reinterpret_cast<const T* const*>(s.key_rows);
  const KeyRows<T> keys{rows, key_to_value<T>(s.task)};
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  if constexpr (std::is_same_v<T, bf16> && R == kMaxRows) {
    dot_key_pairs(keys, count, block.q, s.d, block.scores);
    return softmax_block<R>(s, block, count);
  }
#endif
  dot_block<R, false>(keys, count, block.q, s.d, block.scores);
  softmax_block<R>(s, block, count);
}

template <class T, int R>
HWY_NOINLINE void direct_values(const State& s, const Block& block, std::int64_t begin, std::int64_t count) {
  const auto* rows = reinterpret_cast<const T* const*>(s.key_rows) + begin;
  const auto* next = reinterpret_cast<const T* const*>(s.next_key_rows) + begin;
  ValueRows<T> values{rows, key_to_value<T>(s.task), next, next + count - 1, s.d};
  const float* weights = block.scores + begin * R;
  float* acc = s.acc + block.row * s.dv;
  if (begin == 0) {
    value_columns<R, kMaxRows / R, Sums::shrink>(values, count, weights, block.valid,
                                                 s.correction + block.row, acc, s.dv, 0);
  } else {
    value_columns<R, kMaxRows / R, Sums::add>(values, count, weights, block.valid, nullptr, acc, s.dv, 0);
  }
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

/// Query rows [first_row, + num_rows) as blocks, zero rows to the end of the last one.
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

/// The block that starts `offset` rows into the rows [first_row, + num_rows), with scores of `tile` keys.
HWY_INLINE Block block_at(const State& s, std::int64_t first_row, std::int64_t num_rows, std::int64_t offset,
                          int rows, std::int64_t tile) {
  return {first_row + offset, static_cast<int>(std::min<std::int64_t>(rows, num_rows - offset)),
          s.q + offset * s.d, s.scores + offset * tile};
}

template <class T>
HWY_NOINLINE void direct(State s, std::int64_t first_row, std::int64_t num_rows, TokenRange range) {
  // 4 streams beat 8 by 3 % with 8 rows, 8 beat 4 by 2 % with one.
  const std::int64_t streams = num_rows > 1 ? 4 : 8;
  // One block reads every V row once: nothing of it need stay in L1, and the sums leave registers once a
  // tile.
  const std::int64_t value_tile = num_rows <= kMaxRows ? kDirectTile : kValueTile;
  std::int64_t count = std::min(kDirectTile, range.size());
  find_interleaved_keys(s.task, range.begin, count, streams, s.key_rows);
  for (std::int64_t begin = range.begin; begin < range.end; begin += kDirectTile) {
    // Past the last tile the "next" keys are this tile's own: asking for them again is harmless.
    const std::int64_t next_count = std::min(kDirectTile, range.end - begin - count);
    if (next_count > 0) find_interleaved_keys(s.task, begin + count, next_count, streams, s.next_key_rows);
    for (std::int64_t i = std::max<std::int64_t>(next_count, 0); i < count; ++i) {
      s.next_key_rows[i] = s.key_rows[0];
    }
    int rows = 0;
    for (std::int64_t row = 0; row < num_rows; row += rows) {
      rows = block_rows(num_rows - row);
      const Block block = block_at(s, first_row, num_rows, row, rows, kDirectTile);
      HELIX_WITH_ROWS(rows, (direct_scores<T, R>(s, block, count)))
    }
    for (std::int64_t part = 0; part < count; part += value_tile) {
      const std::int64_t part_count = std::min(value_tile, count - part);
      for (std::int64_t row = 0; row < num_rows; row += rows) {
        rows = block_rows(num_rows - row);
        const Block block = block_at(s, first_row, num_rows, row, rows, kDirectTile);
        HELIX_WITH_ROWS(rows, (direct_values<T, R>(s, block, part, part_count)))
      }
    }
    std::swap(s.key_rows, s.next_key_rows);
    if (next_count > 0) std::fill_n(s.key_rows + next_count, kPair, s.key_rows[next_count - 1]);
    count = next_count;
  }
}

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
