// SPDX-License-Identifier: Apache-2.0
// The CPU's products: every kernel and every way of reading, compared with sums in double and with each
// other.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include <helix/cpu/backend.hpp>

#include "cpu/amx.hpp"
#include "cpu/linear/product.hpp"
#include "cpu/linear/task.hpp"
#include "support/catch.hpp"
#include "support/equal_bits.hpp"
#include "support/skipped.hpp"
#include "support/worse.hpp"

namespace helix::test {
namespace {

using namespace cpu::linear;
using cpu::ProductInputs;

/// Rows of activations, and a matrix as checkpoints store it.
struct Operands {
  std::int64_t num_rows;
  std::int64_t cols;
  std::int64_t weight_rows;
  DType dtype;
  std::vector<float> in;
  std::vector<std::byte> weight;
  std::vector<float> widened;

  Operands(std::int64_t rows, std::int64_t k, std::int64_t n, DType type, unsigned seed)
      : num_rows(rows), cols(k), weight_rows(n), dtype(type) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    in.resize(static_cast<std::size_t>(rows * k));
    for (float& x : in) x = normal(random);
    widened.resize(static_cast<std::size_t>(n * k));
    weight.resize(widened.size() * size_bytes(type));
    dispatch(type, [&]<class T>(T*) {
      for (std::size_t i = 0; i < widened.size(); ++i) {
        const T value(normal(random));
        std::memcpy(weight.data() + i * sizeof(T), &value, sizeof(T));
        widened[i] = static_cast<float>(value);
      }
    });
  }

  /// The dot product of two rows, and the sum of the magnitudes of its terms.
  std::pair<double, double> expected(std::int64_t row, std::int64_t n, bool is_rounded) const {
    double sum = 0.0;
    double magnitude = 0.0;
    for (std::int64_t k = 0; k < cols; ++k) {
      const float x = in[static_cast<std::size_t>(row * cols + k)];
      const double term = static_cast<double>(is_rounded ? static_cast<float>(bf16(x)) : x) *
                          widened[static_cast<std::size_t>(n * cols + k)];
      sum += term;
      magnitude += std::abs(term);
    }
    return {sum, magnitude};
  }
};

/// `weight` points to the weights if they are not in `operands`.
std::vector<float> multiply_as(const Operands& operands, Kernel kernel, Reading reading,
                               const std::byte* weight = nullptr) {
  std::vector<std::byte> packed(
      static_cast<std::size_t>(packed_rows(operands.num_rows) * packed_cols(operands.cols)) * sizeof(float));
  for (std::int64_t row = 0; row < operands.num_rows; row += kBlockRows) {
    const std::int64_t count = std::min(kBlockRows, operands.num_rows - row);
    const float* from = operands.in.data() + row * operands.cols;
    const std::int64_t place = row * packed_cols(operands.cols);
    if (kernel == Kernel::vectors) {
      pack_for_vectors(operands.dtype, from, operands.cols, count, operands.cols,
                       reinterpret_cast<float*>(packed.data()) + place);
    } else {
      pack_for_bf16_dots(from, operands.cols, count, operands.cols,
                         reinterpret_cast<bf16*>(packed.data()) + place);
    }
  }
  std::vector<float> out(static_cast<std::size_t>(operands.num_rows * operands.weight_rows), -7.0f);
  Task task;
  task.kernel = kernel;
  task.reading = reading;
  task.in = packed.data();
  task.num_rows = operands.num_rows;
  task.weight = weight != nullptr ? weight : operands.weight.data();
  task.dtype = operands.dtype;
  task.cols = operands.cols;
  task.num_weight_rows = operands.weight_rows;
  task.out = out.data();
  task.out_stride = operands.weight_rows;
  multiply(task);
  return out;
}

std::vector<float> multiply_whole(const Operands& operands, ProductInputs inputs, int num_threads) {
  const cpu::Operators operators(num_threads, inputs);
  cpu::Stream stream = operators.create_stream();
  std::vector<float> out(static_cast<std::size_t>(operands.num_rows * operands.weight_rows));
  LinearArgs<float> args;
  args.in = {operands.in.data(), {operands.num_rows, operands.cols}};
  args.weight = {operands.weight.data(), operands.dtype, operands.weight_rows, operands.cols};
  args.out = {out.data(), {operands.num_rows, operands.weight_rows}};
  operators.linear(args, stream);
  operators.synchronize(stream);
  return out;
}

/// The product with tile registers of either kind.
std::vector<float> multiply_on_tiles(const Operands& operands, Kernel kernel, Reading reading) {
  const std::int64_t cols = operands.cols;
  const std::int64_t blocks = (operands.num_rows + kTileRows - 1) / kTileRows;
  cpu::Buffer packed(static_cast<std::size_t>(blocks * packed_cols(cols) * kTileBytes));
  auto* to = reinterpret_cast<bf16*>(packed.data());
  for (std::int64_t row = 0; row < operands.num_rows; row += kTileRows) {
    const std::int64_t count = std::min(kTileRows, operands.num_rows - row);
    const float* from = operands.in.data() + row * cols;
    if (kernel == Kernel::tiles) {
      pack_for_tiles(from, cols, count, cols, to);
      to += packed_cols(cols) * kTileBytes / 2;
    } else {
      pack_for_bf16_tiles(from, cols, count, cols, to);
      to += packed_cols(cols) * kTileRows;
    }
  }
  std::vector<float> out(static_cast<std::size_t>(operands.num_rows * operands.weight_rows), -7.0f);
  Task task;
  task.kernel = kernel;
  task.reading = reading;
  task.in = packed.data();
  task.num_rows = operands.num_rows;
  task.weight = operands.weight.data();
  task.dtype = DType::bf16;
  task.cols = cols;
  task.num_weight_rows = operands.weight_rows;
  task.out = out.data();
  task.out_stride = operands.weight_rows;
  multiply(task);
  return out;
}

constexpr std::int64_t kCols[] = {1, 31, 32, 33, 767, 768, 769, 2047, 2049, 4100};
constexpr std::int64_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 35};

}  // namespace

TEST_CASE("every way of reading weights gives the same bits, near sums in double") {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
    for (const std::int64_t cols : kCols) {
      for (const std::int64_t rows : kRows) {
        const Operands operands(rows, cols, 67, dtype, static_cast<unsigned>(cols * 100 + rows));
        INFO(to_string(dtype) << ", " << rows << " rows of " << cols);
        const std::vector<float> plain = multiply_as(operands, Kernel::vectors, Reading::plain);
        for (const Reading reading : {Reading::ahead, Reading::ahead_pairs, Reading::near, Reading::rows,
                                      Reading::strips, Reading::strips_ahead})
          CHECK(have_equal_bits(plain, multiply_as(operands, Kernel::vectors, reading)));
        double worst = 0.0;
        for (std::int64_t i = 0; i < rows * 67; i += 11) {
          const auto [sum, magnitude] = operands.expected(i / 67, i % 67, false);
          worst = worse(worst, std::abs(plain[static_cast<std::size_t>(i)] - sum) / magnitude);
        }
        CHECK(worst < 1e-6);
      }
    }
  }
}

TEST_CASE("products of bf16 round the activations and nothing else") {
  for (const std::int64_t cols : kCols) {
    for (const std::int64_t rows : kRows) {
      const Operands operands(rows, cols, 67, DType::bf16, static_cast<unsigned>(cols * 100 + rows));
      INFO(rows << " rows of " << cols);
      if (has_bf16_dots()) {
        const std::vector<float> plain = multiply_as(operands, Kernel::bf16_dots, Reading::plain);
        for (const Reading reading :
             {Reading::ahead, Reading::ahead_pairs, Reading::rows, Reading::strips, Reading::strips_ahead})
          CHECK(have_equal_bits(plain, multiply_as(operands, Kernel::bf16_dots, reading)));
        for (const Reading reading : {Reading::rows2, Reading::rows4}) {
          if (rows == 1) CHECK(have_equal_bits(plain, multiply_as(operands, Kernel::bf16_dots, reading)));
        }
      }
      const std::vector<float> out = multiply_whole(operands, ProductInputs::bf16, 1);
      CHECK(have_equal_bits(out, multiply_whole(operands, ProductInputs::bf16, 3)));
      double worst = 0.0;
      for (std::int64_t i = 0; i < rows * 67; ++i) {
        const auto [sum, magnitude] = operands.expected(i / 67, i % 67, true);
        worst = worse(worst, std::abs(out[static_cast<std::size_t>(i)] - sum) / magnitude);
      }
      CHECK(worst < 1e-6);
    }
  }
}

TEST_CASE("tiles of bf16 give the bits of f32 tiles whose rows are bf16 already") {
  if (!cpu::amx::available()) return skip("there are no tile registers");
  for (const std::int64_t cols : {1, 31, 32, 33, 544, 2047, 2048, 2081, 4128}) {
    for (const std::int64_t rows : {1, 5, 8, 9, 16, 17, 32, 33, 48, 64, 65, 255, 257, 290}) {
      for (const std::int64_t weight_rows : {1, 16, 17, 33, 64, 67}) {
        if (rows * cols * weight_rows > 20'000'000) continue;
        Operands operands(rows, cols, weight_rows, DType::bf16, static_cast<unsigned>(cols + rows));
        INFO(rows << " rows of " << cols << ", " << weight_rows << " weight rows");
        const std::vector<float> out = multiply_on_tiles(operands, Kernel::bf16_tiles, Reading::plain);
        CHECK(have_equal_bits(out, multiply_on_tiles(operands, Kernel::bf16_tiles, Reading::ahead)));
        for (float& x : operands.in) x = static_cast<float>(bf16(x));
        CHECK(have_equal_bits(out, multiply_on_tiles(operands, Kernel::tiles, Reading::plain)));
        CHECK(have_equal_bits(out, multiply_on_tiles(operands, Kernel::tiles, Reading::ahead)));
      }
    }
  }
}

TEST_CASE("where weights lie changes no bit, and nothing beside them is read into a result") {
  for (const std::int64_t cols : kCols) {
    for (const std::int64_t rows : {1, 2, 5}) {
      Operands operands(rows, cols, 11, DType::bf16, static_cast<unsigned>(cols + rows));
      const std::vector<std::byte> weight = operands.weight;
      const auto read_everywhere = [&](Kernel kernel, Reading reading) {
        std::vector<float> first;
        for (const std::size_t shift : {0, 2, 8, 30, 40, 62}) {
          INFO(rows << " rows of " << cols << ", " << shift << " bytes behind a line, kernel "
                    << static_cast<int>(kernel) << ", reading " << static_cast<int>(reading));
          // Surrounded by NaN, in a vector of exactly this size.
          std::vector<bf16> memory(64 + weight.size() / sizeof(bf16), bf16(NAN));
          auto* begin = reinterpret_cast<std::byte*>(memory.data());
          begin += (64 - reinterpret_cast<std::uintptr_t>(begin) % 64) % 64 + shift;
          std::memcpy(begin, weight.data(), weight.size());
          const std::vector<float> out = multiply_as(operands, kernel, reading, begin);
          if (first.empty()) first = out;
          CHECK(have_equal_bits(first, out));
        }
      };
      for (const Reading reading :
           {Reading::rows, Reading::strips, Reading::strips_ahead, Reading::ahead, Reading::plain}) {
        read_everywhere(Kernel::vectors, reading);
        if (has_bf16_dots()) read_everywhere(Kernel::bf16_dots, reading);
      }
      if (rows > 1 || !has_bf16_dots()) continue;
      for (const Reading reading : {Reading::rows2, Reading::rows4})
        read_everywhere(Kernel::bf16_dots, reading);
    }
  }
}

TEST_CASE("an output's bits depend on its two rows alone") {
  for (const ProductInputs inputs : {ProductInputs::f32, ProductInputs::bf16}) {
    // Tile registers add in another order than the kernels for few rows.
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      if (dtype == DType::bf16 && cpu::amx::available()) continue;
      const Operands all(40, 3000, 333, dtype, 5);
      const std::vector<float> together = multiply_whole(all, inputs, 2);
      for (const std::int64_t row : {0, 7, 38, 39}) {
        Operands one = all;
        one.num_rows = 1;
        const auto begin = all.in.begin() + row * all.cols;
        one.in.assign(begin, begin + all.cols);
        const std::vector<float> alone = multiply_whole(one, inputs, 1);
        INFO(to_string(dtype) << " row " << row);
        CHECK(std::equal(alone.begin(), alone.end(), together.begin() + row * all.weight_rows));
      }
    }
  }
}

TEST_CASE("what the activations are is of no concern to weights that are not bf16") {
  for (const DType dtype : {DType::f32, DType::f16}) {
    const Operands operands(5, 1000, 100, dtype, 3);
    CHECK(have_equal_bits(multiply_whole(operands, ProductInputs::f32, 2),
                          multiply_whole(operands, ProductInputs::bf16, 2)));
  }
}

// Of the activations: infinite weights may give NaN on tiles, see cpu/amx.hpp.
TEST_CASE("infinities and NaN of activations pass through products as they are") {
  constexpr std::int64_t kCols = 100;
  constexpr std::int64_t kWeightRows = 5;
  for (const ProductInputs inputs : {ProductInputs::f32, ProductInputs::bf16}) {
    for (const std::int64_t rows :
         {std::int64_t{2}, cpu::amx::kMinRows, cpu::amx::kHalfRows + 1, cpu::amx::kRows + 1}) {
      Operands operands(rows, kCols, kWeightRows, DType::bf16, 9);
      operands.in[3] = INFINITY;
      operands.in.back() = NAN;
      const std::vector<float> out = multiply_whole(operands, inputs, 1);
      for (std::int64_t i = 0; i < rows * kWeightRows; ++i) {
        INFO(rows << " rows, output " << i);
        const float value = out[static_cast<std::size_t>(i)];
        const std::int64_t row = i / kWeightRows;
        CHECK(std::isinf(value) == (row == 0));
        CHECK(std::isnan(value) == (row == rows - 1));
      }
    }
  }
}

}  // namespace helix::test
