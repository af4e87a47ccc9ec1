// SPDX-License-Identifier: Apache-2.0
// Frequencies and factors of the supported rotary embeddings.
#include "model/rope.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace helix::decode {
namespace {

/// yarn's factor: 0.1 * mscale * ln(scale) + 1.
double yarn_mscale(double scale, double mscale) {
  return scale <= 1.0 ? 1.0 : 0.1 * mscale * std::log(scale) + 1.0;
}

/// Scales frequencies by wavelength: short waves stay, long ones are slowed by `factor`, and those in between
/// are blended.
void scale_llama3(const RopeConfig& rope, std::vector<float>& frequencies) {
  const auto context = static_cast<double>(rope.original_max_position_embeddings);
  const auto low_wavelength = static_cast<float>(context / rope.low_freq_factor);
  const auto high_wavelength = static_cast<float>(context / rope.high_freq_factor);
  const auto factor = static_cast<float>(rope.factor);
  for (float& frequency : frequencies) {
    const float wavelength = static_cast<float>(2.0 * std::numbers::pi) / frequency;
    if (wavelength > low_wavelength) {
      frequency /= factor;
    } else if (!(wavelength < high_wavelength)) {
      const float smooth =
          (static_cast<float>(context) / wavelength - static_cast<float>(rope.low_freq_factor)) /
          static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
      frequency = (1.0f - smooth) * frequency / factor + smooth * frequency;
    }
  }
}

/// Blends linearly between the dimensions that rotate fast (kept) and those that rotate slowly
/// (interpolated).
void scale_yarn(const RopeConfig& rope, std::vector<float>& frequencies) {
  const auto dim = static_cast<double>(rope.rotary_dim);
  const auto context = static_cast<double>(rope.original_max_position_embeddings);
  const auto correction_dim = [&](double rotations) {
    return dim * std::log(context / (rotations * 2.0 * std::numbers::pi)) / (2.0 * std::log(rope.theta));
  };
  double low = correction_dim(rope.beta_fast);
  double high = correction_dim(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1.0);
  if (static_cast<float>(high - low) == 0.0f) high += 0.001;  // avoids a division by zero

  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const auto position = static_cast<float>(2 * i) / static_cast<float>(rope.rotary_dim);
    const float period = std::pow(static_cast<float>(rope.theta), position);
    const float kept = 1.0f / period;
    const float interpolated = 1.0f / (static_cast<float>(rope.factor) * period);
    const float ramp = std::clamp(
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f, 1.0f);
    const float keep = 1.0f - ramp;
    frequencies[i] = interpolated * (1.0f - keep) + kept * keep;
  }
}

}  // namespace

std::vector<float> RopeConfig::inverse_frequencies() const {
  std::vector<float> frequencies(static_cast<std::size_t>(rotary_dim / 2));
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const float position = static_cast<float>(2 * i) / static_cast<float>(rotary_dim);
    frequencies[i] = 1.0f / std::pow(static_cast<float>(theta), position);
  }
  switch (type) {
    case RopeType::standard:
    case RopeType::dynamic:
      break;
    case RopeType::linear:
      for (float& frequency : frequencies) frequency /= static_cast<float>(factor);
      break;
    case RopeType::llama3:
      scale_llama3(*this, frequencies);
      break;
    case RopeType::yarn:
      scale_yarn(*this, frequencies);
      break;
  }
  return frequencies;
}

float RopeConfig::magnitude() const {
  if (type != RopeType::yarn) return 1.0f;
  if (attention_factor) return static_cast<float>(*attention_factor);
  if (mscale != 0.0 && mscale_all_dim != 0.0) {
    return static_cast<float>(yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim));
  }
  return static_cast<float>(yarn_mscale(factor, 1.0));
}

double RopeConfig::latent_softmax_factor() const {
  if (type == RopeType::standard || mscale_all_dim == 0.0) return 1.0;
  const double m = yarn_mscale(factor, mscale_all_dim);
  return m * m;
}

}  // namespace helix::decode
