// SPDX-License-Identifier: Apache-2.0
// Properties of the cpu linear and head_linear against naive double-precision products.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <hwy/targets.h>

#include <helix/cpu/backend.hpp>

#include "support/catch.hpp"
#include "support/equal_bits.hpp"

namespace {

using helix::DType;
using helix::test::have_equal_bits;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// Random values of a storage type in an allocation of exactly their size, so that sanitizers detect a read
/// past the end.
class Stored {
 public:
  Stored(DType dtype, std::int64_t count, unsigned seed)
      : dtype_(dtype), bytes_(at(count) * helix::size_bytes(dtype)) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    helix::dispatch(dtype, [&]<class T>(T*) {
      for (std::int64_t i = 0; i < count; ++i) {
        const T x(uniform(random));
        std::memcpy(bytes_.data() + at(i) * sizeof(T), &x, sizeof(T));
      }
    });
  }

  helix::WeightView view(std::int64_t rows, std::int64_t cols) const {
    return {bytes_.data(), dtype_, rows, cols};
  }
  double operator[](std::int64_t i) const {
    return helix::dispatch(dtype_, [&]<class T>(T*) {
      T x;
      std::memcpy(&x, bytes_.data() + at(i) * sizeof(T), sizeof(T));
      return static_cast<double>(static_cast<float>(x));
    });
  }

 private:
  DType dtype_;
  std::vector<std::byte> bytes_;
};

struct Case {
  std::int64_t rows = 1;
  std::int64_t n = 16;
  std::int64_t k = 32;
  DType dtype = DType::bf16;
  bool has_bias = false;
  bool accumulate = false;
  std::int64_t padding = 0;  ///< elements between rows of in and out, NaN
};

/// Runs linear on random data. Returns all of `out`, including the padding.
std::vector<float> run(const Case& c, int num_threads, bool check) {
  const Stored weight(c.dtype, c.n * c.k, 1);
  const Stored bias(c.dtype, c.n, 2);
  const Stored x(DType::f32, c.rows * c.k, 3);
  const Stored before(DType::f32, c.rows * c.n, 4);
  const std::int64_t in_stride = c.k + c.padding;
  const std::int64_t out_stride = c.n + c.padding;
  std::vector<float> in(at(c.rows * in_stride), kNaN);
  std::vector<float> out(at(c.rows * out_stride), kNaN);
  for (std::int64_t r = 0; r < c.rows; ++r) {
    for (std::int64_t k = 0; k < c.k; ++k) in[at(r * in_stride + k)] = static_cast<float>(x[r * c.k + k]);
    for (std::int64_t n = 0; n < c.n && c.accumulate; ++n) {
      out[at(r * out_stride + n)] = static_cast<float>(before[r * c.n + n]);
    }
  }
  helix::cpu::Operators operators(num_threads);
  helix::cpu::Stream stream = operators.create_stream();
  helix::LinearArgs<float> args;
  args.in = {in.data(), {c.rows, c.k}, {in_stride, 1}};
  args.weight = weight.view(c.n, c.k);
  if (c.has_bias) args.bias = bias.view(1, c.n);
  args.out = {out.data(), {c.rows, c.n}, {out_stride, 1}};
  args.accumulate = c.accumulate;
  operators.linear(args, stream);
  operators.synchronize(stream);
  if (!check) return out;
  for (std::int64_t r = 0; r < c.rows; ++r) {
    for (std::int64_t n = 0; n < c.n; ++n) {
      double expected = (c.has_bias ? bias[n] : 0.0) + (c.accumulate ? before[r * c.n + n] : 0.0);
      double magnitude = std::abs(expected);
      for (std::int64_t k = 0; k < c.k; ++k) {
        expected += x[r * c.k + k] * weight[n * c.k + k];
        magnitude += std::abs(x[r * c.k + k] * weight[n * c.k + k]);
      }
      const float value = out[at(r * out_stride + n)];
      if (!(std::abs(value - expected) <= 1e-6 * magnitude)) {
        FAIL("out[" << r << ", " << n << "] is " << value << ", expected " << expected);
      }
    }
    for (std::int64_t i = 0; i < c.padding; ++i) REQUIRE(std::isnan(out[at(r * out_stride + c.n + i)]));
  }
  return out;
}

}  // namespace

TEST_CASE("linear agrees with the reference for any number of rows and any matrix") {
  const std::int64_t shapes[][2] = {{1, 1},   {3, 5},     {16, 32},    {17, 33},   {64, 64},
                                    {65, 96}, {100, 257}, {130, 1024}, {40, 1025}, {33, 2100}};
  for (std::int64_t rows : {0, 1, 2, 3, 4, 5, 8, 9, 33, 130}) {
    for (const auto& [n, k] : shapes) {
      CAPTURE(rows, n, k);
      run({.rows = rows, .n = n, .k = k}, 2, true);
    }
  }
}

TEST_CASE("linear takes every weight type, with bias, onto what is there, between strided rows") {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (bool has_bias : {false, true}) {
      for (bool accumulate : {false, true}) {
        for (std::int64_t rows : {1, 2, 4, 7, 12}) {
          CAPTURE(helix::to_string(dtype), has_bias, accumulate, rows);
          run({.rows = rows,
               .n = 75,
               .k = 131,
               .dtype = dtype,
               .has_bias = has_bias,
               .accumulate = accumulate,
               .padding = 3},
              2, true);
        }
      }
    }
  }
}

TEST_CASE("linear gives a row the same bits for any number of threads and any rows beside it") {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Case c{.rows = 37, .n = 300, .k = 2100, .dtype = dtype};
    const std::vector<float> one = run(c, 1, false);
    for (int threads : {2, 3}) {
      const std::vector<float> other = run(c, threads, false);
      REQUIRE(have_equal_bits(one, other));
    }
    // For bf16 weights, up to 4 rows and more rows may be multiplied by different instructions.
    const std::vector<float> four = run({.rows = 4, .n = 300, .k = 2100, .dtype = dtype}, 1, false);
    for (std::int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 20, 24, 30}) {
      CAPTURE(helix::to_string(dtype), rows);
      const std::vector<float> fewer = run({.rows = rows, .n = 300, .k = 2100, .dtype = dtype}, 1, false);
      const std::vector<float>& more = dtype == DType::bf16 && rows <= 4 ? four : one;
      REQUIRE(std::memcmp(more.data(), fewer.data(), fewer.size() * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("head_linear multiplies each head by its own rows") {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (std::int64_t tokens : {0, 1, 2, 5, 8, 9, 33}) {
      for (std::int64_t heads : {1, 3}) {
        const std::int64_t shapes[][2] = {{16, 32}, {70, 45}, {1, 7}, {128, 64}};
        for (const auto& [n, k] : shapes) {
          CAPTURE(helix::to_string(dtype), tokens, heads, n, k);
          const Stored weight(dtype, heads * n * k, 1);
          const Stored x(DType::f32, tokens * heads * k, 2);
          // Heads are outermost in memory, so that both strides of a token's heads differ from those of a
          // dense tensor.
          const std::int64_t pad = 2;
          std::vector<float> in(at(heads * tokens * (k + pad)), kNaN);
          std::vector<float> out(at(heads * tokens * (n + pad)), kNaN);
          for (std::int64_t t = 0; t < tokens; ++t) {
            for (std::int64_t h = 0; h < heads; ++h) {
              for (std::int64_t i = 0; i < k; ++i) {
                in[at((h * tokens + t) * (k + pad) + i)] = static_cast<float>(x[(t * heads + h) * k + i]);
              }
            }
          }
          helix::cpu::Operators operators(2);
          helix::cpu::Stream stream = operators.create_stream();
          helix::HeadLinearArgs<float> args;
          args.in = {in.data(), {tokens, heads, k}, {k + pad, tokens * (k + pad), 1}};
          args.weight = weight.view(heads * n, k);
          args.out = {out.data(), {tokens, heads, n}, {n + pad, tokens * (n + pad), 1}};
          operators.head_linear(args, stream);
          operators.synchronize(stream);
          for (std::int64_t t = 0; t < tokens; ++t) {
            for (std::int64_t h = 0; h < heads; ++h) {
              for (std::int64_t j = 0; j < n; ++j) {
                double expected = 0.0;
                double magnitude = 0.0;
                for (std::int64_t i = 0; i < k; ++i) {
                  const double term = x[(t * heads + h) * k + i] * weight[(h * n + j) * k + i];
                  expected += term;
                  magnitude += std::abs(term);
                }
                const float value = out[at((h * tokens + t) * (n + pad) + j)];
                if (!(std::abs(value - expected) <= 1e-6 * magnitude)) {
                  FAIL("out[" << t << ", " << h << ", " << j << "] is " << value << ", expected "
                              << expected);
                }
              }
              for (std::int64_t i = 0; i < pad; ++i)
                REQUIRE(std::isnan(out[at((h * tokens + t) * (n + pad) + n + i)]));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("heads that multiply the same rows give the bits of heads that have copies of them") {
  constexpr std::int64_t kHeads = 7;
  constexpr std::int64_t kWidth = 40;
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const auto inputs : {helix::cpu::ProductInputs::f32, helix::cpu::ProductInputs::bf16}) {
      for (std::int64_t tokens : {0, 1, 5, 9, 33, 300}) {
        for (std::int64_t k : {45, 256}) {
          CAPTURE(helix::to_string(dtype), int(inputs), tokens, k);
          const Stored weight(dtype, kHeads * kWidth * k, 1);
          const Stored x(DType::f32, tokens * k, 2);
          std::vector<float> once(at(tokens * k));
          std::vector<float> copies(at(tokens * kHeads * k));
          for (std::int64_t t = 0; t < tokens; ++t) {
            for (std::int64_t i = 0; i < kHeads * k; ++i)
              copies[at(t * kHeads * k + i)] = static_cast<float>(x[t * k + i % k]);
            for (std::int64_t i = 0; i < k; ++i) once[at(t * k + i)] = copies[at(t * kHeads * k + i)];
          }
          const auto multiplied = [&](const float* in, std::int64_t token_stride, std::int64_t head_stride) {
            std::vector<float> out(at(tokens * kHeads * kWidth), kNaN);
            helix::cpu::Operators operators(2, inputs);
            helix::cpu::Stream stream = operators.create_stream();
            helix::HeadLinearArgs<float> args;
            args.in = {in, {tokens, kHeads, k}, {token_stride, head_stride, 1}};
            args.weight = weight.view(kHeads * kWidth, k);
            args.out = {out.data(), {tokens, kHeads, kWidth}};
            operators.head_linear(args, stream);
            operators.synchronize(stream);
            return out;
          };
          const std::vector<float> shared = multiplied(once.data(), k, 0);
          const std::vector<float> apart = multiplied(copies.data(), kHeads * k, k);
          REQUIRE(have_equal_bits(shared, apart));
        }
      }
    }
  }
}

TEST_CASE("linear agrees with the reference on every instruction set of this machine") {
  for (std::int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
    const std::int64_t target = rest & -rest;
    CAPTURE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (std::int64_t rows : {1, 2, 4, 8, 13}) {
        CAPTURE(helix::to_string(dtype), rows);
        run({.rows = rows, .n = 75, .k = 300, .dtype = dtype, .has_bias = true}, 2, true);
      }
    }
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
}
