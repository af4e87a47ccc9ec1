// SPDX-License-Identifier: Apache-2.0
// Log-sum-exp conventions of other attention kernels, and the named conversions into this library's.
#pragma once

#include <cstdint>
#include <limits>

#include <helix/tensor_view.hpp>

namespace helix {

/// How a kernel reports the log-sum-exp of its scores.
enum class LseConvention : std::uint8_t {
  natural,                       ///< this library: natural logarithm, -inf for "no tokens"
  base2,                         ///< FlashInfer: logarithm to base 2, -inf for "no tokens"
  natural_positive_inf_if_empty  ///< FlashMLA, FlashAttention-3: natural, +inf for "no tokens"
};

/// A log-sum-exp whose convention is part of its type, so that a foreign one cannot reach lse_combine
/// unconverted.
template <LseConvention kConvention>
struct Lse {
  float value = 0.0f;
};

/// The natural log-sum-exp that lse_combine reads, -inf for "no tokens" (invariants 5 and 6). A mistaken base
/// gives wrong weights and no other sign: sums of exponentials [2, 8] weigh outputs [0, 10] to 8, and to 7.23
/// if their natural logarithms are read as base 2.
constexpr float to_natural(Lse<LseConvention::natural> lse) {
  return lse.value;
}

constexpr float to_natural(Lse<LseConvention::base2> lse) {
  return lse.value * 0.693147180559945309417f;  // ln 2; -inf stays
}

constexpr float to_natural(Lse<LseConvention::natural_positive_inf_if_empty> lse) {
  return lse.value == std::numeric_limits<float>::infinity() ? -std::numeric_limits<float>::infinity()
                                                             : lse.value;
}

/// Converts [tokens, heads] of host memory (any strides) from `kConvention` to the natural logarithm, in
/// place. A rank that runs a foreign attention kernel calls it, or its device's equal, once on that kernel's
/// lse and before the exchange. A NaN stays one.
template <LseConvention kConvention>
void convert_to_natural(TensorView<float, 2> lse) {
  for (std::int64_t token = 0; token < lse.extent(0); ++token) {
    for (std::int64_t head = 0; head < lse.extent(1); ++head) {
      lse(token, head) = to_natural(Lse<kConvention>{lse(token, head)});
    }
  }
}

}  // namespace helix
