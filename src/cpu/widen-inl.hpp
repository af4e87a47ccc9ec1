// SPDX-License-Identifier: Apache-2.0
// Stored elements as f32 vectors: loads, stores and transposes, shared by attention and linear kernels.
// Compiled once per Highway target, hence the toggled include guard.
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
/// measures, has one: the others were a quarter of the compile time of attention and vectors.cpp.
inline constexpr bool kHasReadings = HWY_TARGET != HWY_EMU128;

/// Keeps `v` in a register. Otherwise compilers fold a load that feeds several products into each of them,
/// and loads become the limit instead of products: 50 instead of 75 % of the peak in the packed scores.
HWY_INLINE void pin([[maybe_unused]] Vec& v) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128
  __asm__("" : "+v"(v.raw));
#endif
}

/// Keeps the instructions before it before those after it. Otherwise compilers gather loads and prefetches of
/// many lines, which a core then waits for together.
HWY_INLINE void keep_order() {
  __asm__ volatile("");
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

/// Elements that ask() prefetches: whole pairs and whole cache lines.
template <class T>
inline constexpr int kAsked = std::max(kPair, 64 / static_cast<int>(sizeof(T)));

/// Prefetches kAsked elements. kLevel as in __builtin_prefetch: 3 is L1, 2 is L2, 0 is L1 for one read.
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

}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
