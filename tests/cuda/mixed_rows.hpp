// SPDX-License-Identifier: Apache-2.0
// Random rows of DType::fp8_ds_mla with four scales, and the values that they represent.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <helix/dtype.hpp>

namespace helix::test {

/// Rows of 656 bytes: 512 columns of e4m3, four very different scales, 64 columns of bf16. Fills `values`
/// [tokens, 576] with the represented values; `uniform()` is in [-1, 1).
template <class Uniform>
std::vector<std::uint8_t> random_mixed_rows(std::vector<float>& values, const Uniform& uniform) {
  constexpr std::size_t kColumns = 576;
  constexpr std::size_t kLatentColumns = 512;
  std::vector<std::uint8_t> bytes;
  const auto put = [&](const auto& x) {
    const auto* from = reinterpret_cast<const std::uint8_t*>(&x);
    bytes.insert(bytes.end(), from, from + sizeof(x));
  };
  for (std::size_t first = 0; first < values.size(); first += kColumns) {
    float scales[4];
    for (float& scale : scales) scale = 0.005f * std::exp2(3.0f + 3.0f * uniform());
    for (std::size_t i = 0; i < kColumns; ++i) {
      const float value = 2.0f * uniform();
      if (i < kLatentColumns) {
        const fp8_e4m3 x(value / scales[i / 128]);
        values[first + i] = static_cast<float>(x) * scales[i / 128];
        put(x);
        continue;
      }
      if (i == kLatentColumns) put(scales);
      const bf16 x(value);
      values[first + i] = static_cast<float>(x);
      put(x);
    }
  }
  return bytes;
}

}  // namespace helix::test
