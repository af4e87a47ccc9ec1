// SPDX-License-Identifier: Apache-2.0
// Attention of many query rows over bf16 KV on AMX tile registers: keys are multiplied as they are, values
// are interleaved in pairs, queries and weights are split into bf16 terms (amx.hpp). MLA runs at 160 % of
// what f32 vectors could reach. Compiled once a Highway target, hence the toggled guard.
#if defined(HELIX_SRC_CPU_ATTENTION_AMX_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_ATTENTION_AMX_INL_HPP_
#undef HELIX_SRC_CPU_ATTENTION_AMX_INL_HPP_
#else
#define HELIX_SRC_CPU_ATTENTION_AMX_INL_HPP_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <hwy/highway.h>

#include "cpu/amx.hpp"
#include "cpu/attention/softmax-inl.hpp"
#include "cpu/attention/state-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3  // the softmax of 16 rows needs vectors of 16 lanes
/// Sizes and scratch of one tiled().
struct Tiles {
  std::int64_t first_row;  ///< First row of the task.
  std::int64_t num_rows;
  std::int64_t d;            ///< head_dim, padded to steps
  std::int64_t value_tiles;  ///< 16 columns each, an even number
  bf16* q;
  bf16* keys;
  bf16* values;
  bf16* weights;
  float* scores;

  HWY_INLINE Tiles(const State& s, std::int64_t first, std::int64_t rows)
      : first_row(first),
        num_rows(rows),
        d(round_up(s.task.head_dim, amx::kStep)),
        value_tiles(round_up(s.task.value_dim, amx::kStep) / amx::kRows) {
    const AmxLayout at(rows, s.task.head_dim, s.task.value_dim);
    q = reinterpret_cast<bf16*>(s.amx + at.q);
    keys = reinterpret_cast<bf16*>(s.amx + at.keys);
    values = reinterpret_cast<bf16*>(s.amx + at.values);
    weights = reinterpret_cast<bf16*>(s.amx + at.weights);
    scores = reinterpret_cast<float*>(s.amx + at.scores);
  }

  HWY_INLINE std::int64_t rows_from(std::int64_t block) const {
    return std::min(amx::kRows, num_rows - block);
  }
};

HWY_NOINLINE void split_queries(const State& s, const Tiles& t) {
  const AttentionTask& task = s.task;
  for (std::int64_t block = 0; block < t.num_rows; block += amx::kRows) {
    const std::int64_t valid = t.rows_from(block);
    for (std::int64_t r = 0; r < valid; ++r) {
      const std::int64_t row = t.first_row + block + r;
      std::copy_n(task.q + row / task.group * task.q_token_stride + row % task.group * task.q_head_stride,
                  task.head_dim, s.q + r * s.d);
    }
    amx::split_rows(s.q, s.d, valid, task.head_dim, task.key_scale * kLog2E, t.q + block * 3 * t.d);
  }
  if (t.d != task.head_dim) std::fill_n(t.keys, kAmxTile * t.d, bf16{});
}

/// Whether `rows` lie one after the other, `stride` bytes apart. Compares every row: with scattered small
/// pages the last row may lie in the right place although others do not.
HWY_INLINE bool lie_in_order(const void* const* rows, std::int64_t count, std::int64_t stride) {
  const auto* row = static_cast<const std::byte*>(rows[0]);
  for (std::int64_t i = 1; i < count; ++i) {
    row += stride;
    if (rows[i] != row) return false;
  }
  return true;
}

HWY_NOINLINE void tiled_scores(const State& s, const Tiles& t, std::int64_t count) {
  const AttentionTask& task = s.task;
  constexpr std::int64_t kKeys = amx::kMaxRows;
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(bf16));
  const std::int64_t row_stride = task.is_split_latent() ? s.row_bytes : task.keys.token_bytes;
  for (std::int64_t i = 0; i < count; i += kKeys) {
    const auto* first = static_cast<const std::byte*>(s.key_rows[i]);
    std::int64_t stride = row_stride;
    // Keys that lie one after the other, in a page or in several, need no copy.
    if (i + kKeys > count || t.d != task.head_dim || !lie_in_order(s.key_rows + i, kKeys, stride)) {
      for (std::int64_t k = i; k < i + kKeys; ++k)
        std::memcpy(t.keys + k * t.d, s.key_rows[k], static_cast<std::size_t>(s.row_bytes));
      first = reinterpret_cast<const std::byte*>(t.keys + i * t.d);
      stride = t.d * kBytes;
    }
    for (std::int64_t block = 0; block < t.num_rows; block += amx::kRows) {
      const std::int64_t rows = t.rows_from(block);
      amx::multiply_rows(first, stride, kKeys / amx::kRows, t.q + block * 3 * t.d, rows, t.d / amx::kStep,
                         t.scores + block * kAmxTile + i * amx::padded_rows(rows), false);
    }
  }
}

/// Turns scores into weights, split into bf16 terms.
HWY_NOINLINE void tiled_weights(const State& s, const Tiles& t, std::int64_t count, std::int64_t padded) {
  for (std::int64_t block = 0; block < t.num_rows; block += amx::kRows) {
    float* dots = t.scores + block * kAmxTile;
    const std::int64_t valid = t.rows_from(block);
    const std::int64_t width = amx::padded_rows(valid);
    const Block rows{t.first_row + block, static_cast<int>(valid), nullptr, dots};
    if (width == amx::kHalfRows) {
      softmax_block<amx::kHalfRows>(s, rows, count);
    } else {
      softmax_block<amx::kRows>(s, rows, count);
    }
    std::fill(dots + count * width, dots + padded * width, 0.0f);
    amx::split_columns(dots, valid, padded, t.weights + 3 * block * kAmxTile);
  }
}

HWY_NOINLINE void tiled_values(const State& s, const Tiles& t, std::int64_t padded) {
  for (std::int64_t i = 0; i < padded; i += amx::kStep) {
    amx::interleave_rows(reinterpret_cast<const bf16* const*>(s.value_rows) + i, s.task.value_dim,
                         t.values + i * t.value_tiles * amx::kRows);
  }
  for (std::int64_t column = 0; column < t.value_tiles; column += amx::kMaxTiles) {
    for (std::int64_t block = 0; block < t.num_rows; block += amx::kRows) {
      amx::multiply_columns(t.weights + 3 * block * kAmxTile, padded / amx::kStep,
                            t.values + column * amx::kRows * amx::kStep, t.value_tiles,
                            std::min(amx::kMaxTiles, t.value_tiles - column), t.rows_from(block),
                            s.correction + t.first_row + block,
                            s.acc + (t.first_row + block) * s.dv + column * amx::kRows, s.dv);
    }
  }
}

/// Attends with up to kPackedRows rows to the keys of `range`.
HWY_NOINLINE void tiled(const State& s, std::int64_t first_row, std::int64_t num_rows, TokenRange range) {
  const Tiles t(s, first_row, num_rows);
  split_queries(s, t);
  const amx::Session session;
  for (std::int64_t begin = range.begin; begin < range.end; begin += kAmxTile) {
    const std::int64_t count = std::min(kAmxTile, range.end - begin);
    const std::int64_t padded = round_up(count, amx::kStep);
    find_rows(s, begin, count);
    tiled_scores(s, t, count);
    tiled_weights(s, t, count, padded);
    tiled_values(s, t, padded);
  }
}
#endif

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
