// SPDX-License-Identifier: Apache-2.0
// Stored elements as f32 vectors, and sums across vectors, shared by attention and linear kernels. Compiled
// once per Highway target, hence the toggled include guard.
#if defined(HELIX_SRC_CPU_WIDEN_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_WIDEN_INL_HPP_
#undef HELIX_SRC_CPU_WIDEN_INL_HPP_
#else
#define HELIX_SRC_CPU_WIDEN_INL_HPP_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <hwy/highway.h>

#include <helix/dtype.hpp>

// Arrays of vectors stay in registers only if their loops are unrolled early. Not under sanitizers, where
// this would turn seconds of compilation into minutes.
#ifndef HELIX_UNROLL
#if defined(__clang__)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define HELIX_UNROLL
#else
#define HELIX_UNROLL _Pragma("clang loop unroll(full)")
#endif
// Without optimisation nothing is unrolled; ignore that warning.
#pragma clang diagnostic ignored "-Wpass-failed"
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HELIX_UNROLL
#else
#define HELIX_UNROLL _Pragma("GCC unroll 16")
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using Vec = hn::Vec<F32>;
inline constexpr F32 kF32{};
/// Lanes of a vector, and the number of accumulators of a dot block: as many vectors as lanes reduce to one
/// vector.
inline constexpr int kLanes = static_cast<int>(HWY_LANES(float) < 16 ? HWY_LANES(float) : 16);
static_assert(kLanes == 4 || kLanes == 8 || kLanes == 16,
              "the sums across vectors are written for 4, 8 and 16 lanes");
/// Elements that one load_pair covers.
inline constexpr int kPair = 2 * kLanes;

/// Whether kernels have all readings that a tuner chooses from. The portable code, for machines that nobody
/// measures, has one: the others were a quarter of the compile time of attend.cpp and vectors.cpp.
inline constexpr bool kHasReadings = HWY_TARGET != HWY_EMU128;

/// Keeps `v` in a register. Otherwise compilers fold a load that feeds several products into each of them,
/// and loads become the limit instead of products: 50 instead of 75 % of the peak in the packed scores.
HWY_INLINE void pin([[maybe_unused]] Vec& v) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128
  __asm__("" : "+v"(v.raw));
#endif
}

/// Two vectors of kPair elements. For bf16 `a` holds the even and `b` the odd elements, because a shift and a
/// mask cost one operation per vector and an in-order conversion two. For other types `a` is the first half.
/// load_pair_order() brings the other operand into this order once, and store_pair_order() restores the order
/// of results.
struct Pair {
#if HWY_ARCH_ARM
  // The implicit constructor would be compiled without this instruction set's attributes; g++ then refuses to
  // inline Vec's.
  HWY_INLINE Pair() {}
  HWY_INLINE Pair(Vec first, Vec second) : a(first), b(second) {}
#endif
  Vec a;
  Vec b;
};

template <class T>
inline constexpr bool kSplitsEvenOdd = std::is_same_v<T, bf16>;

/// Whether products take 12 sums at once. 8 sums, each with a latency of 4 cycles, reach 76 % of the rate of
/// two multipliers of 8 lanes; 12 reach 83 to 88 % (Zen 3). The two vectors of a pair of e4m3 cannot be
/// loaded separately.
template <class T>
inline constexpr bool kHasWideGroups = HWY_TARGET == HWY_AVX2 && !std::is_same_v<T, fp8_e4m3>;

/// Factor that load_pair leaves out: stored value = loaded value * kDecodeFactor.
template <class T>
inline constexpr float kDecodeFactor = std::is_same_v<T, fp8_e4m3> ? 256.0f : 1.0f;

HWY_INLINE Pair load_pair(const float* from) {
  return {hn::LoadU(kF32, from), hn::LoadU(kF32, from + kLanes)};
}

HWY_INLINE Pair load_pair(const bf16* from) {
  const hn::Repartition<std::uint16_t, F32> d16;
  const hn::Repartition<std::uint32_t, F32> d32;
  const auto words = hn::BitCast(d32, hn::LoadU(d16, &from->bits));
  return {hn::BitCast(kF32, hn::ShiftLeft<16>(words)),
          hn::BitCast(kF32, hn::And(words, hn::Set(d32, 0xffff0000u)))};
}

HWY_INLINE Pair load_pair(const f16* from) {
  const hn::Rebind<hwy::float16_t, F32> d16;
  const auto* halves = reinterpret_cast<const hwy::float16_t*>(from);
  return {hn::PromoteTo(kF32, hn::LoadU(d16, halves)), hn::PromoteTo(kF32, hn::LoadU(d16, halves + kLanes))};
}

// e4m3 bits moved into f16's positions mean value / 256, including subnormals, and f16 subnormals convert
// without the microcode assist that f32 subnormals would need.
HWY_INLINE Pair load_pair(const fp8_e4m3* from) {
  const hn::Repartition<std::uint16_t, F32> d16;
  const hn::Rebind<std::uint8_t, decltype(d16)> d8;
  const hn::Rebind<hwy::float16_t, F32> half;
  const auto bytes = hn::PromoteTo(d16, hn::LoadU(d8, &from->bits));
  const auto magnitude = hn::And(bytes, hn::Set(d16, std::uint16_t{0x7f}));
  const auto sign = hn::ShiftLeft<8>(hn::AndNot(hn::Set(d16, std::uint16_t{0x7f}), bytes));
  const auto is_nan = hn::Eq(magnitude, hn::Set(d16, std::uint16_t{0x7f}));
  const auto value = hn::IfThenElse(is_nan, hn::Set(d16, std::uint16_t{0x7e00}), hn::ShiftLeft<7>(magnitude));
  const auto halves = hn::Or(sign, value);
  const hn::Half<decltype(d16)> half16;
  return {hn::PromoteTo(kF32, hn::BitCast(half, hn::LowerHalf(half16, halves))),
          hn::PromoteTo(kF32, hn::BitCast(half, hn::UpperHalf(half16, halves)))};
}

/// Elements that ask() prefetches: whole pairs and whole cache lines.
template <class T>
inline constexpr int kAsked = std::max(kPair, 64 / static_cast<int>(sizeof(T)));

/// Prefetches kAsked elements. kLevel as in __builtin_prefetch: 3 is L1, 2 is L2.
template <int kLevel, class T>
HWY_INLINE void ask(const T* from) {
  const char* line = reinterpret_cast<const char*>(from);
  HELIX_UNROLL for (int byte = 0; byte < kAsked<T> * static_cast<int>(sizeof(T)); byte += 64) {
    __builtin_prefetch(line + byte, 0, kLevel);
  }
}

/// Loads the last `count` < kPair elements of a row, with zeros after them. Reads nothing past the row.
template <class T>
HWY_INLINE Pair load_pair_tail(const T* from, std::int64_t count) {
  T padded[kPair];
  std::memset(static_cast<void*>(padded), 0, sizeof(padded));
  std::memcpy(static_cast<void*>(padded), from, static_cast<std::size_t>(count) * sizeof(T));
  return load_pair(padded);
}

/// Writes `count` floats times `factor`, zero-padded to a multiple of kPair, in the order of load_pair<T>;
/// pairs are `step` floats apart in `to`.
template <class T>
HWY_NOINLINE void load_pair_order(const float* from, std::int64_t count, float factor, float* to,
                                  std::int64_t step) {
  const Vec f = hn::Set(kF32, factor);
  for (std::int64_t i = 0; i < count; i += kPair, to += step) {
    float padded[kPair] = {};
    const float* source = from + i;
    if (count - i < kPair) {
      std::memcpy(padded, source, static_cast<std::size_t>(count - i) * sizeof(float));
      source = padded;
    }
    Vec a;
    Vec b;
    if constexpr (kSplitsEvenOdd<T>) {
      const Vec lower = hn::LoadU(kF32, source);
      const Vec upper = hn::LoadU(kF32, source + kLanes);
      a = hn::ConcatEven(kF32, upper, lower);
      b = hn::ConcatOdd(kF32, upper, lower);
    } else {
      a = hn::LoadU(kF32, source);
      b = hn::LoadU(kF32, source + kLanes);
    }
    hn::StoreU(hn::Mul(a, f), kF32, to);
    hn::StoreU(hn::Mul(b, f), kF32, to + kLanes);
  }
}

/// The inverse: writes `count` results, in the order of load_pair<T>, times `factor`, in natural order.
template <class T>
HWY_NOINLINE void store_pair_order(const float* from, std::int64_t count, float factor, float* to) {
  const Vec f = hn::Set(kF32, factor);
  for (std::int64_t i = 0; i < count; i += kPair) {
    float padded[kPair];
    const bool is_tail = count - i < kPair;
    float* target = is_tail ? padded : to + i;
    const Vec a = hn::Mul(hn::LoadU(kF32, from + i), f);
    const Vec b = hn::Mul(hn::LoadU(kF32, from + i + kLanes), f);
    if constexpr (kSplitsEvenOdd<T>) {
      hn::StoreInterleaved2(a, b, kF32, target);
    } else {
      hn::StoreU(a, kF32, target);
      hn::StoreU(b, kF32, target + kLanes);
    }
    if (is_tail) std::memcpy(to + i, padded, static_cast<std::size_t>(count - i) * sizeof(float));
  }
}

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

/// Transposes a square of kLanes x kLanes in place. 16 lanes: 64 shuffles.
HWY_INLINE void transpose(Vec (&v)[kLanes]) {
  const hn::Repartition<double, F32> d64;
  HELIX_UNROLL for (int g = 0; g < kLanes; g += 4) {
    const auto a0 = hn::BitCast(d64, hn::InterleaveLower(kF32, v[g], v[g + 1]));
    const auto a1 = hn::BitCast(d64, hn::InterleaveUpper(kF32, v[g], v[g + 1]));
    const auto b0 = hn::BitCast(d64, hn::InterleaveLower(kF32, v[g + 2], v[g + 3]));
    const auto b1 = hn::BitCast(d64, hn::InterleaveUpper(kF32, v[g + 2], v[g + 3]));
    v[g] = hn::BitCast(kF32, hn::InterleaveLower(d64, a0, b0));
    v[g + 1] = hn::BitCast(kF32, hn::InterleaveUpper(d64, a0, b0));
    v[g + 2] = hn::BitCast(kF32, hn::InterleaveLower(d64, a1, b1));
    v[g + 3] = hn::BitCast(kF32, hn::InterleaveUpper(d64, a1, b1));
  }
  // Block b of v[4 * g + c] now holds column 4 * b + c of rows 4 * g .. 4 * g + 3.
  if constexpr (kLanes == 8) {
    HELIX_UNROLL for (int c = 0; c < 4; ++c) {
      const Vec lower = v[c];
      const Vec upper = v[(4 + c) % kLanes];
      v[c] = hn::ConcatLowerLower(kF32, upper, lower);
      v[(4 + c) % kLanes] = hn::ConcatUpperUpper(kF32, upper, lower);
    }
  } else if constexpr (kLanes == 16) {
    HELIX_UNROLL for (int c = 0; c < 4; ++c) {
      const Vec r0 = v[c], r1 = v[(4 + c) % kLanes], r2 = v[(8 + c) % kLanes], r3 = v[(12 + c) % kLanes];
      const Vec lower02 = hn::ConcatLowerLower(kF32, r2, r0);
      const Vec lower13 = hn::ConcatLowerLower(kF32, r3, r1);
      const Vec upper02 = hn::ConcatUpperUpper(kF32, r2, r0);
      const Vec upper13 = hn::ConcatUpperUpper(kF32, r3, r1);
      v[c] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(lower13), lower02);
      v[(4 + c) % kLanes] = hn::OddEvenBlocks(lower13, hn::SwapAdjacentBlocks(lower02));
      v[(8 + c) % kLanes] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(upper13), upper02);
      v[(12 + c) % kLanes] = hn::OddEvenBlocks(upper13, hn::SwapAdjacentBlocks(upper02));
    }
  }
}

/// Transposes elements [d, d + kPair) of kLanes rows to one vector per element: column j in pair order goes
/// to to + j * step. `count` of the elements exist.
template <class T>
HWY_NOINLINE void transpose_pairs(const T* const* rows, std::int64_t d, std::int64_t count, float* to,
                                  std::int64_t step) {
  if constexpr (kSplitsEvenOdd<T>) {
    // Move words of two elements and split them after the shuffles: half as many shuffles.
    const hn::Repartition<std::uint16_t, F32> d16;
    const hn::Repartition<std::uint32_t, F32> d32;
    Vec words[kLanes];
    if (count >= kPair) {
      HELIX_UNROLL for (int k = 0; k < kLanes; ++k) {
        words[k] = hn::BitCast(kF32, hn::LoadU(d16, &rows[k][d].bits));
      }
    } else {
      for (int k = 0; k < kLanes; ++k) {
        std::uint16_t padded[kPair] = {};
        std::memcpy(padded, rows[k] + d, static_cast<std::size_t>(count) * sizeof(T));
        words[k] = hn::BitCast(kF32, hn::LoadU(d16, padded));
      }
    }
    transpose(words);
    HELIX_UNROLL for (int j = 0; j < kLanes; ++j) {
      const auto word = hn::BitCast(d32, words[j]);
      hn::StoreU(hn::BitCast(kF32, hn::ShiftLeft<16>(word)), kF32, to + j * step);
      hn::StoreU(hn::BitCast(kF32, hn::And(word, hn::Set(d32, 0xffff0000u))), kF32, to + (kLanes + j) * step);
    }
  } else {
    Vec a[kLanes];
    Vec b[kLanes];
    for (int k = 0; k < kLanes; ++k) {
      const Pair pair = count >= kPair ? load_pair(rows[k] + d) : load_pair_tail(rows[k] + d, count);
      a[k] = pair.a;
      b[k] = pair.b;
    }
    transpose(a);
    transpose(b);
    HELIX_UNROLL for (int j = 0; j < kLanes; ++j) {
      hn::StoreU(a[j], kF32, to + j * step);
      hn::StoreU(b[j], kF32, to + (kLanes + j) * step);
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

/// The second vector of the pair at `from`, given its first vector `a`.
template <class T>
HWY_INLINE Vec load_second(const T* from, [[maybe_unused]] Vec a) {
#if HWY_TARGET == HWY_AVX2
  if constexpr (std::is_same_v<T, bf16>) {
    // The lower half of each word of `a` is 0. A mask would take a register.
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return Vec{_mm256_castsi256_ps(_mm256_blend_epi16(_mm256_castps_si256(a.raw), words, 0xaa))};
  }
#endif
  return load_pair(from).b;
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

/// Adds kLanes dot products of kLanes stored rows with one vector to acc. Reads kRun pairs of a row before
/// the next row, which keeps streams sequential: alternating between 16 rows per cache line halved the
/// bandwidth.
template <int kRun, class Rows>
HWY_INLINE void dot_runs(Rows& rows, std::int64_t row, const float* x, std::int64_t d, Vec (&acc)[kLanes]) {
  using T = std::remove_cvref_t<decltype(*rows[row])>;
  Pair q[kRun];
  HELIX_UNROLL for (int i = 0; i < kRun; ++i) q[i] = load_pair(x + d + i * kPair);
  HELIX_UNROLL for (int k = 0; k < kLanes; ++k) {
    const auto* from = rows[row + k] + d;
    HELIX_UNROLL for (int i = 0; i < kRun; ++i) {
      const Pair w = load_pair(from + i * kPair);
      if (i * kPair % kAsked<T> == 0) rows.prefetch(row + k, kLanes, d + i * kPair);
      acc[k] = hn::MulAdd(w.b, q[i].b, hn::MulAdd(w.a, q[i].a, acc[k]));
    }
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
  if constexpr (K * R == kLanes) {
    hn::StoreU(sum_each(acc), kF32, dots);
  } else {
    HELIX_UNROLL for (int i = 0; i < K * R; i += 4) {
      store_sums(acc[i], acc[i + 1], acc[i + 2], acc[i + 3], dots + i);
    }
  }
}

/// Dot products of `count` stored rows of `length` elements with R vectors: dots[row][R]. `x` holds the
/// vectors in the order of load_pair, [pair][R][kPair], so that one pointer serves them all. `count` is in
/// effect rounded up to a multiple of kLanes / R; the caller makes the extra rows readable and their dots
/// writable. kHasTail: length is not a multiple of kPair. The order of additions is the same for every R.
template <int R, bool kHasTail, class Rows>
HWY_INLINE void dot_block(Rows& shared_rows, std::int64_t count, const float* x, std::int64_t length,
                          float* dots) {
  Rows rows = shared_rows;  // in registers
  using T = std::remove_cvref_t<decltype(*rows[0])>;
  constexpr int K = kLanes / R;
  std::int64_t row = 0;
  if constexpr (R == 1) {
    // Pairs of `x` that fit in registers beside the sums.
    constexpr int kRun = kLanes == 16 ? 4 : std::min(2, kAsked<T> / kPair);
    const std::int64_t whole = kHasTail ? length / kPair * kPair : length;
    for (; row < count; row += K) {
      Vec acc[kLanes];
      HELIX_UNROLL for (int i = 0; i < kLanes; ++i) acc[i] = hn::Zero(kF32);
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
      hn::StoreU(sum_each(acc), kF32, dots + row);
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
