// SPDX-License-Identifier: Apache-2.0
// Norms, rotary embedding, SwiGLU and row copies of 16-bit activations on a GPU, compared with those of f32.
#include <cmath>
#include <cstdint>
#include <vector>

#include <helix/cuda/backend.hpp>

#include "cuda/gpu.hpp"
#include "cuda/twin_bench.hpp"
#include "support/catch.hpp"

namespace helix::test {

TEMPLATE_TEST_CASE("16-bit norms on a GPU agree with f32", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t width : {1, 7, 64, 130, 4096, 7168}) {
      for (const std::int64_t pad : kPads) {
        for (const std::int64_t rows : {1, 5}) {
          CAPTURE(to_string(dtype), width, pad, rows);
          for (const bool adds : {false, true}) {
            bench.clear();
            const auto delta = bench.random(rows, width + pad);
            const auto residual = bench.random(rows, width + pad);
            const auto out = bench.poison(rows, width + pad);
            const auto weight = bench.weights(width, dtype);
            HELIX_CHECK_TWINS(bench, {
              RmsNormArgs<E> args;
              if (adds) args.delta = side.view(delta, rows, width, pad);
              args.residual = side.view(residual, rows, width, pad);
              args.weight = side.weight(weight, dtype, 1, width);
              args.out = side.view(out, rows, width, pad);
              operators.rms_norm(args, stream);
            });
          }
          if (width > 130) continue;
          bench.clear();
          const auto x = bench.random(rows * 3, width + pad);
          const auto weight = bench.weights(width, dtype);
          HELIX_CHECK_TWINS(bench, {
            operators.head_rms_norm(HeadRmsNormArgs<E>{side.view(x, rows, 3, width, pad),
                                                       side.weight(weight, dtype, 1, width), 1e-6f},
                                    stream);
          });
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("16-bit rotary embedding on a GPU agrees with f32", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  for (const bool is_interleaved : {false, true}) {
    for (const std::int64_t rotary : {64, 22}) {
      for (const std::int64_t width : {rotary, rotary + 64, rotary + 5}) {
        for (const std::int64_t pad : kPads) {
          for (const std::int64_t heads : {1, 3, 40}) {
            for (const bool in_place : {false, true}) {
              CAPTURE(is_interleaved, rotary, width, pad, heads, in_place);
              bench.clear();
              const auto positions = bench.same(std::vector<std::int64_t>{0, 1, 77, 100000, -1});
              const auto in = bench.random(5 * heads, width + pad);
              const auto out = bench.poison(5 * heads, width + pad);
              std::vector<float> values;
              for (std::int64_t i = 0; i < rotary / 2; ++i)
                values.push_back(std::pow(1e4f, -2.0f * static_cast<float>(i) / static_cast<float>(rotary)));
              const auto frequencies = bench.same(values);
              HELIX_CHECK_TWINS(bench, {
                const auto x = side.view(in, 5, heads, width, pad);
                operators.rope(RopeArgs<E>{x,
                                           in_place ? x : side.view(out, 5, heads, width, pad),
                                           side(positions),
                                           {side(frequencies), rotary, is_interleaved, 1.25f}},
                               stream);
              });
            }
          }
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("16-bit activations and row copies on a GPU take more rows than a grid holds", "", f16,
                   bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  constexpr std::int64_t kRows = 70000;  // more than the 65535 that a grid has in its second dimension
  constexpr std::int64_t kWidth = 8;
  const auto gate_up = bench.random(kRows, 2 * kWidth, 8.0);
  const auto activated = bench.poison(kRows, kWidth);
  HELIX_CHECK_TWINS(bench, {
    operators.swiglu(
        SwigluArgs<E>{side.view(gate_up, kRows, 2 * kWidth), side.view(activated, kRows, kWidth)}, stream);
  });
  bench.clear();
  std::vector<std::int32_t> backwards(at(kRows));
  for (std::size_t i = 0; i < backwards.size(); ++i)
    backwards[i] = static_cast<std::int32_t>(backwards.size() - 1 - i);
  const auto rows = bench.same(backwards);
  const auto in = bench.random(kRows, kWidth);
  const auto gathered = bench.poison(kRows, kWidth);
  HELIX_CHECK_TWINS(bench, {
    operators.gather_rows(
        GatherRowsArgs<E>{side.view(in, kRows, kWidth), side(rows), side.view(gathered, kRows, kWidth)},
        stream);
  });
  const auto table = bench.weights(kRows * kWidth, kDTypeOf<TestType>);
  const auto embedded = bench.poison(kRows, kWidth);
  HELIX_CHECK_TWINS(bench, {
    operators.embed(EmbedArgs<E>{side(rows), side.weight(table, kDTypeOf<TestType>, kRows, kWidth), 0,
                                 side.view(embedded, kRows, kWidth)},
                    stream);
  });
}

TEMPLATE_TEST_CASE("16-bit activations and row copies on a GPU agree with f32", "", f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  TwinBench<TestType> bench;
  for (const std::int64_t width : {1, 8, 33, 3000}) {
    for (const std::int64_t pad : kPads) {
      CAPTURE(width, pad);
      bench.clear();
      const auto gate_up = bench.random(5, 2 * width + pad, 8.0);
      const auto activated = bench.poison(5, width + pad);
      HELIX_CHECK_TWINS(bench, {
        operators.swiglu(
            SwigluArgs<E>{side.view(gate_up, 5, 2 * width, pad), side.view(activated, 5, width, pad)},
            stream);
      });

      bench.clear();
      const auto in = bench.random(6, width + pad);
      const auto rows = bench.same(std::vector<std::int32_t>{5, 0, 3, 3});
      const auto gathered = bench.poison(4, width + pad);
      HELIX_CHECK_TWINS(bench, {
        operators.gather_rows(
            GatherRowsArgs<E>{side.view(in, 6, width, pad), side(rows), side.view(gathered, 4, width, pad)},
            stream);
      });

      for (const DType dtype : kWeightTypes) {
        CAPTURE(to_string(dtype));
        bench.clear();
        const auto table = bench.weights(5 * width, dtype);
        const auto ids = bench.same(std::vector<std::int32_t>{10, 14, 9, 15, 12, 0, -1, 2147483647});
        const auto out = bench.poison(8, width + pad);
        HELIX_CHECK_TWINS(bench, {
          operators.embed(
              EmbedArgs<E>{side(ids), side.weight(table, dtype, 5, width), 10, side.view(out, 8, width, pad)},
              stream);
        });
      }
    }
  }
}

}  // namespace helix::test
