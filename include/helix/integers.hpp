// SPDX-License-Identifier: Apache-2.0
// Small arithmetic of sizes, for headers that everyone includes. `<algorithm>` and `<numeric>` cost a unit
// more compile time than all of topology.hpp.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include <helix/host_device.hpp>

namespace helix {

/// The larger of two values of one type.
template <class T>
HELIX_HOST_DEVICE constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

/// The smaller of two values of one type.
template <class T>
HELIX_HOST_DEVICE constexpr T smaller(T a, T b) {
  return b < a ? b : a;
}

/// n / size, rounded up; n >= 0, size > 0.
template <class T>
HELIX_HOST_DEVICE constexpr T ceil_div(T n, T size) {
  return (n + size - 1) / size;
}

/// The smallest multiple of `size` that is at least n; n >= 0, size > 0.
template <class T>
HELIX_HOST_DEVICE constexpr T round_up(T n, std::type_identity_t<T> size) {
  return ceil_div(n, size) * size;
}

/// Result of saturating_product() and saturating_sum() if the value exceeds int64; no valid size.
inline constexpr std::int64_t kSaturated = std::numeric_limits<std::int64_t>::max();

/// a * b * ..., or kSaturated where that exceeds int64; factors >= 0.
template <class... More>
constexpr std::int64_t saturating_product(std::int64_t a, std::int64_t b, More... more) {
  const std::int64_t product = b != 0 && a > kSaturated / b ? kSaturated : a * b;
  if constexpr (sizeof...(more) > 0) {
    return saturating_product(product, static_cast<std::int64_t>(more)...);
  } else {
    return product;
  }
}

/// a + b, or kSaturated where that exceeds int64; both >= 0.
constexpr std::int64_t saturating_sum(std::int64_t a, std::int64_t b) {
  return a > kSaturated - b ? kSaturated : a + b;
}

/// The least common multiple of two sizes above 0.
constexpr std::int64_t least_common_multiple(std::int64_t a, std::int64_t b) {
  std::int64_t x = a;
  std::int64_t y = b;
  while (y != 0) {
    const std::int64_t rest = x % y;
    x = y;
    y = rest;
  }
  return a / x * b;
}

}  // namespace helix
