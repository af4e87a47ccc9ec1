// SPDX-License-Identifier: Apache-2.0
// Matrix products of queries or weights with rows, in registers: what the direct and the packed kernel share.
// Compiled once a Highway target, hence the toggled guard.
#if defined(HELIX_SRC_CPU_ATTENTION_PRODUCT_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_ATTENTION_PRODUCT_INL_HPP_
#undef HELIX_SRC_CPU_ATTENTION_PRODUCT_INL_HPP_
#else
#define HELIX_SRC_CPU_ATTENTION_PRODUCT_INL_HPP_
#endif

#include <cstdint>
#include <type_traits>

#include <hwy/highway.h>

#include "cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

/// Rows of kPair floats, one after the other.
struct Panel {
  const float* first;
  HWY_INLINE const float* operator[](std::int64_t i) const { return first + i * kPair; }
  HWY_INLINE bool asks_here(std::int64_t, std::int64_t) const { return false; }
  HWY_INLINE void prefetch(std::int64_t, int, std::int64_t) const {}
};

/// What a product does with the sums that it finds: replaces them, adds its own, rescales them and adds its
/// own (shrink), or continues them product by product, as if one product had all keys (go_on).
enum class Sums { replace, add, shrink, go_on };

/// acc[r] = acc[r] * correction[r] + sum over i of weights[i * kNext + r * kRow] * rows[i], for C pairs of
/// columns. That is Sums::shrink; the others do without the correction. The sum of a tile starts at zero, so
/// that rounding errors grow with the tiles and not with the keys.
template <int R, int C, int kNext, int kRow, Sums kSums, class Rows>
HWY_INLINE void product(Rows& shared_rows, std::int64_t count, const float* weights, int valid,
                        const float* correction, float* acc, std::int64_t acc_stride, std::int64_t column) {
  Rows rows = shared_rows;  // in registers
  using T = std::remove_cvref_t<decltype(*rows[0])>;
  Vec sums[R * C * 2];
  if constexpr (kSums == Sums::go_on) {
    HELIX_UNROLL for (int r = 0; r < R; ++r) {
      HELIX_UNROLL for (int c = 0; c < C * 2; ++c) {
        sums[r * C * 2 + c] = hn::LoadU(kF32, acc + r * acc_stride + c * kLanes);
      }
    }
  } else {
    HELIX_UNROLL for (int i = 0; i < R * C * 2; ++i) sums[i] = hn::Zero(kF32);
  }
  if constexpr (kSums == Sums::add ||
                kSums == Sums::shrink) {  // they come from L2, and are needed only after the loop
    HELIX_UNROLL for (int r = 0; r < R; ++r) {
      HELIX_UNROLL for (int c = 0; c < C * 2; ++c) __builtin_prefetch(acc + r * acc_stride + c * kLanes, 1);
    }
  }
  for (std::int64_t i = 0; i < count; ++i) {
    Pair x[C];
    HELIX_UNROLL for (int c = 0; c < C; ++c) {
      x[c] = load_pair(rows[i] + column + c * kPair);
      // If these columns are only part of a cache line, not every key prefetches in every pass over them.
      if (c * kPair % kAsked<T> != 0) continue;
      if (C * kPair >= kAsked<T> || rows.asks_here(i, column)) rows.prefetch(i, 1, column + c * kPair);
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

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
