// SPDX-License-Identifier: Apache-2.0
// The running softmax of a tile of scores. Compiled once a Highway target, hence the toggled guard.
#if defined(HELIX_SRC_CPU_ATTENTION_SOFTMAX_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HELIX_SRC_CPU_ATTENTION_SOFTMAX_INL_HPP_
#undef HELIX_SRC_CPU_ATTENTION_SOFTMAX_INL_HPP_
#else
#define HELIX_SRC_CPU_ATTENTION_SOFTMAX_INL_HPP_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include "cpu/attention/state-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

/// score = cap * tanh(score / cap), in place; `padded` is a multiple of kLanes.
HWY_NOINLINE void cap_scores(float* scores, std::int64_t padded, float soft_cap) {
  const Vec cap = hn::Set(kF32, soft_cap);
  const Vec inverse = hn::Set(kF32, 1.0f / soft_cap);
  for (std::int64_t i = 0; i < padded; i += kLanes) {
    const Vec x = hn::Mul(hn::LoadU(kF32, scores + i), inverse);
    hn::StoreU(hn::Mul(hn::Tanh(kF32, x), cap), kF32, scores + i);
  }
}

/// 2^x for x <= 0 within 8e-8 of the value; 0 below the normal range. NaN stays NaN, or a query of NaN would
/// pass for one that sees nothing. Half the operations of hn::Exp.
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

/// The highest score in each lane.
HWY_INLINE Vec highest_scores(const float* scores, std::int64_t padded) {
  Vec top[4];  // updates of a single maximum would wait for each other
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

/// weight = 2^(score - pivot), in place. Returns the sum of the weights in each lane.
HWY_INLINE Vec weigh_scores(float* scores, std::int64_t padded, Vec pivot) {
  Vec total = hn::Zero(kF32);
  for (std::int64_t i = 0; i < padded; i += kLanes) {
    const Vec weight = exp2_of(hn::Sub(hn::LoadU(kF32, scores + i), pivot));
    hn::StoreU(weight, kF32, scores + i);
    total = hn::Add(total, weight);
  }
  return total;
}

/// Copies scores, R rows a key, from the order in which a whole tile was read to the order of the sums.
template <int R>
HWY_NOINLINE void interleave_scores(const float* from, std::int64_t streams, float* to) {
  const std::int64_t run = kDirectTile / streams;
  for (std::int64_t stream = 0; stream < streams; ++stream) {
    float* target = to + stream * R;
    for (std::int64_t i = 0; i < run; ++i, from += R, target += streams * R) {
      std::memcpy(target, from, R * sizeof(float));
    }
  }
}

/// Turns a block's scores, [key][R], into weights. Updates the rows' running max and sum, and sets their
/// corrections: the rescale factors of earlier sums.
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

/// Turns one row's scores, [kPackedTile], into weights. Updates the row's running max and sum, and sets its
/// correction.
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

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggled guard
