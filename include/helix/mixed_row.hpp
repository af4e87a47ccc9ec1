// SPDX-License-Identifier: Apache-2.0
// Conversion of values to rows of DType::fp8_ds_mla and back, on the host.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <helix/dtype.hpp>
#include <helix/kv_format.hpp>

namespace helix {
namespace detail {

/// Value of each e4m3 bit pattern.
inline constexpr std::array<float, 256> kE4m3Values = [] {
  std::array<float, 256> values{};
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(fp8_e4m3::from_bits(static_cast<std::uint8_t>(i)));
  return values;
}();

}  // namespace detail

/// Stores `values` [head_dim] in the row whose parts begin at `latent` and `rope`: latent columns as value /
/// scale rounded to e4m3, the scales of all groups of kScaledColumns, rope columns rounded to bf16.
inline void store_mixed_row(const float* values, std::int64_t head_dim, std::int64_t value_dim,
                            std::byte* latent, std::byte* rope) {
  std::byte* scales = latent + value_dim;
  for (std::int64_t first = 0; first < value_dim; first += kScaledColumns, scales += sizeof(float)) {
    const std::int64_t end = std::min(first + kScaledColumns, value_dim);
    float most = 0.0f;
    for (std::int64_t i = first; i < end; ++i)
      if (std::isfinite(values[i])) most = std::max(most, std::abs(values[i]));
    const float scale = mixed_scale(most);
    for (std::int64_t i = first; i < end; ++i) latent[i] = std::byte{fp8_e4m3(values[i] / scale).bits};
    std::memcpy(scales, &scale, sizeof(scale));
  }
  for (std::int64_t i = value_dim; i < head_dim; ++i, rope += sizeof(bf16)) {
    const bf16 x(values[i]);
    std::memcpy(rope, &x, sizeof(x));
  }
}

/// Loads the values [head_dim] of a row of DType::fp8_ds_mla: stored * scale in f32.
inline void load_mixed_row(const std::byte* latent, const std::byte* rope, std::int64_t head_dim,
                           std::int64_t value_dim, float* values) {
  const std::byte* scales = latent + value_dim;
  for (std::int64_t first = 0; first < value_dim; first += kScaledColumns, scales += sizeof(float)) {
    const std::int64_t end = std::min(first + kScaledColumns, value_dim);
    float scale = 0.0f;
    std::memcpy(&scale, scales, sizeof(scale));
    for (std::int64_t i = first; i < end; ++i)
      values[i] = detail::kE4m3Values[std::to_integer<std::size_t>(latent[i])] * scale;
  }
  for (std::int64_t i = value_dim; i < head_dim; ++i, rope += sizeof(bf16)) {
    bf16 x;
    std::memcpy(&x, rope, sizeof(x));
    values[i] = static_cast<float>(x);
  }
}

}  // namespace helix
