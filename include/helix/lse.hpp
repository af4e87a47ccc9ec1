// SPDX-License-Identifier: Apache-2.0
// Log-sum-exp conventions of attention kernels, and the conversion into this library's.
#pragma once

#include <cstdint>

#include <helix/host_device.hpp>

namespace helix {

/// How a kernel reports the log-sum-exp of its scores. A caller that passes on an lse in another convention
/// than this library's says so in the arguments (PackPartialArgs, LseCombineArgs); the device converts it as
/// it reads.
enum class LseConvention : std::uint8_t {
  natural,                       ///< This library, FlashAttention-3: natural logarithm, -inf for "no tokens".
  base2,                         ///< FlashInfer: logarithm to base 2, -inf for "no tokens".
  natural_positive_inf_if_empty  ///< FlashMLA, FlashAttention-2: natural, +inf for "no tokens".
};

/// Converts `lse` to the natural log-sum-exp, -inf for "no tokens" (invariants 5 and 6); a NaN stays one. The
/// only sign of a mistaken base is wrong weights: sums of exponentials [2, 8] weigh outputs [0, 10] to 8, and
/// to 7.23 if their natural logarithms are read as base 2.
HELIX_HOST_DEVICE constexpr float to_natural(float lse, LseConvention convention) {
  constexpr float kLn2 = 0.693147180559945309417f;
  constexpr float kInfinity = __builtin_huge_valf();
  if (convention == LseConvention::base2) return lse * kLn2;  // -inf stays
  if (convention == LseConvention::natural_positive_inf_if_empty && lse == kInfinity) return -kInfinity;
  return lse;
}

/// The larger of two log-sum-exps, NaN if either is. A NaN that got lost here would pass for "no tokens", of
/// weight 0.
HELIX_HOST_DEVICE constexpr float larger_lse(float max, float lse) {
  const bool is_nan = !(lse == lse);
  return lse > max || is_nan ? lse : max;
}

}  // namespace helix
