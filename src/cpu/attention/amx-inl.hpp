// SPDX-License-Identifier: Apache-2.0
// Attention of many rows of bf16 on tile registers: keys as they are, values interleaved in pairs, queries
// and weights split into bf16 (amx.hpp). MLA runs at 160 % of what f32 vectors could reach. Compiled once a
// Highway target, hence the toggled guard.
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

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3  // the softmax of 16 rows takes vectors of 16 lanes
/// Both products on AMX tiles: keys as they are, values interleaved in pairs, queries and weights split into
/// bf16.
HWY_NOINLINE void tiled(const State& s, std::int64_t first_row, std::int64_t num_rows, TokenRange range) {
  const AttentionTask& task = s.task;
  const AmxLayout at(num_rows, task.head_dim, task.value_dim);
  auto* q = reinterpret_cast<bf16*>(s.amx + at.q);
  auto* keys = reinterpret_cast<bf16*>(s.amx + at.keys);
  auto* values = reinterpret_cast<bf16*>(s.amx + at.values);
  auto* weights = reinterpret_cast<bf16*>(s.amx + at.weights);
  auto* scores = reinterpret_cast<float*>(s.amx + at.scores);
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(bf16));
  const std::int64_t d = round_up(task.head_dim, amx::kStep);
  const std::int64_t steps = d / amx::kStep;
  const std::int64_t value_tiles = round_up(task.value_dim, amx::kStep) / amx::kRows;

  for (std::int64_t block = 0; block < num_rows; block += amx::kRows) {
    const std::int64_t valid = std::min(amx::kRows, num_rows - block);
    for (std::int64_t r = 0; r < valid; ++r) {
      const std::int64_t row = first_row + block + r;
      std::copy_n(task.q + row / task.group * task.q_token_stride + row % task.group * task.q_head_stride,
                  task.head_dim, s.q + r * s.d);
    }
    amx::split_rows(s.q, s.d, valid, task.head_dim, task.key_scale * kLog2E, q + block * 3 * d);
  }
  if (d != task.head_dim) std::fill_n(keys, kAmxTile * d, bf16{});

  const amx::Session session;
  for (std::int64_t begin = range.begin; begin < range.end; begin += kAmxTile) {
    const std::int64_t count = std::min(kAmxTile, range.end - begin);
    const std::int64_t padded = round_up(count, amx::kStep);
    find_rows(task, begin, count, s.key_rows, s.value_rows);
    constexpr std::int64_t kKeys = amx::kMaxRows;
    for (std::int64_t i = 0; i < padded; i += kKeys) {
      const auto* first = static_cast<const std::byte*>(s.key_rows[i]);
      std::int64_t stride = task.row_bytes;
      // Keys that lie one after the other, in a page or in two, need no copy.
      const bool in_place = i + kKeys <= count && d == task.head_dim &&
                            s.key_rows[i + kKeys - 1] == first + (kKeys - 1) * stride;
      if (!in_place) {
        for (std::int64_t k = i; k < i + kKeys; ++k)
          std::memcpy(keys + k * d, s.key_rows[k], static_cast<std::size_t>(task.head_dim * kBytes));
        first = reinterpret_cast<const std::byte*>(keys + i * d);
        stride = d * kBytes;
      }
      for (std::int64_t block = 0; block < num_rows; block += amx::kRows) {
        const std::int64_t rows = std::min(amx::kRows, num_rows - block);
        amx::multiply_rows(first, stride, kKeys / amx::kRows, q + block * 3 * d, rows, steps,
                           scores + block * kAmxTile + i * amx::padded_rows(rows), false);
      }
    }
    for (std::int64_t block = 0; block < num_rows; block += amx::kRows) {
      float* dots = scores + block * kAmxTile;
      const std::int64_t valid = std::min(amx::kRows, num_rows - block);
      const std::int64_t width = amx::padded_rows(valid);
      const Block rows{first_row + block, static_cast<int>(valid), nullptr, dots};
      if (width == amx::kHalfRows) {
        softmax_block<amx::kHalfRows>(s, rows, count);
      } else {
        softmax_block<amx::kRows>(s, rows, count);
      }
      std::fill(dots + count * width, dots + padded * width, 0.0f);
      amx::split_columns(dots, valid, padded, weights + 3 * block * kAmxTile);
    }
    for (std::int64_t i = 0; i < padded; i += amx::kStep) {
      amx::interleave_rows(reinterpret_cast<const bf16* const*>(s.value_rows) + i, task.value_dim,
                           values + i * value_tiles * amx::kRows);
    }
    for (std::int64_t column = 0; column < value_tiles; column += amx::kMaxTiles) {
      for (std::int64_t block = 0; block < num_rows; block += amx::kRows) {
        amx::multiply_columns(weights + 3 * block * kAmxTile, padded / amx::kStep,
                              values + column * amx::kRows * amx::kStep, value_tiles,
                              std::min(amx::kMaxTiles, value_tiles - column),
                              std::min(amx::kRows, num_rows - block), s.correction + first_row + block,
                              s.acc + (first_row + block) * s.dv + column * amx::kRows, s.dv);
      }
    }
  }
}
#endif

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
