// SPDX-License-Identifier: Apache-2.0
// The rotary position embedding of one pair of a head's elements.
#pragma once

#include <cstdint>

namespace helix::cuda {

/// Cosine and sine of a pair at a position, each times the embedding's magnitude.
struct Rotation {
  float cosine;
  float sine;

  /// Padding, at a position below 0, stays as it is. The product rounds to f32 as in the models' own code;
  /// its cosine is then exact to f32.
  static __device__ Rotation at(std::int64_t position, float inverse_frequency, float magnitude) {
    Rotation rotation{1.0f, 0.0f};
    if (position >= 0) {
      sincosf(__fmul_rn(static_cast<float>(position), inverse_frequency), &rotation.sine, &rotation.cosine);
      rotation.cosine *= magnitude;
      rotation.sine *= magnitude;
    }
    return rotation;
  }

  /// Turns the pair. Named roundings: wherever it is turned, the bits are the same.
  __device__ __forceinline__ void turn(float& x, float& y) const {
    const float turned = fmaf(x, cosine, -__fmul_rn(y, sine));
    y = fmaf(y, cosine, __fmul_rn(x, sine));
    x = turned;
  }
};

}  // namespace helix::cuda
