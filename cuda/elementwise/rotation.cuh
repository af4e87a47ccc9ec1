// SPDX-License-Identifier: Apache-2.0
// The rotary position embedding of one pair of elements of a head.
#pragma once

#include <cstdint>

namespace helix::cuda {

/// Cosine and sine of a pair at a position, both multiplied by the embedding's magnitude.
struct Rotation {
  float cosine;
  float sine;

  /// Padding, at a negative position, is not rotated. The angle is a product rounded to f32, as in the
  /// models' own code; its cosine is then exact to f32.
  static __device__ Rotation at(std::int64_t position, float inverse_frequency, float magnitude) {
    Rotation rotation{1.0f, 0.0f};
    if (position >= 0) {
      sincosf(__fmul_rn(static_cast<float>(position), inverse_frequency), &rotation.sine, &rotation.cosine);
      rotation.cosine *= magnitude;
      rotation.sine *= magnitude;
    }
    return rotation;
  }

  /// Rotates the pair. Explicitly rounded operations give the same bits in every kernel.
  __device__ __forceinline__ void turn(float& x, float& y) const {
    const float turned = fmaf(x, cosine, -__fmul_rn(y, sine));
    y = fmaf(y, cosine, __fmul_rn(x, sine));
    x = turned;
  }
};

/// Where the elements of pairs `pair` and `pair` + 1 of a head of `pairs` lie: two from `first` on, two from
/// `second` on. Interleaved, each two are a pair; else they are both first elements, and both second ones.
template <bool kIsInterleaved>
struct TwoPairs {
  int first;
  int second;

  __device__ __forceinline__ TwoPairs(int pair, int pairs)
      : first(kIsInterleaved ? 2 * pair : pair), second(kIsInterleaved ? first + 2 : first + pairs) {}

  /// Rotates the loaded elements by the rotations of both pairs.
  static __device__ __forceinline__ void turn(const Rotation* rotations, float (&x)[2], float (&y)[2]) {
    if constexpr (kIsInterleaved) {
      rotations[0].turn(x[0], x[1]);
      rotations[1].turn(y[0], y[1]);
    } else {
      rotations[0].turn(x[0], y[0]);
      rotations[1].turn(x[1], y[1]);
    }
  }
};

}  // namespace helix::cuda
