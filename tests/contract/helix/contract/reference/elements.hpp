// SPDX-License-Identifier: Apache-2.0
// Elements of tensors and weights as doubles.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include <helix/backend/layer.hpp>
#include <helix/dtype.hpp>

namespace helix::contract::reference {

inline constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

inline double load(const void* data, DType dtype, std::int64_t index) {
  return dispatch(
      dtype, [&]<class T>(T*) -> double { return static_cast<float>(static_cast<const T*>(data)[index]); });
}

inline void store(void* data, DType dtype, std::int64_t index, double value) {
  dispatch(dtype, [&]<class T>(T*) { static_cast<T*>(data)[index] = T(static_cast<float>(value)); });
}

inline double load(const WeightView& weight, std::int64_t row, std::int64_t col) {
  return load(weight.data, weight.dtype, row * weight.cols + col);
}

inline double silu(double x) {
  return x / (1.0 + std::exp(-x));
}

}  // namespace helix::contract::reference
