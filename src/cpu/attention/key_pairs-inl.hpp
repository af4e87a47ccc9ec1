// SPDX-License-Identifier: Apache-2.0
// Scores of 8 rows of queries with keys of bf16. Compiled once a Highway target, hence the toggled guard.
#if defined(HELIX_SRC_CPU_ATTENTION_KEY_PAIRS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_ATTENTION_KEY_PAIRS_INL_HPP_
#undef HELIX_SRC_CPU_ATTENTION_KEY_PAIRS_INL_HPP_
#else
#define HELIX_SRC_CPU_ATTENTION_KEY_PAIRS_INL_HPP_
#endif

#include <cstdint>

#include <hwy/highway.h>

#include "cpu/attention/state-inl.hpp"
#include "cpu/dots-inl.hpp"
#include "cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
/// Eight floats in both halves of a vector, by a load alone (hn::Combine costs an insertion).
HWY_INLINE Vec load_twice(const float* from) {
  Vec twice{_mm512_broadcast_f32x8(_mm256_loadu_ps(from))};
  pin(twice);
  return twice;
}

/// dot_block() for bf16 keys and kMaxRows queries, with two keys in an accumulator, one in each half. That
/// halves the sums across vectors, which are a quarter of the operations, and costs an insertion each time
/// keys are loaded. Attention is 1.5 % faster where it reads memory, 6 % where it reads L2. `count` is in
/// effect rounded up to 4.
template <class Rows>
HWY_INLINE void dot_key_pairs(Rows& shared_rows, std::int64_t count, const float* x, std::int64_t length,
                              float* dots) {
  Rows rows = shared_rows;  // in registers
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
  shared_rows = rows;
}

/// Sums of lanes {0, 2} and {1, 3} of each block: (x, x, y, y).
HWY_INLINE __m256 fold_lanes_256(__m256 x, __m256 y) {
  return _mm256_add_ps(_mm256_blend_ps(x, y, 0xcc), _mm256_shuffle_ps(x, y, 0x4e));
}

/// Per 128-bit block, the sum of each of four vectors.
HWY_INLINE __m256 fold_block_256(const __m256* v) {
  const __m256 xy = fold_lanes_256(v[0], v[1]);
  const __m256 zw = fold_lanes_256(v[2], v[3]);
  return _mm256_add_ps(_mm256_shuffle_ps(xy, zw, 0x88), _mm256_shuffle_ps(xy, zw, 0xdd));
}

/// dot_key_pairs() in vectors of 256 bits, with the same additions in the same order. On CPUs that execute
/// vectors of 512 bits in halves (Zen 4), widening and sums then no longer wait for whole products: 69 cycles
/// a key instead of 78, of which the products take 64. `count` is in effect rounded up to 2.
template <class Rows>
HWY_INLINE void dot_keys_256(Rows& shared_rows, std::int64_t count, const float* x, std::int64_t length,
                             float* dots) {
  Rows rows = shared_rows;  // in registers
  constexpr int R = kMaxRows;
  constexpr int kHalf = kLanes / 2;
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  for (std::int64_t row = 0; row < count; row += 2) {
    __m256 acc[2][R];
    HELIX_UNROLL for (int r = 0; r < R; ++r) acc[0][r] = acc[1][r] = _mm256_setzero_ps();
    for (std::int64_t d = 0; d < length; d += kPair) {
      HELIX_UNROLL for (int part = 0; part < 2; ++part) {
        __m256 a[2];
        __m256 b[2];
        HELIX_UNROLL for (int k = 0; k < 2; ++k) {
          const __m256i words =
              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[row + k] + d + part * kLanes));
          a[k] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
          b[k] = _mm256_castsi256_ps(_mm256_and_si256(words, upper));
          if (part == 0) rows.prefetch(row + k, 2, d);
        }
        const float* q = x + d * R + part * kHalf;
        HELIX_UNROLL for (int r = 0; r < R; ++r) {
          __m256 even = _mm256_loadu_ps(q + r * kPair);
          __asm__("" : "+v"(even));  // as pin()
          HELIX_UNROLL for (int k = 0; k < 2; ++k) acc[k][r] = _mm256_fmadd_ps(a[k], even, acc[k][r]);
        }
        HELIX_UNROLL for (int r = 0; r < R; ++r) {
          __m256 odd = _mm256_loadu_ps(q + r * kPair + kLanes);
          __asm__("" : "+v"(odd));
          HELIX_UNROLL for (int k = 0; k < 2; ++k) acc[k][r] = _mm256_fmadd_ps(b[k], odd, acc[k][r]);
        }
      }
    }
    HELIX_UNROLL for (int k = 0; k < 2; ++k) {
      const __m256 low = fold_block_256(acc[k]);
      const __m256 high = fold_block_256(acc[k] + 4);
      _mm256_storeu_ps(dots + (row + k) * R, _mm256_add_ps(_mm256_blend_ps(low, high, 0xf0),
                                                           _mm256_permute2f128_ps(low, high, 0x21)));
    }
  }
  shared_rows = rows;
}
#endif

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
