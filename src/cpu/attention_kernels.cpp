// SPDX-License-Identifier: Apache-2.0
// Attention of a query tile over a key range in SIMD, compiled for each instruction set and chosen at run
// time.
//
// A block of R query rows meets kLanes / R keys at a time, so that every block has kLanes accumulators, each
// a partial dot product along the head dimension; one sum across vectors turns them into scores in [key][row]
// order. That order gives the softmax full vectors whatever R is, and the value product its R weights of a
// key side by side.
//
// Up to kDirectRows rows the kernels widen K and V from storage as they go, and every stored row comes from
// memory once for all rows. Beyond that the product bounds, not memory: a tile of keys is widened once into
// scratch.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_kernels.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include "cpu/attention_kernels.hpp"
#include "cpu/widen-inl.hpp"

#ifndef HELIX_CPU_ATTENTION_KERNELS_ONCE
#define HELIX_CPU_ATTENTION_KERNELS_ONCE
namespace helix::cpu {

inline constexpr std::int64_t kDirectRows = 16;
inline constexpr std::int64_t kDirectTile = 256;  ///< keys between two updates of the running maximum
inline constexpr std::int64_t kPackedTile = 64;
inline constexpr std::int64_t kValueTile = 32;  ///< keys whose V rows stay in L1 while the columns are walked
inline constexpr std::int64_t kRowSlack = 8;    ///< rows that a block may compute past the last one
inline constexpr std::int64_t kPairSlack = 32;  ///< the widest pair; rows are padded to a multiple

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) {
  return (n + to - 1) / to * to;
}

/// Where each array lies in the scratch, in floats. Every array starts on a cache line.
struct ScratchLayout {
  std::int64_t q, acc, max, sum, correction, scores, keys, values, pointers, total;

  ScratchLayout(std::int64_t rows, std::int64_t head_dim, std::int64_t value_dim) {
    const std::int64_t padded_rows = round_up(rows + kRowSlack, 16);
    const std::int64_t d = round_up(head_dim, kPairSlack);
    const std::int64_t dv = round_up(value_dim, kPairSlack);
    q = 0;
    acc = q + padded_rows * d;
    max = acc + padded_rows * dv;
    sum = max + padded_rows;
    correction = sum + padded_rows;
    scores = correction + padded_rows;
    keys = scores + std::max(padded_rows * kPackedTile, (kDirectRows + kRowSlack) * kDirectTile);
    values = keys + kPackedTile * d;
    pointers = values + kPackedTile * dv;
    const std::int64_t pointer_floats = static_cast<std::int64_t>(sizeof(void*) / sizeof(float));
    total = pointers + 2 * (kDirectTile + 16) * pointer_floats;
  }
};

}  // namespace helix::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
/// Rows of the widest block: with half as many keys as lanes a widened key serves enough rows, and a value
/// pass has kLanes accumulators in two vectors a row.
constexpr int kMaxRows = kLanes / 2;

/// Rows of the block that starts where `rest` rows are left.
HWY_INLINE int block_rows(std::int64_t rest) {
  int rows = 1;
  while (rows < rest && rows < kMaxRows) rows *= 2;
  return rows;
}

/// Corrections of a block whose maximum stays.
constexpr float kUnchanged[8] = {1, 1, 1, 1, 1, 1, 1, 1};

/// Rows in pages: one pointer each.
template <class T>
struct Scattered {
  const T* const* rows;
  HWY_INLINE const T* operator[](std::int64_t i) const { return rows[i]; }
};

/// Rows widened into scratch.
struct Widened {
  const float* rows;
  std::int64_t stride;
  HWY_INLINE const float* operator[](std::int64_t i) const { return rows + i * stride; }
};

/// Turns scores into weights exp(score - max) and updates the running (max, sum) of the first `valid` rows.
/// correction is what earlier sums shrink by.
template <int R>
HWY_INLINE void softmax_block(float* scores, std::int64_t count, float soft_cap, int valid, float* max,
                              float* sum, float* correction) {
  constexpr int K = kLanes / R;
  const std::int64_t used = count * R;
  const std::int64_t padded = round_up(count, K) * R;
  for (std::int64_t i = used; i < padded; ++i) scores[i] = -kInfinity;
  if (soft_cap > 0.0f) {
    const Vec cap = hn::Set(kF32, soft_cap);
    const Vec inverse = hn::Set(kF32, 1.0f / soft_cap);
    for (std::int64_t i = 0; i < padded; i += kLanes) {
      const Vec x = hn::Mul(hn::LoadU(kF32, scores + i), inverse);
      hn::StoreU(hn::Mul(hn::Tanh(kF32, x), cap), kF32, scores + i);
    }
    for (std::int64_t i = used; i < padded; ++i) scores[i] = -kInfinity;
  }
  Vec top = hn::Set(kF32, -kInfinity);
  for (std::int64_t i = 0; i < padded; i += kLanes) top = hn::Max(top, hn::LoadU(kF32, scores + i));
  alignas(64) float lanes[kLanes];
  hn::Store(top, kF32, lanes);
  float next[R];
  for (int r = 0; r < R; ++r) {
    float highest = r < valid ? max[r] : -kInfinity;
    for (int k = 0; k < K; ++k) highest = std::max(highest, lanes[k * R + r]);
    // All scores -inf: any finite pivot gives weights of 0 where -inf would give NaN.
    next[r] = highest == -kInfinity ? 0.0f : highest;
    for (int k = 0; k < K; ++k) lanes[k * R + r] = next[r];
    correction[r] = r < valid ? std::exp(max[r] - next[r]) : 0.0f;
    if (r < valid) max[r] = highest;
  }
  const Vec pivot = hn::Load(kF32, lanes);
  Vec total = hn::Zero(kF32);
  for (std::int64_t i = 0; i < padded; i += kLanes) {
    const Vec weight = hn::Exp(kF32, hn::Sub(hn::LoadU(kF32, scores + i), pivot));
    hn::StoreU(weight, kF32, scores + i);
    total = hn::Add(total, weight);
  }
  hn::Store(total, kF32, lanes);
  for (int r = 0; r < R && r < valid; ++r) {
    float added = 0.0f;
    for (int k = 0; k < K; ++k) added += lanes[k * R + r];
    sum[r] = sum[r] * correction[r] + added;
  }
}

/// acc[r] = acc[r] * correction[r] + sum over keys of weights[key][r] * values[key], C pairs of columns wide.
/// The sum of a tile starts at zero, so that rounding grows with the tiles and not with the keys.
template <int R, int C, class Rows>
HWY_INLINE void value_pass(Rows values, std::int64_t count, const float* weights, int valid,
                           const float* correction, float* acc, std::int64_t acc_stride,
                           std::int64_t column) {
  Vec sums[R * C * 2];
  HELIX_UNROLL for (int i = 0; i < R * C * 2; ++i) sums[i] = hn::Zero(kF32);
  for (std::int64_t key = 0; key < count; ++key) {
    Pair x[C];
    HELIX_UNROLL for (int c = 0; c < C; ++c) x[c] = load_pair(values[key] + column + c * kPair);
    HELIX_UNROLL for (int r = 0; r < R; ++r) {
      const Vec weight = hn::Set(kF32, weights[key * R + r]);
      HELIX_UNROLL for (int c = 0; c < C; ++c) {
        sums[(r * C + c) * 2] = hn::MulAdd(x[c].a, weight, sums[(r * C + c) * 2]);
        sums[(r * C + c) * 2 + 1] = hn::MulAdd(x[c].b, weight, sums[(r * C + c) * 2 + 1]);
      }
    }
  }
  HELIX_UNROLL for (int r = 0; r < R; ++r) {
    if (r >= valid) break;
    const Vec shrink = hn::Set(kF32, correction[r]);
    float* to = acc + r * acc_stride;
    HELIX_UNROLL for (int c = 0; c < C * 2; ++c) {
      hn::StoreU(hn::MulAdd(hn::LoadU(kF32, to + c * kLanes), shrink, sums[r * C * 2 + c]), kF32,
                 to + c * kLanes);
    }
  }
}

/// All columns of a block, as many pairs at once as fill kLanes accumulators.
template <int R, int C, class Rows>
HWY_INLINE void value_columns(Rows values, std::int64_t count, const float* weights, int valid,
                              const float* correction, float* acc, std::int64_t acc_stride,
                              std::int64_t column) {
  for (; column + C * kPair <= acc_stride; column += C * kPair) {
    value_pass<R, C>(values, count, weights, valid, correction, acc + column, acc_stride, column);
  }
  if constexpr (C > 1) {
    value_columns<R, C / 2>(values, count, weights, valid, correction, acc, acc_stride, column);
  }
}

/// The state of one attend().
struct State {
  const AttentionTask& task;
  std::int64_t d;   ///< head_dim, padded to pairs: stride of q and of widened keys
  std::int64_t dv;  ///< value_dim, padded to pairs: stride of acc
  float* q;
  float* acc;
  float* max;
  float* sum;
  float* correction;
  float* scores;
  float* keys;
  float* values;
  const void** key_rows;
  const void** value_rows;
};

/// Looks the rows of tokens [begin, begin + count) up; the last pointer repeats up to a whole block.
HWY_INLINE void find_rows(const AttentionTask& task, std::int64_t begin, std::int64_t count,
                          const void** key_rows, const void** value_rows) {
  std::int64_t page = begin / task.page_tokens;
  std::int64_t slot = begin % task.page_tokens;
  for (std::int64_t i = 0; i < count; ++page, slot = 0) {
    const std::int64_t run = std::min(count - i, task.page_tokens - slot);
    const std::int64_t offset = task.page_table[page] * task.page_bytes + slot * task.row_bytes;
    const std::byte* key = task.keys + offset;
    const std::byte* value = task.values + offset;
    for (const std::int64_t end = i + run; i < end; ++i, key += task.row_bytes, value += task.row_bytes) {
      key_rows[i] = key;
      value_rows[i] = value;
    }
  }
  for (int i = 0; i < kLanes; ++i) key_rows[count + i] = key_rows[count - 1];
}

template <class T, int R>
HWY_INLINE void direct_scores(const State& s, std::int64_t row, int valid, std::int64_t count,
                              float* scores) {
  const Scattered<T> keys{reinterpret_cast<const T* const*>(s.key_rows)};
  dot_block<R>(keys, count, s.q + row * s.d, s.d, s.d, scores);
  softmax_block<R>(scores, count, s.task.soft_cap, valid, s.max + row, s.sum + row, s.correction + row);
}

template <class T, int R>
HWY_INLINE void direct_values(const State& s, std::int64_t row, int valid, std::int64_t begin,
                              std::int64_t count, const float* scores) {
  const Scattered<T> values{reinterpret_cast<const T* const*>(s.value_rows) + begin};
  value_columns<R, kMaxRows / R>(values, count, scores + begin * R, valid,
                                 begin == 0 ? s.correction + row : kUnchanged, s.acc + row * s.dv, s.dv, 0);
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

template <class T>
HWY_NOINLINE void direct(const State& s, std::int64_t first_row, std::int64_t num_rows, TokenRange range) {
  for (std::int64_t begin = range.begin; begin < range.end; begin += kDirectTile) {
    const std::int64_t count = std::min(kDirectTile, range.end - begin);
    find_rows(s.task, begin, count, s.key_rows, s.value_rows);
    int rows = 0;
    for (std::int64_t row = 0; row < num_rows; row += rows) {
      rows = block_rows(num_rows - row);
      const int valid = static_cast<int>(std::min<std::int64_t>(rows, num_rows - row));
      HELIX_WITH_ROWS(rows,
                      (direct_scores<T, R>(s, first_row + row, valid, count, s.scores + row * kDirectTile)))
    }
    for (std::int64_t part = 0; part < count; part += kValueTile) {
      const std::int64_t part_count = std::min(kValueTile, count - part);
      for (std::int64_t row = 0; row < num_rows; row += rows) {
        rows = block_rows(num_rows - row);
        const int valid = static_cast<int>(std::min<std::int64_t>(rows, num_rows - row));
        HELIX_WITH_ROWS(rows, (direct_values<T, R>(s, first_row + row, valid, part, part_count,
                                                   s.scores + row * kDirectTile)))
      }
    }
  }
}

/// Widens `count` rows: keys one after the other, values in panels of kPair columns, [panel][key][kPair],
/// because a column pass over rows 2 KB apart would meet a few L1 sets only.
template <class T>
HWY_INLINE void widen_tile(const State& s, std::int64_t count) {
  const std::int64_t d = s.task.head_dim;
  const std::int64_t dv = s.task.value_dim;
  for (std::int64_t key = 0; key < count; ++key) {
    const T* from = static_cast<const T*>(s.key_rows[key]);
    float* to = s.keys + key * s.d;
    for (std::int64_t i = 0; i < d; i += kPair) {
      const Pair x = i + kPair <= d ? load_pair(from + i) : load_pair_tail(from + i, d - i);
      hn::StoreU(x.a, kF32, to + i);
      hn::StoreU(x.b, kF32, to + i + kLanes);
    }
    from = static_cast<const T*>(s.value_rows[key]);
    to = s.values + key * kPair;
    for (std::int64_t i = 0; i < dv; i += kPair, to += kPackedTile * kPair) {
      const Pair x = i + kPair <= dv ? load_pair(from + i) : load_pair_tail(from + i, dv - i);
      hn::StoreU(x.a, kF32, to);
      hn::StoreU(x.b, kF32, to + kLanes);
    }
  }
}

template <int R>
HWY_INLINE void packed_scores(const State& s, std::int64_t row, int valid, std::int64_t count,
                              float* scores) {
  dot_block<R>(Widened{s.keys, s.d}, count, s.q + row * s.d, s.d, s.d, scores);
  softmax_block<R>(scores, count, s.task.soft_cap, valid, s.max + row, s.sum + row, s.correction + row);
}

template <int R>
HWY_INLINE void packed_values(const State& s, std::int64_t row, int valid, std::int64_t count,
                              std::int64_t column, const float* scores) {
  value_pass<R, 1>(Widened{s.values + column * kPackedTile, kPair}, count, scores, valid, s.correction + row,
                   s.acc + row * s.dv + column, s.dv, 0);
}

template <class T>
HWY_NOINLINE void packed(const State& s, std::int64_t first_row, std::int64_t num_rows, TokenRange range) {
  for (std::int64_t begin = range.begin; begin < range.end; begin += kPackedTile) {
    const std::int64_t count = std::min(kPackedTile, range.end - begin);
    find_rows(s.task, begin, count, s.key_rows, s.value_rows);
    widen_tile<T>(s, count);
    int rows = 0;
    for (std::int64_t row = 0; row < num_rows; row += rows) {
      rows = block_rows(num_rows - row);
      const int valid = static_cast<int>(std::min<std::int64_t>(rows, num_rows - row));
      HELIX_WITH_ROWS(rows,
                      (packed_scores<R>(s, first_row + row, valid, count, s.scores + row * kPackedTile)))
    }
    for (std::int64_t column = 0; column < s.dv; column += kPair) {
      for (std::int64_t row = 0; row < num_rows; row += rows) {
        rows = block_rows(num_rows - row);
        const int valid = static_cast<int>(std::min<std::int64_t>(rows, num_rows - row));
        HELIX_WITH_ROWS(
            rows, (packed_values<R>(s, first_row + row, valid, count, column, s.scores + row * kPackedTile)))
      }
    }
  }
}

/// Rows [first_row, + num_rows) against every key of `range`: all of them see all of it, so nothing is
/// masked.
template <class T>
HWY_INLINE void accumulate(const State& s, std::int64_t first_row, std::int64_t num_rows, TokenRange range) {
  if (range.size() <= 0) return;
  if (num_rows > kDirectRows || s.d != s.task.head_dim || s.dv != s.task.value_dim) {
    packed<T>(s, first_row, num_rows, range);
  } else {
    direct<T>(s, first_row, num_rows, range);
  }
}

template <class T>
HWY_INLINE void attend_as(const AttentionTask& task, float* scratch) {
  const std::int64_t rows = task.num_tokens * task.group;
  const ScratchLayout at(rows, task.head_dim, task.value_dim);
  const auto pointers = reinterpret_cast<const void**>(scratch + at.pointers);
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
                pointers + kDirectTile + 16};
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* q = task.q + row / task.group * task.q_token_stride + row % task.group * task.q_head_stride;
    load_pair_order<T>(q, task.head_dim, task.key_scale * kDecodeFactor<T>, s.q + row * s.d);
  }
  std::fill_n(s.q + rows * s.d, kRowSlack * s.d, 0.0f);
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
      lse = s.max[row] + std::log(s.sum[row]);
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
