// SPDX-License-Identifier: Apache-2.0
// Attention of a query tile over a key range in SIMD, compiled for each instruction set and chosen at run
// time.
//
// Up to kDirectRows rows, memory bounds: the direct kernel reads K and V once. Beyond that the products
// bound: bf16 rows go to the tile registers where there are any, everything else to the packed kernel, which
// also takes what the direct one does not: head sizes that are no multiple of a pair of vectors, and layouts
// in which a value does not lie a constant distance behind its key.

// Each instruction set takes seconds to compile, a minute under sanitizers: machines before 2013, which lack
// AVX2, take the portable code.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/attend.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include <hwy/highway.h>

#include "cpu/amx.hpp"
#include "cpu/attention/amx-inl.hpp"
#include "cpu/attention/direct-inl.hpp"
#include "cpu/attention/packed-inl.hpp"
#include "cpu/attention/scratch.hpp"
#include "cpu/attention/state-inl.hpp"
#include "cpu/attention/task.hpp"
#include "cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

/// Rows [first_row, + num_rows) against every key of `range`: all of them see all of it, so nothing is
/// masked.
template <class T>
HWY_INLINE void accumulate(const State& s, std::int64_t first_row, std::int64_t num_rows, TokenRange range) {
  if (range.size() <= 0) return;
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  if (std::is_same_v<T, bf16> && num_rows > amx::kHalfRows && amx::available()) {
    for (std::int64_t row = 0; row < num_rows; row += kPackedRows) {
      tiled(s, first_row + row, std::min(kPackedRows, num_rows - row), range);
    }
    return;
  }
#endif
  if (num_rows <= kDirectRows && s.d == s.task.head_dim && s.dv == s.task.value_dim &&
      s.task.has_constant_distance()) {
    pack_queries<T>(s, first_row, num_rows);
    direct<T>(s, first_row, num_rows, range);
    return;
  }
  for (std::int64_t row = 0; row < num_rows; row += kPackedRows) {
    const std::int64_t rows = std::min(kPackedRows, num_rows - row);
    pack_columns<T>(s, first_row + row, rows);
    packed<T>(s, first_row + row, rows, range);
  }
}

template <class T>
HWY_INLINE void attend_as(const AttentionTask& task, float* scratch) {
  const std::int64_t rows = task.num_tokens * task.group;
  const ScratchLayout at(rows, task.head_dim, task.value_dim);
  const auto pointers = reinterpret_cast<const void**>(scratch + at.pointers);
  constexpr std::int64_t kPointers = kDirectTile + kPairSlack;
  const State s{task,
                round_up(task.head_dim, kPair),
                round_up(task.value_dim, kPair),
                scratch + at.q,
                scratch + at.acc,
                scratch + at.max,
                scratch + at.sum,
                scratch + at.correction,
                scratch + at.scores,
                scratch + at.keys,
                scratch + at.values,
                pointers,
                pointers + kPointers,
                pointers + 2 * kPointers,
                reinterpret_cast<std::byte*>(scratch + at.joined),
                task.head_dim * static_cast<std::int64_t>(sizeof(T)),
                reinterpret_cast<std::byte*>(scratch + at.amx)};
  std::fill_n(s.acc, rows * s.dv, 0.0f);
  std::fill_n(s.max, rows, -kInfinity);
  std::fill_n(s.sum, rows, 0.0f);

  // What all tokens see, together; what only some see (the causal and the window's edge), token by token, so
  // that a row outside a token's range cannot reach it even as 0 * NaN.
  TokenRange shared{0, std::numeric_limits<std::int64_t>::max()};
  for (std::int64_t t = 0; t < task.num_tokens; ++t) {
    const TokenRange seen = task.visible[t];
    if (seen.size() <= 0) continue;
    shared.begin = std::max(shared.begin, seen.begin);
    shared.end = std::min(shared.end, seen.end);
  }
  const bool has_shared = shared.end != std::numeric_limits<std::int64_t>::max() && shared.size() > 0;
  if (has_shared) accumulate<T>(s, 0, rows, shared);
  for (std::int64_t t = 0; t < task.num_tokens; ++t) {
    const TokenRange seen = task.visible[t];
    if (seen.size() <= 0) continue;
    if (has_shared) {
      accumulate<T>(s, t * task.group, task.group, {seen.begin, shared.begin});
      accumulate<T>(s, t * task.group, task.group, {shared.end, seen.end});
    } else {
      accumulate<T>(s, t * task.group, task.group, seen);
    }
  }

  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t t = row / task.group;
    const std::int64_t g = row % task.group;
    float* out = task.out + t * task.out_token_stride + g * task.out_head_stride;
    float& lse = task.lse[t * task.lse_token_stride + g * task.lse_head_stride];
    if (task.visible[t].size() <= 0) {
      std::fill_n(out, task.value_dim, 0.0f);
      lse = -kInfinity;
    } else {
      store_pair_order<T>(s.acc + row * s.dv, task.value_dim,
                          task.value_scale * kDecodeFactor<T> / s.sum[row], out);
      lse = s.max[row] * kLn2 + std::log(s.sum[row]);
    }
  }
}

void attend_target(const AttentionTask& task, float* scratch) {
  switch (task.dtype) {
    case DType::f32:
      return attend_as<float>(task, scratch);
    case DType::f16:
      return attend_as<f16>(task, scratch);
    case DType::bf16:
      return attend_as<bf16>(task, scratch);
    case DType::fp8_e4m3:
      return attend_as<fp8_e4m3>(task, scratch);
  }
}

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace helix::cpu {

HWY_EXPORT(attend_target);

std::int64_t attention_scratch_floats(std::int64_t rows, std::int64_t head_dim, std::int64_t value_dim) {
  return round_up(ScratchLayout(rows, head_dim, value_dim).total, 16);
}

void attend(const AttentionTask& task, float* scratch) {
  HWY_DYNAMIC_DISPATCH(attend_target)(task, scratch);
}

}  // namespace helix::cpu
#endif
