// SPDX-License-Identifier: Apache-2.0
// Attention of a query tile over a key range in SIMD, compiled for each instruction set and chosen at run
// time.
//
// Up to kDirectRows rows, every stored row comes from memory once for all of them and is widened on the way
// into registers. A block of R rows meets kLanes / R keys at a time, so that every block has kLanes
// accumulators, each a partial dot product along the head dimension; one sum across vectors turns them into
// scores in [key][row] order. That order gives the softmax full vectors whatever R is, and the value product
// its R weights of a key side by side. While K is multiplied V is prefetched, and the other way round.
//
// Beyond that the products bound, not memory. bf16 rows go to the tile registers where there are any
// (amx.hpp; MLA at 160 % of what f32 vectors could reach). Otherwise a tile of keys is widened once into
// scratch, K transposed, and both products run as register-blocked matrix products out of L1. (Dot products
// of widened rows, without the transpose, took 8 times the traffic from L2 and reached 60 % of the peak in
// place of 75.)

// Each instruction set takes seconds to compile, a minute under sanitizers: machines before 2013, which lack
// AVX2, take the portable code.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_kernels.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <utility>

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include "cpu/amx.hpp"
#include "cpu/attention_kernels.hpp"
#include "cpu/widen-inl.hpp"

#ifndef HELIX_CPU_ATTENTION_KERNELS_ONCE
#define HELIX_CPU_ATTENTION_KERNELS_ONCE
namespace helix::cpu {

inline constexpr std::int64_t kDirectRows = 16;
inline constexpr std::int64_t kDirectTile = 256;  ///< keys between two updates of the running maximum
inline constexpr std::int64_t kPackedTile = 64;
inline constexpr std::int64_t kPackedRows = 128;  ///< rows that share a widened tile
inline constexpr std::int64_t kDepth = 128;       ///< part of the head dimension whose keys stay in L1
inline constexpr std::int64_t kValueTile = 64;    ///< keys whose V rows stay in L1 while blocks walk them
inline constexpr std::int64_t kRowSlack = 8;      ///< rows that a block may compute past the last one
inline constexpr std::int64_t kAmxTile = 128;     ///< keys of a tile on AMX
inline constexpr std::int64_t kPairSlack = 32;    ///< the widest pair; rows are padded to a multiple

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) {
  return (n + to - 1) / to * to;
}

/// Where each array of the AMX path lies in its scratch, in bytes.
struct AmxLayout {
  std::int64_t q, keys, values, weights, scores, total;

  AmxLayout(std::int64_t rows, std::int64_t head_dim, std::int64_t value_dim) {
    const std::int64_t padded_rows = round_up(std::min(rows, kPackedRows), amx::kRows);
    const std::int64_t d = round_up(head_dim, amx::kStep);
    const std::int64_t dv = round_up(value_dim, amx::kStep);
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(bf16));
    q = 0;
    keys = q + 3 * padded_rows * d * kBytes;
    values = keys + kAmxTile * d * kBytes;
    weights = values + kAmxTile * dv * kBytes;
    scores = weights + 3 * padded_rows * kAmxTile * kBytes;
    total = scores + padded_rows * kAmxTile * static_cast<std::int64_t>(sizeof(float));
  }
};

/// Where each array lies in the scratch, in floats. Every array starts on a cache line.
struct ScratchLayout {
  std::int64_t q, acc, max, sum, correction, scores, keys, values, pointers, amx, total;

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
    keys =
        scores + std::max((kPackedRows + kRowSlack) * kPackedTile, (kDirectRows + kRowSlack) * kDirectTile);
    values = keys + kPackedTile * d;
    pointers = values + kPackedTile * dv;
    const std::int64_t pointer_floats = static_cast<std::int64_t>(sizeof(void*) / sizeof(float));
    amx = pointers + 3 * (kDirectTile + kPairSlack) * pointer_floats;
    total = amx;
    if (amx::available()) {
      total += AmxLayout(rows, head_dim, value_dim).total / static_cast<std::int64_t>(sizeof(float));
    }
  }
};

}  // namespace helix::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = std::numbers::log2e_v<float>;
constexpr float kLn2 = std::numbers::ln2_v<float>;
/// Rows of the widest block: with half as many keys as lanes a widened key serves enough rows, and a value
/// pass has kLanes accumulators in two vectors a row.
constexpr int kMaxRows = kLanes / 2;

/// Rows of the block that starts where `rest` rows are left.
HWY_INLINE int block_rows(std::int64_t rest) {
  int rows = 1;
  while (rows < rest && rows < kMaxRows) rows *= 2;
  return rows;
}

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

/// Rows of kPair floats, one after the other.
struct Panel {
  const float* first;
  HWY_INLINE const float* operator[](std::int64_t i) const { return first + i * kPair; }
  HWY_INLINE void prefetch(std::int64_t, int, std::int64_t) const {}
};

/// What a product does to the sums that it finds.
enum class Sums { replace, add, shrink };

/// acc[r] = acc[r] * correction[r] + sum over i of weights[i * kNext + r * kRow] * rows[i], C pairs of
/// columns wide (Sums::shrink; replace and add leave the correction out). The sum of a tile starts at zero,
/// so that rounding grows with the tiles and not with the keys.
template <int R, int C, int kNext, int kRow, Sums kSums, class Rows>
HWY_INLINE void product(Rows& shared_rows, std::int64_t count, const float* weights, int valid,
                        const float* correction, float* acc, std::int64_t acc_stride, std::int64_t column) {
  Rows rows = shared_rows;  // in registers
  Vec sums[R * C * 2];
  HELIX_UNROLL for (int i = 0; i < R * C * 2; ++i) sums[i] = hn::Zero(kF32);
  if constexpr (kSums != Sums::replace) {  // they come from L2, and are needed only after the loop
    HELIX_UNROLL for (int r = 0; r < R; ++r) {
      HELIX_UNROLL for (int c = 0; c < C * 2; ++c) __builtin_prefetch(acc + r * acc_stride + c * kLanes, 1);
    }
  }
  for (std::int64_t i = 0; i < count; ++i) {
    Pair x[C];
    HELIX_UNROLL for (int c = 0; c < C; ++c) {
      x[c] = load_pair(rows[i] + column + c * kPair);
      rows.prefetch(i, 1, column + c * kPair);
    }
    HELIX_UNROLL for (int r = 0; r < R; ++r) {
      const Vec weight = hn::Set(kF32, weights[i * kNext + r * kRow]);
      HELIX_UNROLL for (int c = 0; c < C; ++c) {
        sums[(r * C + c) * 2] = hn::MulAdd(x[c].a, weight, sums[(r * C + c) * 2]);
        sums[(r * C + c) * 2 + 1] = hn::MulAdd(x[c].b, weight, sums[(r * C + c) * 2 + 1]);
      }
    }
  }
  shared_rows = rows;
  HELIX_UNROLL for (int r = 0; r < R; ++r) {
    if (r < valid) {  // a break would keep clang from unrolling
      float* to = acc + r * acc_stride;
      HELIX_UNROLL for (int c = 0; c < C * 2; ++c, to += kLanes) {
        Vec sum = sums[r * C * 2 + c];
        if constexpr (kSums == Sums::add) sum = hn::Add(hn::LoadU(kF32, to), sum);
        if constexpr (kSums == Sums::shrink) {
          sum = hn::MulAdd(hn::LoadU(kF32, to), hn::Set(kF32, correction[r]), sum);
        }
        hn::StoreU(sum, kF32, to);
      }
    }
  }
}

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
  const void** key_rows;  ///< of the current tile
  const void** value_rows;
  const void** next_key_rows;
  std::byte* amx;
};

/// Looks the rows of tokens [begin, begin + count) up; the last one repeats up to a whole block.
HWY_NOINLINE void find_rows(const AttentionTask& task, std::int64_t begin, std::int64_t count,
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
  std::fill_n(key_rows + count, kPair, key_rows[count - 1]);
  std::fill_n(value_rows + count, kPair, value_rows[count - 1]);
}

/// The key rows of tokens [begin, begin + count), a whole tile in `streams` interleaved runs: the order of
/// keys is free, and one run after the other drew 60 % of the bandwidth that a core reaches, because hardware
/// prefetchers look only so far ahead in each. The last row repeats up to a whole block.
HWY_NOINLINE void find_interleaved_keys(const AttentionTask& task, std::int64_t begin, std::int64_t count,
                                        std::int64_t streams, const void** key_rows) {
  if (count < kDirectTile) streams = 1;
  const std::int64_t run = count / streams;
  std::int64_t page = begin / task.page_tokens;
  std::int64_t slot = begin % task.page_tokens;
  for (std::int64_t stream = 0; stream < streams; ++stream) {
    const void** to = key_rows + stream;
    for (std::int64_t rest = run; rest > 0;) {
      const std::int64_t rows = std::min(rest, task.page_tokens - slot);
      const std::byte* key = task.keys + task.page_table[page] * task.page_bytes + slot * task.row_bytes;
      for (std::int64_t i = 0; i < rows; ++i, to += streams, key += task.row_bytes) *to = key;
      rest -= rows;
      slot += rows;
      if (slot == task.page_tokens) {
        slot = 0;
        ++page;
      }
    }
  }
  std::fill_n(key_rows + count, kPair, key_rows[count - 1]);
}

/// A block of query rows.
struct Block {
  std::int64_t row;  ///< of the task: indexes max, sum, correction and acc
  int valid;         ///< rows that exist; the rest of the block is computed and dropped
  const float* q;    ///< [pair][R][kPair]
  float* scores;     ///< [key][R]
};

/// score = cap * tanh(score / cap), in place; `padded` is a multiple of kLanes.
HWY_NOINLINE void cap_scores(float* scores, std::int64_t padded, float soft_cap) {
  const Vec cap = hn::Set(kF32, soft_cap);
  const Vec inverse = hn::Set(kF32, 1.0f / soft_cap);
  for (std::int64_t i = 0; i < padded; i += kLanes) {
    const Vec x = hn::Mul(hn::LoadU(kF32, scores + i), inverse);
    hn::StoreU(hn::Mul(hn::Tanh(kF32, x), cap), kF32, scores + i);
  }
}

/// 2^x for x <= 0 within 8e-8 of the value; 0 below the normal range. A NaN stays one, or a query of NaN
/// would pass for one that sees nothing. Half the operations of hn::Exp.
HWY_INLINE Vec exp2_of(Vec x) {
  // Adding 1.5 * 2^23 rounds to the nearest integer; with the bias on top, the lowest bits are the exponent.
  const Vec shift = hn::Set(kF32, 0x1.8p23f + 127.0f);
  const Vec shifted = hn::Add(x, shift);
  const Vec r = hn::Sub(x, hn::Sub(shifted, shift));
  // Minimax for 2^r, |r| <= 1/2.
  Vec p = hn::Set(kF32, 1.534581243e-4f);
  p = hn::MulAdd(p, r, hn::Set(kF32, 1.339993090e-3f));
  p = hn::MulAdd(p, r, hn::Set(kF32, 9.618489072e-3f));
  p = hn::MulAdd(p, r, hn::Set(kF32, 5.550328642e-2f));
  p = hn::MulAdd(p, r, hn::Set(kF32, 0.2402264625f));
  p = hn::MulAdd(p, r, hn::Set(kF32, 0.6931471825f));
  p = hn::MulAdd(p, r, hn::Set(kF32, 1.0f));
  const hn::Repartition<std::uint32_t, F32> d32;
  const Vec power = hn::BitCast(kF32, hn::ShiftLeft<23>(hn::BitCast(d32, shifted)));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(kF32, -126.0f)), hn::Mul(p, power));
}

/// The highest score by lane.
HWY_INLINE Vec highest_scores(const float* scores, std::int64_t padded) {
  Vec top[4];  // a single one would wait for itself
  for (Vec& t : top) t = hn::Set(kF32, -kInfinity);
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= padded; i += 4 * kLanes) {
    HELIX_UNROLL for (int j = 0; j < 4; ++j) {
      top[j] = hn::Max(top[j], hn::LoadU(kF32, scores + i + j * kLanes));
    }
  }
  for (; i < padded; i += kLanes) top[0] = hn::Max(top[0], hn::LoadU(kF32, scores + i));
  return hn::Max(hn::Max(top[0], top[1]), hn::Max(top[2], top[3]));
}

/// weight = 2^(score - pivot), in place, and the weights' sum by lane.
HWY_INLINE Vec weigh_scores(float* scores, std::int64_t padded, Vec pivot) {
  Vec total = hn::Zero(kF32);
  for (std::int64_t i = 0; i < padded; i += kLanes) {
    const Vec weight = exp2_of(hn::Sub(hn::LoadU(kF32, scores + i), pivot));
    hn::StoreU(weight, kF32, scores + i);
    total = hn::Add(total, weight);
  }
  return total;
}

/// Scores of a block, [key][R], to weights; the rows' running max and sum, and their corrections: what
/// earlier sums shrink by.
template <int R>
HWY_NOINLINE void softmax_block(const State& s, const Block& block, std::int64_t count) {
  constexpr int K = kLanes / R;
  float* scores = block.scores;
  float* max = s.max + block.row;
  float* sum = s.sum + block.row;
  float* correction = s.correction + block.row;
  const std::int64_t padded = round_up(count, K) * R;
  if (s.task.soft_cap > 0.0f) cap_scores(scores, padded, s.task.soft_cap * kLog2E);
  std::fill(scores + count * R, scores + padded, -kInfinity);
  alignas(64) float lanes[kLanes];
  hn::Store(highest_scores(scores, padded), kF32, lanes);
  for (int r = 0; r < R; ++r) {
    float highest = r < block.valid ? max[r] : -kInfinity;
    for (int k = 0; k < K; ++k) highest = std::max(highest, lanes[k * R + r]);
    // All scores -inf: any finite pivot gives weights of 0 where -inf would give NaN.
    const float pivot = highest == -kInfinity ? 0.0f : highest;
    for (int k = 0; k < K; ++k) lanes[k * R + r] = pivot;
    if (r >= block.valid) continue;
    correction[r] = max[r] == pivot ? 1.0f : std::exp2(max[r] - pivot);
    max[r] = highest;
  }
  hn::Store(weigh_scores(scores, padded, hn::Load(kF32, lanes)), kF32, lanes);
  for (int r = 0; r < block.valid; ++r) {
    float added = 0.0f;
    for (int k = 0; k < K; ++k) added += lanes[k * R + r];
    sum[r] = sum[r] * correction[r] + added;
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

/// Elements from a key row to the value row of the same token.
template <class T>
HWY_INLINE std::int64_t key_to_value(const AttentionTask& task) {
  return (task.values - task.keys) / static_cast<std::int64_t>(sizeof(T));
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

/// Scores of one row, [kPackedTile], to weights; the row's running max and sum, and its correction.
HWY_NOINLINE void softmax_row(const State& s, std::int64_t row, std::int64_t count, float* scores) {
  const std::int64_t padded = round_up(count, kLanes);
  if (s.task.soft_cap > 0.0f) cap_scores(scores, padded, s.task.soft_cap * kLog2E);
  std::fill(scores + count, scores + padded, -kInfinity);
  const float highest =
      std::max(s.max[row], hn::GetLane(hn::MaxOfLanes(kF32, highest_scores(scores, padded))));
  const float pivot = highest == -kInfinity ? 0.0f : highest;
  const Vec total = weigh_scores(scores, padded, hn::Set(kF32, pivot));
  const float correction = s.max[row] == pivot ? 1.0f : std::exp2(s.max[row] - pivot);
  s.sum[row] = s.sum[row] * correction + hn::GetLane(hn::SumOfLanes(kF32, total));
  s.max[row] = highest;
  s.correction[row] = correction;
}

/// Asks for rows [begin, end) of the next tile: the products take so long that no hardware prefetch would.
HWY_NOINLINE void prefetch_rows(const State& s, std::int64_t begin, std::int64_t end) {
  const bool has_values = s.task.values != s.task.keys;
  for (std::int64_t key = begin; key < end; ++key) {
    const auto* k = static_cast<const char*>(s.key_rows[key]);
    const auto* v = static_cast<const char*>(s.value_rows[key]);
    for (std::int64_t byte = 0; byte < s.task.row_bytes; byte += 64) {
      __builtin_prefetch(k + byte, 0, 2);
      if (has_values) __builtin_prefetch(v + byte, 0, 2);
    }
  }
}

/// Up to kPackedRows rows against the keys of `range`. q is [block][d][kMaxRows], scores are
/// [row][kPackedTile].
template <class T>
HWY_NOINLINE void packed(const State& s, std::int64_t first_row, std::int64_t num_rows, TokenRange range) {
  find_rows(s.task, range.begin, std::min(kPackedTile, range.size()), s.key_rows, s.value_rows);
  const std::int64_t padded_rows = round_up(num_rows, kMaxRows);
  for (std::int64_t begin = range.begin; begin < range.end; begin += kPackedTile) {
    const std::int64_t count = std::min(kPackedTile, range.end - begin);
    widen_tile<T>(s, count);
    const std::int64_t next_count = std::min(kPackedTile, range.end - begin - count);
    if (next_count > 0) find_rows(s.task, begin + count, next_count, s.key_rows, s.value_rows);
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
  if (num_rows <= kDirectRows && s.d == s.task.head_dim && s.dv == s.task.value_dim) {
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
