// SPDX-License-Identifier: Apache-2.0
// Products of 16-bit activations on a GPU, compared with those of f32, in every kernel.
#include <cstddef>
#include <cstdint>

#include <helix/cuda/backend.hpp>

#include "cuda/gpu.hpp"
#include "cuda/twin_bench.hpp"
#include "support/catch.hpp"

namespace helix::test {

TEMPLATE_TEST_CASE("16-bit products on a GPU agree with f32 in every kernel", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  std::size_t turn = 0;
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t k : {8, 40, 128, 4096, 37}) {
      for (const std::int64_t n : {8, 24, 1000, 33}) {
        if (k == 4096 && n == 33) continue;
        for (const std::int64_t rows : {1, 2, 3, 8, 9, 16, 17, 64, 200}) {
          ++turn;
          const std::int64_t in_pad = kPads[turn % 3];
          const std::int64_t out_pad = kPads[turn / 3 % 3];
          const bool has_bias = turn % 2 == 0;
          const bool accumulates = turn / 2 % 2 == 0;
          // Biases of another type behind the library's product have a test of their own, below.
          const bool is_library = dtype == kDTypeOf<TestType>;
          const DType bias_dtype = is_library ? dtype : kWeightTypes[turn / 2 % 3];
          CAPTURE(to_string(dtype), rows, k, n, in_pad, out_pad, has_bias, accumulates);
          bench.clear();
          const auto in = bench.random(rows, k + in_pad);
          const auto weight = bench.weights(n * k, dtype);
          const auto bias = bench.weights(n, bias_dtype);
          const auto out = accumulates ? bench.random(rows, n + out_pad) : bench.poison(rows, n + out_pad);
          HELIX_CHECK_TWINS(bench, {
            operators.linear(LinearArgs<E>{side.view(in, rows, k, in_pad), side.weight(weight, dtype, n, k),
                                           has_bias ? side.weight(bias, bias_dtype, 1, n) : WeightView{},
                                           side.view(out, rows, n, out_pad), accumulates},
                             stream);
          });
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("16-bit products of the library on a GPU add a bias of any type, wherever it lies", "",
                   f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  constexpr std::int64_t kCols = 40;
  constexpr std::int64_t kWidth = 24;
  for (const DType bias_dtype : kWeightTypes) {
    for (const std::int64_t skipped : {0, 1}) {  // elements before the bias: aligned to 16 bytes, and not
      for (const std::int64_t rows : {17, 200}) {
        CAPTURE(to_string(bias_dtype), skipped, rows);
        bench.clear();
        const auto in = bench.random(rows, kCols);
        const auto weight = bench.weights(kWidth * kCols, kDTypeOf<TestType>);
        const auto bias = bench.weights(kWidth + skipped, bias_dtype);
        const auto out = bench.poison(rows, kWidth);
        HELIX_CHECK_TWINS(bench, {
          WeightView moved = side.weight(bias, bias_dtype, 1, kWidth);
          moved.data = side(bias) + at(skipped) * size_bytes(bias_dtype);
          operators.linear(LinearArgs<E>{side.view(in, rows, kCols),
                                         side.weight(weight, kDTypeOf<TestType>, kWidth, kCols), moved,
                                         side.view(out, rows, kWidth), false},
                           stream);
        });
      }
    }
  }
}

TEMPLATE_TEST_CASE("16-bit products on a GPU take rows of which the last lies first", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  constexpr std::int64_t kCols = 256;
  constexpr std::int64_t kWidth = 64;
  for (const std::int64_t rows : {1, 2, 8, 16, 17, 64}) {
    CAPTURE(rows);
    bench.clear();
    const auto in = bench.random(rows, kCols);
    const auto weight = bench.weights(kWidth * kCols, kDTypeOf<TestType>);
    const auto out = bench.poison(rows, kWidth);
    HELIX_CHECK_TWINS(bench, {
      const TensorView<const E, 2> reversed(side(in) + (rows - 1) * kCols, {rows, kCols}, {-kCols, 1});
      operators.linear(LinearArgs<E>{reversed, side.weight(weight, kDTypeOf<TestType>, kWidth, kCols),
                                     WeightView{}, side.view(out, rows, kWidth), false},
                       stream);
    });
  }
}

TEMPLATE_TEST_CASE("16-bit products on a GPU of more rows than one launch holds agree with f32", "", f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  constexpr std::int64_t kRows = 1 << 20;
  constexpr std::int64_t kCols = 16;
  constexpr std::int64_t kWidth = 3;  // the library takes no rows of this width
  const auto in = bench.random(kRows, kCols);
  const auto weight = bench.weights(kWidth * kCols, kDTypeOf<TestType>);
  const auto bias = bench.weights(kWidth, DType::f32);
  const auto out = bench.poison(kRows, kWidth);
  HELIX_CHECK_TWINS(bench, {
    operators.linear(
        LinearArgs<E>{side.view(in, kRows, kCols), side.weight(weight, kDTypeOf<TestType>, kWidth, kCols),
                      side.weight(bias, DType::f32, 1, kWidth), side.view(out, kRows, kWidth), false},
        stream);
  });
}

TEMPLATE_TEST_CASE("16-bit products of heads on a GPU agree with f32", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t tokens : {1, 9, 16, 17, 40, 63, 64, 65, 200}) {
      for (const std::int64_t heads : {1, 3, 16}) {
        for (const std::int64_t k : {17, 128}) {
          for (const std::int64_t n : {35, 128, 512}) {
            for (const std::int64_t pad : kPads) {
              CAPTURE(to_string(dtype), tokens, heads, k, n, pad);
              bench.clear();
              const auto in = bench.random(tokens * heads, k + pad);
              const auto weight = bench.weights(heads * n * k, dtype);
              const auto out = bench.poison(tokens * heads, n + pad);
              HELIX_CHECK_TWINS(bench, {
                operators.head_linear(HeadLinearArgs<E>{side.view(in, tokens, heads, k, pad),
                                                        side.weight(weight, dtype, heads * n, k),
                                                        side.view(out, tokens, heads, n, pad)},
                                      stream);
              });
            }
          }
        }
      }
    }
  }
}

}  // namespace helix::test
