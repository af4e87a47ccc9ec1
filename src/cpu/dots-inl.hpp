// SPDX-License-Identifier: Apache-2.0
// Dot products of stored rows with f32 vectors, and sums across vectors, shared by attention and linear
// kernels. Compiled once per Highway target, hence the toggled include guard.
#if defined(HELIX_SRC_CPU_DOTS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_DOTS_INL_HPP_
#undef HELIX_SRC_CPU_DOTS_INL_HPP_
#else
#define HELIX_SRC_CPU_DOTS_INL_HPP_
#endif

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <hwy/highway.h>

#include <helix/dtype.hpp>

#include "cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {

/// Whether products take 12 sums at once. 8 sums, each with a latency of 4 cycles, reach 76 % of the rate of
/// two multipliers of 8 lanes; 12 reach 83 to 88 % (Zen 3). The two vectors of a pair of e4m3 cannot be
/// loaded separately.
template <class T>
inline constexpr bool kHasWideGroups = HWY_TARGET == HWY_AVX2 && !std::is_same_v<T, fp8_e4m3>;

/// Lane pairs (x0+x2, y0+y2, x1+x3, y1+y3) of each 128-bit block.
HWY_INLINE Vec fold_lanes(Vec x, Vec y) {
  return hn::Add(hn::InterleaveLower(kF32, x, y), hn::InterleaveUpper(kF32, x, y));
}

/// Sums each of four vectors within each 128-bit block: lane i of a block is the sum of that block of the
/// i-th vector.
HWY_INLINE Vec fold_block(Vec x0, Vec x1, Vec x2, Vec x3) {
  const hn::Repartition<double, F32> d64;
  const auto xy = hn::BitCast(d64, fold_lanes(x0, x1));
  const auto zw = hn::BitCast(d64, fold_lanes(x2, x3));
  return hn::Add(hn::BitCast(kF32, hn::InterleaveLower(d64, xy, zw)),
                 hn::BitCast(kF32, hn::InterleaveUpper(d64, xy, zw)));
}

/// The sums of kLanes vectors as one vector: lane i is the sum of acc[i].
HWY_INLINE Vec sum_each(const Vec (&acc)[kLanes]) {
  if constexpr (kLanes == 4) {
    return fold_block(acc[0], acc[1], acc[2], acc[3]);
  } else if constexpr (kLanes == 8) {
    const Vec lower = fold_block(acc[0], acc[1], acc[2], acc[3]);
    const Vec upper = fold_block(acc[4 % kLanes], acc[5 % kLanes], acc[6 % kLanes], acc[7 % kLanes]);
    return hn::Add(hn::ConcatLowerLower(kF32, upper, lower), hn::ConcatUpperUpper(kF32, upper, lower));
  } else {
    const Vec x0 = fold_block(acc[0], acc[1], acc[2], acc[3]);
    const Vec x1 = fold_block(acc[4 % kLanes], acc[5 % kLanes], acc[6 % kLanes], acc[7 % kLanes]);
    const Vec x2 = fold_block(acc[8 % kLanes], acc[9 % kLanes], acc[10 % kLanes], acc[11 % kLanes]);
    const Vec x3 = fold_block(acc[12 % kLanes], acc[13 % kLanes], acc[14 % kLanes], acc[15 % kLanes]);
    // y02 holds two blocks of partial sums of x0, then two of x2; y13 those of x1 and x3.
    const Vec y02 = hn::Add(hn::ConcatLowerLower(kF32, x2, x0), hn::ConcatUpperUpper(kF32, x2, x0));
    const Vec y13 = hn::Add(hn::ConcatLowerLower(kF32, x3, x1), hn::ConcatUpperUpper(kF32, x3, x1));
    return hn::Add(hn::OddEvenBlocks(y13, y02), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(y02, y13)));
  }
}

/// Stores the sums of four vectors, each summed in the order of sum_each().
HWY_INLINE void store_sums(Vec x0, Vec x1, Vec x2, Vec x3, float* to) {
  const Vec sums = fold_block(x0, x1, x2, x3);
  if constexpr (kLanes == 4) {
    hn::StoreU(sums, kF32, to);
  } else {
    const hn::Half<F32> half;
    const auto halves = hn::Add(hn::LowerHalf(half, sums), hn::UpperHalf(half, sums));
    if constexpr (kLanes == 8) {
      hn::StoreU(halves, half, to);
    } else {
      const hn::Half<decltype(half)> quarter;
      hn::StoreU(hn::Add(hn::LowerHalf(quarter, halves), hn::UpperHalf(quarter, halves)), quarter, to);
    }
  }
}

/// Stores the sums of N vectors.
template <int N>
HWY_INLINE void store_sums(const Vec (&acc)[N], float* to) {
  if constexpr (N == kLanes) {
    hn::StoreU(sum_each(acc), kF32, to);
  } else {
    HELIX_UNROLL for (int i = 0; i < N; i += 4) {
      store_sums(acc[i], acc[i + 1], acc[i + 2], acc[i + 3], to + i);
    }
  }
}

/// acc += a * b in acc's register. With 16 registers, g++ otherwise uses other forms of the instruction in
/// places, copies what they overwrite, and spills.
HWY_INLINE void add_product(Vec& acc, Vec a, Vec b) {
#if HWY_TARGET == HWY_AVX2
  __m256 sum = acc.raw;  // no array elements as operands: these stay in memory
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a.raw), "x"(b.raw));
  acc.raw = sum;
#else
  acc = hn::MulAdd(b, a, acc);
#endif
}

/// acc[k * R + r] += products of w[k] with the r-th pair of `x`: all first vectors, then all second ones.
template <int R, int K>
HWY_INLINE void add_products(const Pair (&w)[K], const float* x, Vec* acc) {
  HELIX_UNROLL for (int r = 0; r < R; ++r) {
    Vec a = hn::LoadU(kF32, x + r * kPair);
    if constexpr (K > 1) pin(a);
    HELIX_UNROLL for (int k = 0; k < K; ++k) acc[k * R + r] = hn::MulAdd(w[k].a, a, acc[k * R + r]);
  }
  HELIX_UNROLL for (int r = 0; r < R; ++r) {
    Vec b = hn::LoadU(kF32, x + r * kPair + kLanes);
    if constexpr (K > 1) pin(b);
    HELIX_UNROLL for (int k = 0; k < K; ++k) acc[k * R + r] = hn::MulAdd(w[k].b, b, acc[k * R + r]);
  }
}

/// As above, with the pairs `d` elements into rows[k].
template <int R, int K, class T>
HWY_INLINE void add_products(const T* const (&rows)[K], std::int64_t d, const float* x, Vec* acc) {
  if constexpr (kHasWideGroups<T> && R * K > kLanes) {
    // Beside the sums and one vector of `x` there are registers for one vector of each pair.
    Vec w[K];
    HELIX_UNROLL for (int k = 0; k < K; ++k) w[k] = load_pair(rows[k] + d).a;
    HELIX_UNROLL for (int r = 0; r < R; ++r) {
      const Vec a = hn::LoadU(kF32, x + r * kPair);
      HELIX_UNROLL for (int k = 0; k < K; ++k) add_product(acc[k * R + r], a, w[k]);
    }
    HELIX_UNROLL for (int k = 0; k < K; ++k) w[k] = load_second(rows[k] + d, w[k]);
    HELIX_UNROLL for (int r = 0; r < R; ++r) {
      const Vec b = hn::LoadU(kF32, x + r * kPair + kLanes);
      HELIX_UNROLL for (int k = 0; k < K; ++k) add_product(acc[k * R + r], b, w[k]);
    }
  } else {
    Pair w[K];
    HELIX_UNROLL for (int k = 0; k < K; ++k) w[k] = load_pair(rows[k] + d);
    add_products<R, K>(w, x, acc);
  }
}

/// Adds K dot products of K stored rows with one vector to acc. Reads kRun pairs of a row before the next
/// row, which keeps streams sequential: alternating between 16 rows per cache line halved the bandwidth.
template <int kRun, int K, class Rows>
HWY_INLINE void dot_runs(Rows& rows, std::int64_t row, const float* x, std::int64_t d, Vec (&acc)[K]) {
  using T = std::remove_cvref_t<decltype(*rows[row])>;
  Pair q[kRun];
  HELIX_UNROLL for (int i = 0; i < kRun; ++i) q[i] = load_pair(x + d + i * kPair);
  HELIX_UNROLL for (int k = 0; k < K; ++k) {
    const auto* from = rows[row + k] + d;
    HELIX_UNROLL for (int i = 0; i < kRun; ++i) {
      const Pair w = load_pair(from + i * kPair);
      // Where runs are whole lines, only i decides.
      const std::int64_t at = kRun * kPair % kAsked<T> == 0 ? i * kPair : d + i * kPair;
      if (at % kAsked<T> == 0) rows.prefetch(row + k, K, d + i * kPair);
      acc[k] = hn::MulAdd(w.b, q[i].b, hn::MulAdd(w.a, q[i].a, acc[k]));
    }
  }
}

/// dot_block() of K rows starting at `row`, with several vectors.
template <int R, int K, bool kHasTail, class Rows>
HWY_INLINE void dot_group(Rows& rows, std::int64_t row, const float* x, std::int64_t length, float* dots) {
  using T = std::remove_cvref_t<decltype(*rows[row])>;
  const T* from[K];
  HELIX_UNROLL for (int k = 0; k < K; ++k) from[k] = rows[row + k];
  Vec acc[K * R];
  HELIX_UNROLL for (int i = 0; i < K * R; ++i) acc[i] = hn::Zero(kF32);
  const std::int64_t whole = kHasTail ? length / kPair * kPair : length;
  const std::int64_t asked = whole / kAsked<T> * kAsked<T>;
  std::int64_t d = 0;
  for (; d < asked; d += kAsked<T>) {
    HELIX_UNROLL for (int k = 0; k < K; ++k) rows.prefetch(row + k, K, d);
    HELIX_UNROLL for (int i = 0; i < kAsked<T>; i += kPair, x += R * kPair) {
      add_products<R, K>(from, d + i, x, acc);
    }
  }
  if constexpr (kPair < kAsked<T>) {
    if (d < whole) {
      HELIX_UNROLL for (int k = 0; k < K; ++k) rows.prefetch(row + k, K, d);
      for (; d < whole; d += kPair, x += R * kPair) add_products<R, K>(from, d, x, acc);
    }
  }
  if constexpr (kHasTail) {
    if (whole < length) {
      Pair w[K];
      HELIX_UNROLL for (int k = 0; k < K; ++k) w[k] = load_pair_tail(from[k] + whole, length - whole);
      add_products<R, K>(w, x, acc);
    }
  }
  store_sums(acc, dots);
}

/// Dot products of `count` stored rows of `length` elements with R vectors: dots[row][R]. `x` holds the
/// vectors in the order of load_pair, [pair][R][kPair], so that one pointer serves them all. `count` is in
/// effect rounded up to a multiple of K, the rows at a time; the caller makes the extra rows readable and
/// their dots writable. kHasTail: length is not a multiple of kPair. The order of additions is the same for
/// every R and K.
template <int R, bool kHasTail, int K = kLanes / R, class Rows>
HWY_INLINE void dot_block(Rows& shared_rows, std::int64_t count, const float* x, std::int64_t length,
                          float* dots) {
  Rows rows = shared_rows;  // in registers
  using T = std::remove_cvref_t<decltype(*rows[0])>;
  std::int64_t row = 0;
  if constexpr (R == 1) {
    // Pairs of `x` that fit in registers beside the sums.
    constexpr int kRun = kLanes == 16 ? 4 : std::min(2, kAsked<T> / kPair);
    const std::int64_t whole = kHasTail ? length / kPair * kPair : length;
    for (; row < count; row += K) {
      Vec acc[K];
      HELIX_UNROLL for (int i = 0; i < K; ++i) acc[i] = hn::Zero(kF32);
      std::int64_t d = 0;
      for (; d + kRun * kPair <= whole; d += kRun * kPair) dot_runs<kRun>(rows, row, x, d, acc);
      for (; d < whole; d += kPair) dot_runs<1>(rows, row, x, d, acc);
      if constexpr (kHasTail) {
        if (whole < length) {
          const Pair q = load_pair(x + whole);
          HELIX_UNROLL for (int k = 0; k < K; ++k) {
            const Pair w = load_pair_tail(rows[row + k] + whole, length - whole);
            acc[k] = hn::MulAdd(w.b, q.b, hn::MulAdd(w.a, q.a, acc[k]));
          }
        }
      }
      store_sums(acc, dots + row);
    }
  } else {
    if constexpr (R == 4 && kHasWideGroups<T>) {
      // Never leaves exactly one row, which would need another row to go with it.
      for (; row + 3 <= count && row + 4 != count; row += 3) {
        dot_group<R, 3, kHasTail>(rows, row, x, length, dots + row * R);
      }
    }
    for (; row < count; row += K) dot_group<R, K, kHasTail>(rows, row, x, length, dots + row * R);
  }
  shared_rows = rows;
}

}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
