// SPDX-License-Identifier: Apache-2.0
// Operators::linear, head_linear and router_logits.
#include <cstddef>
#include <cstdint>

#include <helix/cpu/backend.hpp>
#include <helix/dtype.hpp>

#include "cpu/linear/product.hpp"

namespace helix::cpu {
namespace {

linear::Product product_of(const LinearArgs<float>& args) {
  return {.in = args.in.data(),
          .in_stride = args.in.stride(0),
          .num_rows = args.in.extent(0),
          .weight = args.weight,
          .bias = args.bias,
          .out = args.out.data(),
          .out_stride = args.out.stride(0),
          .accumulate = args.accumulate};
}

linear::Product product_of(const HeadLinearArgs<float>& args, std::int64_t head) {
  const std::int64_t width = args.out.extent(2);
  const std::int64_t row_bytes = args.weight.cols * static_cast<std::int64_t>(size_bytes(args.weight.dtype));
  const auto* weight = static_cast<const std::byte*>(args.weight.data) + head * width * row_bytes;
  return {.in = args.in.data() + head * args.in.stride(1),
          .in_stride = args.in.stride(0),
          .num_rows = args.in.extent(0),
          .weight = {weight, args.weight.dtype, width, args.weight.cols},
          .out = args.out.data() + head * args.out.stride(1),
          .out_stride = args.out.stride(0)};
}

}  // namespace

void Operators::linear(const LinearArgs<float>& args, Stream stream) const {
  if (args.in.extent(0) == 0 || args.weight.rows == 0) return;
  stream.enqueue([args, pool = pool_, inputs = product_inputs_] {
    linear::Products(*pool, inputs).multiply(1, [&](std::int64_t) { return product_of(args); });
  });
}

void Operators::router_logits(const RouterLogitsArgs<float>& args, Stream stream) const {
  if (args.in.extent(0) == 0 || args.weight.rows == 0) return;
  // Always as exact as possible, because a logit decides which experts are chosen.
  stream.enqueue([args, pool = pool_] {
    const LinearArgs<float> product = {.in = args.in, .weight = args.weight, .bias = {}, .out = args.out};
    linear::Products(*pool, ProductInputs::f32).multiply(1, [&](std::int64_t) {
      return product_of(product);
    });
  });
}

void Operators::head_linear(const HeadLinearArgs<float>& args, Stream stream) const {
  if (args.in.extent(0) == 0 || args.weight.rows == 0) return;
  stream.enqueue([args, pool = pool_, inputs = product_inputs_] {
    linear::Products(*pool, inputs).multiply(args.in.extent(1), [&](std::int64_t head) {
      return product_of(args, head);
    });
  });
}

}  // namespace helix::cpu
