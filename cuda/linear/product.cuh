// SPDX-License-Identifier: Apache-2.0
// The arguments that all product kernels share, the checks of these, and the store of a sum.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include <helix/backend/layer.hpp>
#include <helix/error.hpp>

#include "cuda/runtime/convert.cuh"

namespace helix::cuda {

/// out[r, h, n] = sum_k in[r, h, k] * weight[h, n, k] (+ bias[n]) (+ out[r, h, n]). Strides in elements.
template <class T>
struct Product {
  const T* in;
  std::int64_t in_row;
  std::int64_t in_head;
  const void* weight;
  const void* bias;  // [width] or nullptr
  DType bias_dtype;
  void* out;  // T, or float if is_out_f32
  std::int64_t out_row;
  std::int64_t out_head;
  int rows;
  int heads;
  int width;  // weight rows per head
  int cols;
  int splits;  // warps that share the columns of a group of weight rows
  bool accumulate;
  bool is_out_f32;  // requires no bias and no accumulate
};

/// Writes one sum if it is inside the output.
template <class T>
__device__ __forceinline__ void store(const Product<T>& p, int row, int head, int n, float sum) {
  if (row >= p.rows || n >= p.width) return;
  const std::int64_t at = row * p.out_row + head * p.out_head + n;
  if constexpr (!std::is_same_v<T, float>) {
    if (p.is_out_f32) {
      static_cast<float*>(p.out)[at] = sum;
      return;
    }
  }
  if (p.bias != nullptr) sum += load_element(p.bias, p.bias_dtype, n);
  T& out = static_cast<T*>(p.out)[at];
  if (p.accumulate) sum += to_float(out);
  out = from_float<T>(sum);
}

/// @throws Error(unsupported) unless a product of `rows` rows with this weight is supported.
inline void check_weight(const char* operation, const WeightView& weight, std::int64_t rows) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max() / 2;
  HELIX_EXPECTS(detail::is_arithmetic(weight.dtype), ErrorCode::unsupported, operation, ": weights are ",
                to_string(weight.dtype), "; built for f32, f16 and bf16");
  HELIX_EXPECTS(rows <= kMax && weight.rows <= kMax && weight.cols <= kMax, ErrorCode::unsupported, operation,
                ": ", rows, " rows with a weight of [", weight.rows, ", ", weight.cols, "]; built for up to ",
                kMax, " of each");
}

/// check_weight() for a whole call.
template <class T>
void check_linear(const LinearArgs<T>& args) {
  check_weight("linear", args.weight, args.in.extent(0));
  HELIX_EXPECTS(args.bias.empty() || detail::is_arithmetic(args.bias.dtype), ErrorCode::unsupported,
                "linear: the bias is ", to_string(args.bias.dtype), "; built for f32, f16 and bf16");
}

/// `in` times a whole weight. The caller sets where the result goes.
template <class T>
Product<T> product_of(const TensorView<const T, 2>& in, const WeightView& weight) {
  Product<T> product{};
  product.in = in.data();
  product.in_row = in.stride(0);
  product.weight = weight.data;
  product.rows = static_cast<int>(in.extent(0));
  product.heads = 1;
  product.width = static_cast<int>(weight.rows);
  product.cols = static_cast<int>(weight.cols);
  return product;
}

/// The product of a whole call.
template <class T>
Product<T> product_of(const LinearArgs<T>& args) {
  Product<T> product = product_of(args.in, args.weight);
  product.bias = args.bias.data;
  product.bias_dtype = args.bias.dtype;
  product.out = args.out.data();
  product.out_row = args.out.stride(0);
  product.accumulate = args.accumulate;
  return product;
}

}  // namespace helix::cuda
