// SPDX-License-Identifier: Apache-2.0
// Divisor: division by a number that the host knows.
#pragma once

#include <cstdint>

namespace helix::cuda {

/// A divisor known to the host. Division takes a multiplication and a shift, instead of about a hundred
/// cycles.
class Divisor {
 public:
  /// `by` in [1, 2^30].
  explicit constexpr Divisor(int by = 1) : by_(by) {
    while ((1u << shift_) < static_cast<unsigned>(by)) ++shift_;
    const std::uint64_t rest = (std::uint64_t{1} << shift_) - static_cast<std::uint64_t>(by);
    factor_ = static_cast<unsigned>((rest << 32) / static_cast<std::uint64_t>(by) + 1);
  }

  __host__ __device__ operator int() const { return by_; }
  /// x >= 0.
  friend __host__ __device__ int operator/(int x, const Divisor& d) {
#ifdef __CUDA_ARCH__
    const auto dividend = static_cast<unsigned>(x);
    return static_cast<int>((__umulhi(dividend, d.factor_) + dividend) >> d.shift_);
#else
    return x / d.by_;
#endif
  }
  friend __host__ __device__ int operator%(int x, const Divisor& d) {
    return x - x / d * d.by_;
  }

 private:
  int by_;
  unsigned shift_ = 0;
  unsigned factor_ = 0;
};

}  // namespace helix::cuda
