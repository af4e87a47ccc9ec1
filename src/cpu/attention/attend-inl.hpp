// SPDX-License-Identifier: Apache-2.0
// Attention of a query tile over a key range in SIMD.
//
// Where there are tile registers (AMX), they take bf16 KV from amx::kHalfRows + 1 rows on. Everything else
// is left to two kernels. Up to kDirectRows rows are bound by memory: the direct kernel reads K and V once.
// More rows are bound by the products, and go to the packed kernel. This also takes what the direct kernel
// does not: head sizes that are no multiple of a pair of vectors, and layouts in which a value does not lie
// at a constant distance from its key. Compiled once a Highway target, hence the toggled guard.
#if defined(HELIX_SRC_CPU_ATTENTION_ATTEND_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_ATTENTION_ATTEND_INL_HPP_
#undef HELIX_SRC_CPU_ATTENTION_ATTEND_INL_HPP_
#else
#define HELIX_SRC_CPU_ATTENTION_ATTEND_INL_HPP_
#endif

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

/// Whether direct() takes so many rows of a task.
HWY_INLINE bool is_direct(const AttentionTask& task, std::int64_t num_rows) {
  return num_rows <= kDirectRows && task.head_dim % kPair == 0 && task.value_dim % kPair == 0 &&
         task.has_constant_distance();
}

template <class T>
HWY_INLINE bool has_tiles(std::int64_t num_rows) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  return std::is_same_v<T, bf16> && num_rows > amx::kHalfRows && amx::available();
#else
  static_cast<void>(num_rows);
  return false;
#endif
}

/// Runs direct() in the task's variant.
template <class T>
HWY_INLINE void accumulate_direct(const Heads& heads, std::int64_t first_row, std::int64_t num_rows,
                                  TokenRange range) {
  for (int head = 0; head < heads.count; ++head) pack_queries<T>(heads[head], first_row, num_rows);
  if constexpr (kHasReadings) {
    switch (heads.first.task.variant.prefetch) {
      case Prefetch::none:
        break;
      case Prefetch::across:
        return direct<T, Across<T>>(heads, first_row, num_rows, range);
      case Prefetch::straight:
        return direct<T, Straight<T, 2>>(heads, first_row, num_rows, range);
      case Prefetch::straight_l1:
        return direct<T, Straight<T, 3>>(heads, first_row, num_rows, range);
      case Prefetch::along:
        return direct<T, Along<T>>(heads, first_row, num_rows, range);
      case Prefetch::linear:
        return direct<T, Linear<T>>(heads, first_row, num_rows, range);
    }
  }
  direct<T, NoPrefetch<T>>(heads, first_row, num_rows, range);
}

/// Attends with rows [first_row, + num_rows) to every key of `range`. All of the rows see all of the keys, so
/// nothing is masked.
template <class T>
HWY_NOINLINE void accumulate(const State& s, std::int64_t first_row, std::int64_t num_rows,
                             TokenRange range) {
  if (range.size() <= 0) return;
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  if (has_tiles<T>(num_rows)) {
    for (std::int64_t row = 0; row < num_rows; row += kPackedRows) {
      tiled(s, first_row + row, std::min(kPackedRows, num_rows - row), range);
    }
    return;
  }
#endif
  if (is_direct(s.task, num_rows)) return accumulate_direct<T>({s, &s.task, 1}, first_row, num_rows, range);
  for (std::int64_t row = 0; row < num_rows; row += kPackedRows) {
    const std::int64_t rows = std::min(kPackedRows, num_rows - row);
    pack_columns<T>(s, first_row + row, rows);
    packed<T>(s, first_row + row, rows, range);
  }
}

template <class T>
HWY_INLINE State state_of(const AttentionTask& task, float* scratch, const ScratchLayout& at) {
  const auto pointers = reinterpret_cast<const void**>(scratch + at.pointers);
  constexpr std::int64_t kPointers = kDirectTile + kPairSlack;
  return {task,
          round_up(task.head_dim, kPair),
          round_up(task.value_dim, kPair),
          scratch + at.q,
          scratch + at.acc,
          scratch + at.max,
          scratch + at.sum,
          scratch + at.correction,
          scratch + at.scores,
          scratch + at.read_scores,
          scratch + at.keys,
          scratch + at.values,
          pointers,
          pointers + kPointers,
          pointers + 2 * kPointers,
          pointers + 3 * kPointers,
          reinterpret_cast<std::byte*>(scratch + at.joined),
          task.head_dim * static_cast<std::int64_t>(sizeof(T)),
          reinterpret_cast<std::byte*>(scratch + at.amx)};
}

HWY_INLINE void clear(const State& s) {
  const std::int64_t rows = s.task.num_tokens * s.task.group;
  std::fill_n(s.acc, rows * s.dv, 0.0f);
  std::fill_n(s.max, rows, -kInfinity);
  std::fill_n(s.sum, rows, 0.0f);
}

/// Writes the task's results from its state to out and lse.
template <class T>
HWY_INLINE void store(const State& s) {
  const AttentionTask& task = s.task;
  for (std::int64_t row = 0; row < task.num_tokens * task.group; ++row) {
    const std::int64_t t = row / task.group;
    const std::int64_t g = row % task.group;
    float* out = task.out + t * task.out_token_stride + g * task.out_head_stride;
    float& lse = task.lse[t * task.lse_token_stride + g * task.lse_head_stride];
    if (task.visible[t].size() <= 0) {
      std::fill_n(out, task.value_dim, 0.0f);
      lse = -kInfinity;
    } else {
      // All scores may be -inf: zeros then, as of a row that sees nothing.
      const float factor = s.sum[row] == 0.0f ? 0.0f : task.value_scale * kDecodeFactor<T> / s.sum[row];
      store_pair_order<T>(s.acc + row * s.dv, task.value_dim, factor, out);
      lse = s.max[row] * kLn2 + std::log(s.sum[row]);
    }
  }
}

/// The keys that all of the tokens [begin, end) see, leaving out tokens that see none.
HWY_INLINE TokenRange seen_by_all(const AttentionTask& task, std::int64_t begin, std::int64_t end) {
  TokenRange shared{0, std::numeric_limits<std::int64_t>::max()};
  bool is_any = false;
  for (std::int64_t t = begin; t < end; ++t) {
    const TokenRange seen = task.visible[t];
    if (seen.size() <= 0) continue;
    shared.begin = std::max(shared.begin, seen.begin);
    shared.end = std::min(shared.end, seen.end);
    is_any = true;
  }
  return is_any ? shared : TokenRange{};
}

/// Attends with tokens [begin, end) to all that they see but the keys `done`, which they have attended to.
/// Keys that all of them see are read for all together, the others (at the causal and the window's edge) for
/// each half of them, so that a row outside a token's range cannot reach it even as 0 * NaN.
template <class T>
HWY_NOINLINE void attend_tokens(const State& s, std::int64_t begin, std::int64_t end, TokenRange done) {
  const std::int64_t group = s.task.group;
  const TokenRange shared = seen_by_all(s.task, begin, end);
  if (shared.size() > 0) {
    const auto attend_to = [&](TokenRange keys) {
      accumulate<T>(s, begin * group, (end - begin) * group, keys);
    };
    if (done.size() > 0) {
      attend_to({shared.begin, done.begin});
      attend_to({done.end, shared.end});
    } else {
      attend_to(shared);
    }
    done = shared;
  }
  if (end - begin <= 1) return;
  const std::int64_t middle = begin + (end - begin) / 2;
  attend_tokens<T>(s, begin, middle, done);
  attend_tokens<T>(s, middle, end, done);
}

template <class T>
HWY_NOINLINE void attend_one(const State& s) {
  clear(s);
  attend_tokens<T>(s, 0, s.task.num_tokens, {});
  store<T>(s);
}

/// Attends with several heads at once where direct() takes them, otherwise with one after the other.
template <class T>
HWY_INLINE void attend_as(const AttentionTask* tasks, int num_tasks, float* scratch) {
  const std::int64_t rows = tasks[0].num_tokens * tasks[0].group;
  const ScratchLayout at(rows * num_tasks, tasks[0].head_dim, tasks[0].value_dim);
  const State first = state_of<T>(tasks[0], scratch, at);
  if (num_tasks == 1 || has_tiles<T>(rows) || !is_direct(tasks[0], rows)) {
    for (int i = 0; i < num_tasks; ++i) attend_one<T>(state_of<T>(tasks[i], scratch, at));
    return;
  }
  const Heads heads{first, tasks, num_tasks, rows, rows_of_blocks(rows)};
  for (int head = 0; head < num_tasks; ++head) clear(heads[head]);
  const TokenRange range = tasks[0].visible[0];
  if (range.size() > 0) accumulate_direct<T>(heads, 0, rows, range);
  for (int head = 0; head < num_tasks; ++head) store<T>(heads[head]);
}

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
