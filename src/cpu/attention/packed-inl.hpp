// SPDX-License-Identifier: Apache-2.0
// Attention of many rows in f32 vectors: a tile of keys is widened once into scratch, K transposed, and both
// products run as register-blocked matrix products out of L1. (Dot products of widened rows, without the
// transpose, took 8 times the traffic from L2 and reached 60 % of the peak in place of 75.) Compiled once a
// Highway target, hence the toggled guard.
#if defined(HELIX_SRC_CPU_ATTENTION_PACKED_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_ATTENTION_PACKED_INL_HPP_
#undef HELIX_SRC_CPU_ATTENTION_PACKED_INL_HPP_
#else
#define HELIX_SRC_CPU_ATTENTION_PACKED_INL_HPP_
#endif

#include <algorithm>
#include <cstdint>

#include <hwy/highway.h>

#include "cpu/attention/product-inl.hpp"
#include "cpu/attention/softmax-inl.hpp"
#include "cpu/attention/state-inl.hpp"
#include "cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

/// Widens `count` rows: keys transposed, [panel of kPair keys][d][kPair], values in panels of columns,
/// [panel of kPair columns][key][kPair], so that both products walk a panel front to back.
template <class T>
HWY_NOINLINE void widen_tile(const State& s, std::int64_t count) {
  const std::int64_t d = s.task.head_dim;
  const std::int64_t dv = s.task.value_dim;
  const auto* key_rows = reinterpret_cast<const T* const*>(s.key_rows);
  for (std::int64_t key = 0; key < round_up(count, kPair); key += kLanes) {
    float* to = s.keys + key / kPair * s.d * kPair + key % kPair;
    for (std::int64_t i = 0; i < d; i += kPair)
      transpose_pairs(key_rows + key, i, d - i, to + i * kPair, kPair);
  }
  for (std::int64_t key = 0; key < count; ++key) {
    const T* from = static_cast<const T*>(s.value_rows[key]);
    float* to = s.values + key * kPair;
    for (std::int64_t i = 0; i < dv; i += kPair, to += kPackedTile * kPair) {
      const Pair x = i + kPair <= dv ? load_pair(from + i) : load_pair_tail(from + i, dv - i);
      hn::StoreU(x.a, kF32, to);
      hn::StoreU(x.b, kF32, to + kLanes);
    }
  }
}

/// Asks for rows [begin, end) of the next tile: the products take so long that no hardware prefetch would.
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

/// Up to kPackedRows rows against the keys of `range`. q is [block][d][kMaxRows], scores are
/// [row][kPackedTile].
template <class T>
HWY_NOINLINE void packed(const State& s, std::int64_t first_row, std::int64_t num_rows, TokenRange range) {
  find_rows(s, range.begin, std::min(kPackedTile, range.size()));
  const std::int64_t padded_rows = round_up(num_rows, kMaxRows);
  for (std::int64_t begin = range.begin; begin < range.end; begin += kPackedTile) {
    const std::int64_t count = std::min(kPackedTile, range.end - begin);
    widen_tile<T>(s, count);
    const std::int64_t next_count = std::min(kPackedTile, range.end - begin - count);
    if (next_count > 0) find_rows(s, begin + count, next_count);
    for (std::int64_t key = 0; key < count; key += kPair) {
      for (std::int64_t depth = 0; depth < s.d; depth += kDepth) {
        const std::int64_t part = std::min(kDepth, s.d - depth);
        Panel keys{s.keys + key * s.d + depth * kPair};
        for (std::int64_t row = 0; row < padded_rows; row += kMaxRows) {
          const float* q = s.q + row * s.d + depth * kMaxRows;
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
    for (std::int64_t column = 0; column < s.dv; column += kPair) {
      Panel values{s.values + column * kPackedTile};
      prefetch_rows(s, column * next_count / s.dv, (column + kPair) * next_count / s.dv);
      for (std::int64_t row = 0; row < num_rows; row += kMaxRows) {
        const int valid = static_cast<int>(std::min<std::int64_t>(kMaxRows, num_rows - row));
        product<kMaxRows, 1, 1, static_cast<int>(kPackedTile), Sums::shrink>(
            values, count, s.scores + row * kPackedTile, valid, s.correction + first_row + row,
            s.acc + (first_row + row) * s.dv + column, s.dv, 0);
      }
    }
  }
}

/// Query rows [first_row, + num_rows) as blocks [d][kMaxRows], zero rows to the end of the last one.
template <class T>
HWY_NOINLINE void pack_columns(const State& s, std::int64_t first_row, std::int64_t num_rows) {
  const AttentionTask& task = s.task;
  std::fill_n(s.q + num_rows / kMaxRows * kMaxRows * s.d, kMaxRows * s.d, 0.0f);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t t = (first_row + row) / task.group;
    const std::int64_t g = (first_row + row) % task.group;
    // The tile's place is free until the keys come.
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
