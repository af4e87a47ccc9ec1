// SPDX-License-Identifier: Apache-2.0
// SwiGLU of one row, the same for dense layers and for experts.
#pragma once

#include <cmath>
#include <cstdint>

namespace helix::cpu {

/// out = gate * sigmoid(gate) * up, for `n` elements; out may be gate.
inline void swiglu_row(const float* gate, const float* up, float* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

}  // namespace helix::cpu
