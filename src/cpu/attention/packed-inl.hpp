// SPDX-License-Identifier: Apache-2.0
// Attention of many query rows in f32 vectors. A tile's keys and values are widened once, a panel at a time,
// and K is transposed; both products run as register-blocked matrix products out of L1. (Dot products of
// widened rows, without the transpose, took 8 times the traffic from L2 and reached 60 % of the peak instead
// of 75 %.) Compiled once a Highway target, hence the toggled guard.
#if defined(HELIX_SRC_CPU_ATTENTION_PACKED_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_ATTENTION_PACKED_INL_HPP_
#undef HELIX_SRC_CPU_ATTENTION_PACKED_INL_HPP_
#else
#define HELIX_SRC_CPU_ATTENTION_PACKED_INL_HPP_
#endif

#include <algorithm>
#include <cstdint>
#include <utility>

#include <hwy/highway.h>

#include "cpu/attention/product-inl.hpp"
#include "cpu/attention/softmax-inl.hpp"
#include "cpu/attention/state-inl.hpp"
#include "cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

/// Widens columns [depth, + part) of kPair key rows into s.keys, transposed: [part][kPair].
template <class T>
HWY_NOINLINE void widen_keys(const State& s, std::int64_t key, std::int64_t depth, std::int64_t part) {
  const auto* rows = reinterpret_cast<const T* const*>(s.key_rows) + key;
  for (std::int64_t half = 0; half < kPair; half += kLanes) {
    for (std::int64_t i = 0; i < part; i += kPair) {
      transpose_pairs(rows + half, depth + i, s.task.head_dim - depth - i, s.keys + half + i * kPair, kPair);
    }
  }
}

/// Widens columns [column, + kPair) of `count` value rows into s.values: [key][kPair].
template <class T>
HWY_NOINLINE void widen_values(const State& s, std::int64_t count, std::int64_t column) {
  const std::int64_t rest = s.task.value_dim - column;
  float* to = s.values;
  for (std::int64_t key = 0; key < count; ++key, to += kPair) {
    const T* from = static_cast<const T*>(s.value_rows[key]) + column;
    const Pair x = rest >= kPair ? load_pair(from) : load_pair_tail(from, rest);
    hn::StoreU(x.a, kF32, to);
    hn::StoreU(x.b, kF32, to + kLanes);
  }
}

/// Prefetches rows [begin, end) of the next tile into L2: the products take so long that no hardware
/// prefetcher would.
HWY_NOINLINE void prefetch_rows(const State& s, std::int64_t begin, std::int64_t end) {
  if (s.task.is_split_latent()) return;  // joined rows are in the cache
  const bool has_values = !s.task.is_latent();
  const std::int64_t value_bytes = s.row_bytes / s.task.head_dim * s.task.value_dim;
  for (std::int64_t key = begin; key < end; ++key) {
    const auto* k = static_cast<const char*>(s.key_rows[key]);
    const auto* v = static_cast<const char*>(s.value_rows[key]);
    for (std::int64_t byte = 0; byte < s.row_bytes; byte += 64) __builtin_prefetch(k + byte, 0, 2);
    if (!has_values) continue;
    for (std::int64_t byte = 0; byte < value_bytes; byte += 64) __builtin_prefetch(v + byte, 0, 2);
  }
}

/// A panel that prefetches the next block of queries, which lies in L2: [d][kMaxRows].
struct AheadPanel {
  const float* first;
  const float* next;
  HWY_INLINE const float* operator[](std::int64_t i) const { return first + i * kPair; }
  HWY_INLINE bool asks_here(std::int64_t, std::int64_t) const { return true; }
  HWY_INLINE void prefetch(std::int64_t i, int, std::int64_t) const {
    __builtin_prefetch(next + i * kMaxRows);
  }
};

/// Prefetches columns [depth, + kDepth) of key rows [begin, end) into L1.
HWY_NOINLINE void prefetch_keys(const State& s, std::int64_t begin, std::int64_t end, std::int64_t depth) {
  const std::int64_t element = s.row_bytes / s.task.head_dim;
  const std::int64_t last = std::min(s.row_bytes, (depth + kDepth) * element);
  for (std::int64_t key = begin; key < end; ++key) {
    const auto* k = static_cast<const char*>(s.key_rows[key]);
    for (std::int64_t byte = depth * element; byte < last; byte += 64) __builtin_prefetch(k + byte, 0, 3);
  }
}

/// Attends with up to kPackedRows rows to the keys of `range`. q is [block][d][kMaxRows], scores are
/// [row][kPackedTile].
template <class T>
HWY_NOINLINE void packed(State s, std::int64_t first_row, std::int64_t num_rows, TokenRange range) {
  State next = s;
  std::swap(next.key_rows, next.next_key_rows);
  std::swap(next.value_rows, next.next_value_rows);
  find_rows(s, range.begin, std::min(kPackedTile, range.size()));
  const std::int64_t padded_rows = round_up(num_rows, kMaxRows);
  for (std::int64_t begin = range.begin; begin < range.end; begin += kPackedTile) {
    const std::int64_t count = std::min(kPackedTile, range.end - begin);
    const std::int64_t next_count = std::min(kPackedTile, range.end - begin - count);
    // Joined rows have one buffer only, so the next ones wait until this tile is done.
    if (next_count > 0 && !s.task.is_split_latent()) find_rows(next, begin + count, next_count);
    for (std::int64_t key = 0; key < count; key += kPair) {
      for (std::int64_t depth = 0; depth < s.d; depth += kDepth) {
        const std::int64_t part = std::min(kDepth, s.d - depth);
        widen_keys<T>(s, key, depth, part);
        for (std::int64_t row = 0; row < padded_rows; row += kMaxRows) {
          // Prefetches the keys of the next panel (MLA: 0.7 %).
          const bool is_last = depth + kDepth >= s.d;
          const std::int64_t next_key = is_last ? key + kPair : key;
          if (next_key < count) {
            prefetch_keys(s, next_key + row * kPair / padded_rows,
                          next_key + (row + kMaxRows) * kPair / padded_rows, is_last ? 0 : depth + kDepth);
          }
          const float* q = s.q + row * s.d + depth * kMaxRows;
          AheadPanel keys{s.keys, q + kMaxRows * s.d};
          float* scores = s.scores + row * kPackedTile + key;
          if (depth == 0) {
            product<kMaxRows, 1, kMaxRows, 1, Sums::replace>(keys, part, q, kMaxRows, nullptr, scores,
                                                             kPackedTile, 0);
          } else {
            product<kMaxRows, 1, kMaxRows, 1, Sums::add>(keys, part, q, kMaxRows, nullptr, scores,
                                                         kPackedTile, 0);
          }
        }
      }
    }
    for (std::int64_t row = 0; row < num_rows; ++row) {
      softmax_row(s, first_row + row, count, s.scores + row * kPackedTile);
    }
    const std::int64_t steps = s.dv / kPair * padded_rows / kMaxRows;
    std::int64_t step = 0;
    for (std::int64_t column = 0; column < s.dv; column += kPair) {
      widen_values<T>(s, count, column);
      Panel values{s.values};
      for (std::int64_t row = 0; row < num_rows; row += kMaxRows, ++step) {
        // A few rows at a time: prefetching the rows of a whole column at once held up the loads of the
        // product.
        prefetch_rows(next, step * next_count / steps, (step + 1) * next_count / steps);
        const int valid = static_cast<int>(std::min<std::int64_t>(kMaxRows, num_rows - row));
        product<kMaxRows, 1, 1, static_cast<int>(kPackedTile), Sums::shrink>(
            values, count, s.scores + row * kPackedTile, valid, s.correction + first_row + row,
            s.acc + (first_row + row) * s.dv + column, s.dv, 0);
      }
    }
    if (next_count > 0 && s.task.is_split_latent()) find_rows(next, begin + count, next_count);
    std::swap(s.key_rows, next.key_rows);
    std::swap(s.value_rows, next.value_rows);
  }
}

/// Packs query rows [first_row, + num_rows) into blocks [d][kMaxRows], with zero rows to the end of the last
/// one.
template <class T>
HWY_NOINLINE void pack_columns(const State& s, std::int64_t first_row, std::int64_t num_rows) {
  const AttentionTask& task = s.task;
  std::fill_n(s.q + num_rows / kMaxRows * kMaxRows * s.d, kMaxRows * s.d, 0.0f);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t t = (first_row + row) / task.group;
    const std::int64_t g = (first_row + row) % task.group;
    // s.keys is free until keys are widened into it.
    load_pair_order<T>(task.q + t * task.q_token_stride + g * task.q_head_stride, task.head_dim,
                       task.key_scale * kLog2E * kDecodeFactor<T>, s.keys, kPair);
    float* to = s.q + row / kMaxRows * kMaxRows * s.d + row % kMaxRows;
    for (std::int64_t d = 0; d < s.d; ++d) to[d * kMaxRows] = s.keys[d];
  }
}

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
