// SPDX-License-Identifier: Apache-2.0
// Norms, products, rope and activations, compared with their definitions in double.
#pragma once

#include <cstdint>
#include <vector>

#include <helix/contract/workbench.hpp>
#include <helix/reduce_norm.hpp>

namespace helix::contract {

template <TestableBackend B>
void rms_norm() {
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t rows : {0, 1, 3}) {
      for (const std::int64_t width : {1, 7, 8, 16, 33, 130}) {
        for (const bool adds : {false, true}) {
          for (const bool normalizes : {true, false}) {
            if (!adds && !normalizes) continue;
            CAPTURE(to_string(dtype), rows, width, adds, normalizes);
            Workbench<B> bench;
            const auto delta = bench.random(rows * width);
            const auto residual = bench.random(rows * (width + 5));
            const auto weight = bench.weight(1, width, dtype);
            const auto out = bench.poison(rows * width);
            HELIX_CHECK_OPERATION(bench, rms_norm, ([&](const auto& side) {
                                    RmsNormArgs<float> args;
                                    if (adds) args.delta = side.view(delta, rows, width);
                                    args.residual = {side(residual), {rows, width}, {width + 5, 1}};
                                    if (normalizes) {
                                      args.weight = weight.on(side);
                                      args.out = side.view(out, rows, width);
                                    }
                                    args.epsilon = 1e-3f;
                                    return args;
                                  }));
          }
        }
      }
    }
  }
  Workbench<B> bench;
  const auto x = bench.random(2 * 24);
  const auto weight = bench.weight(1, 24);
  HELIX_CHECK_OPERATION(bench, rms_norm, ([&](const auto& side) {
                          const auto view = side.view(x, 2, 24);
                          return RmsNormArgs<float>{{}, view, weight.on(side), view, 1e-5f};
                        }));
}

template <TestableBackend B>
void linear() {
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t rows : {0, 1, 2, 4, 5, 17}) {
      for (const std::int64_t k : {0, 1, 7, 8, 16, 17, 65}) {
        for (const std::int64_t n : {0, 1, 3, 16, 33}) {
          const bool has_bias = (rows + k + n) % 2 == 0;
          const bool accumulates = (rows + k) % 3 == 0;
          CAPTURE(to_string(dtype), rows, k, n, has_bias, accumulates);
          Workbench<B> bench;
          const auto in = bench.random(rows * (k + 3));
          const auto weight = bench.weight(n, k, dtype);
          const auto bias = bench.weight(1, n, dtype);
          const auto out = accumulates ? bench.random(rows * (n + 2)) : bench.poison(rows * (n + 2));
          HELIX_CHECK_OPERATION(bench, linear, ([&](const auto& side) {
                                  return LinearArgs<float>{{side(in), {rows, k}, {k + 3, 1}},
                                                           weight.on(side),
                                                           has_bias ? bias.on(side) : WeightView{},
                                                           {side(out), {rows, n}, {n + 2, 1}},
                                                           accumulates};
                                }));
        }
      }
    }
  }
}

template <TestableBackend B>
void head_linear() {
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t tokens : {0, 1, 5, 9}) {
      for (const std::int64_t heads : {1, 3}) {
        for (const std::int64_t k : {1, 8, 17}) {
          for (const std::int64_t n : {1, 16, 35}) {
            CAPTURE(to_string(dtype), tokens, heads, k, n);
            Workbench<B> bench;
            const auto in = bench.random(tokens * heads * (k + 4));
            const auto weight = bench.weight(heads * n, k, dtype);
            const auto out = bench.poison(tokens * heads * (n + 6));
            HELIX_CHECK_OPERATION(bench, head_linear, ([&](const auto& side) {
                                    return HeadLinearArgs<float>{
                                        {side(in), {tokens, heads, k}, {heads * (k + 4), k + 4, 1}},
                                        weight.on(side),
                                        {side(out), {tokens, heads, n}, {heads * (n + 6), n + 6, 1}}};
                                  }));
          }
        }
      }
    }
  }
}

template <TestableBackend B>
void head_rms_norm() {
  for (const std::int64_t tokens : {0, 1, 3}) {
    for (const std::int64_t heads : {1, 5}) {
      for (const std::int64_t width : {1, 16, 33}) {
        CAPTURE(tokens, heads, width);
        Workbench<B> bench;
        const std::int64_t row = heads * width + 7;
        const auto x = bench.random(tokens * row);
        const auto weight = bench.weight(1, width, width == 16 ? DType::bf16 : DType::f32);
        HELIX_CHECK_OPERATION(
            bench, head_rms_norm, ([&](const auto& side) {
              return HeadRmsNormArgs<float>{
                  {side(x), {tokens, heads, width}, {row, width, 1}}, weight.on(side), 1e-4f};
            }));
      }
    }
  }
}

template <TestableBackend B>
void rope() {
  for (const bool is_interleaved : {false, true}) {
    for (const bool in_place : {false, true}) {
      for (const std::int64_t rotary : {0, 2, 8, 22}) {
        for (const std::int64_t width : {rotary, rotary + 5}) {
          if (width == 0) continue;
          CAPTURE(is_interleaved, in_place, rotary, width);
          Workbench<B> bench;
          const std::vector<std::int64_t> position_values{0, 1, 77, 5000, -1, 1048575, 16777217, 3};
          const auto tokens = static_cast<std::int64_t>(position_values.size());
          const std::int64_t heads = 3;
          const std::int64_t row = heads * width + 1;
          const auto in = bench.random(tokens * row);
          const auto out = bench.poison(tokens * heads * width);
          const auto positions = bench.array(position_values);
          std::vector<float> frequencies;
          for (std::int64_t i = 0; i < rotary / 2; ++i)
            frequencies.push_back(static_cast<float>(
                std::pow(1e4, -2.0 * static_cast<double>(i) / static_cast<double>(rotary))));
          const auto inverse_frequency = bench.array(frequencies);
          HELIX_CHECK_OPERATION(
              bench, rope, ([&](const auto& side) {
                const TensorView<float, 3> x(side(in), {tokens, heads, width}, {row, width, 1});
                return RopeArgs<float>{x,
                                       in_place ? x : side.view(out, tokens, heads, width),
                                       side(positions),
                                       {side(inverse_frequency), rotary, is_interleaved, 1.25f}};
              }));
        }
      }
    }
  }
  for (const std::int64_t heads : {1, 5, 40}) {  // one row into each head, no positions
    CAPTURE(heads);
    Workbench<B> bench;
    const auto in = bench.random(3 * 8);
    const auto out = bench.poison(3 * heads * 11);
    HELIX_CHECK_OPERATION(bench, rope, ([&](const auto& side) {
                            return RopeArgs<float>{{side(in), {3, heads, 8}, {8, 0, 1}},
                                                   {side(out), {3, heads, 8}, {heads * 11, 11, 1}},
                                                   nullptr,
                                                   {}};
                          }));
  }
}

template <TestableBackend B>
void swiglu() {
  for (const std::int64_t rows : {0, 1, 5}) {
    for (const std::int64_t width : {0, 1, 8, 33}) {
      CAPTURE(rows, width);
      Workbench<B> bench;
      const auto gate_up = bench.random(rows * 2 * width, 8.0);
      const auto out = bench.poison(rows * width);
      HELIX_CHECK_OPERATION(
          bench, swiglu, ([&](const auto& side) {
            return SwigluArgs<float>{side.view(gate_up, rows, 2 * width), side.view(out, rows, width)};
          }));
    }
  }
  Workbench<B> bench;  // no overflow for large inputs
  const auto gate_up = bench.array(std::vector<float>{-200.0f, 200.0f, 3.0f, 2.0f});
  const auto out = bench.poison(2);
  HELIX_CHECK_OPERATION(bench, swiglu, ([&](const auto& side) {
                          return SwigluArgs<float>{side.view(gate_up, 1, 4), side.view(out, 1, 2)};
                        }));
}

/// The sum over one rank, the residual and the norm: the result of reduce_norm(), whether or not the backend
/// has this operation.
template <TestableBackend B>
void reduce_norm() {
  for (const std::int64_t tokens : {1, 5}) {
    for (const bool has_norm : {false, true}) {
      CAPTURE(tokens, has_norm);
      constexpr std::int64_t kHidden = 40;
      Workbench<B> bench;
      const auto summand = bench.random(tokens * kHidden);
      const auto residual = bench.random(tokens * kHidden);
      const auto weight = bench.weight(1, kHidden, DType::bf16);
      const auto out = bench.poison(tokens * kHidden);
      const auto make = [&](const auto& side) {
        ReduceNormArgs<float> args{.summand = side.view(summand, tokens, kHidden),
                                   .residual = side.view(residual, tokens, kHidden)};
        if (has_norm) {
          args.weight = weight.on(side);
          args.out = side.view(out, tokens, kHidden);
        }
        return args;
      };
      bench.check(
          make,
          [](const ReduceNormArgs<float>& args) {
            reference::rms_norm({args.summand, args.residual, args.weight, args.out, args.epsilon});
          },
          [&](const auto& args, auto stream) { helix::reduce_norm(bench.backend(), args, stream); });
    }
  }
}

}  // namespace helix::contract
