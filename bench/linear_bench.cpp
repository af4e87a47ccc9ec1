// SPDX-License-Identifier: Apache-2.0
// linear on the CPU: rows of activations times 4096 x 4096 bf16 weights. Each call uses another copy of the
// weights out of 1 GiB. Activations are f32, or rounded to bf16.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <helix/cpu/backend.hpp>

#include "ceilings.hpp"
#include "support/worse.hpp"

namespace {

constexpr std::int64_t kSize = 4096;
constexpr std::int64_t kMatrices = 32;
constexpr std::size_t kMatrixBytes = kSize * kSize * 2;

void bench_linear(benchmark::State& state, std::int64_t rows, helix::cpu::ProductInputs inputs,
                  int num_threads) {
  const bool is_rounded = inputs == helix::cpu::ProductInputs::bf16;
  const auto memory = helix::bench::random_bf16(kMatrices * kMatrixBytes);
  // Products of few rows stream the whole GiB per iteration; those of many rows are bound by arithmetic and
  // need only a few calls.
  const std::int64_t calls = rows <= 8 ? kMatrices : std::max<std::int64_t>(1, kMatrices * 8 / rows / 2);
  std::mt19937 random(std::random_device{}());
  std::normal_distribution<float> normal;
  std::vector<float> in(static_cast<std::size_t>(rows * kSize));
  for (float& x : in) x = normal(random);
  std::vector<float> out(in.size());
  helix::cpu::Operators operators(num_threads, inputs);
  helix::cpu::Stream stream = operators.create_stream();
  helix::LinearArgs<float> args;
  args.in = {in.data(), {rows, kSize}};
  args.out = {out.data(), {rows, kSize}};
  std::int64_t next = 0;
  const double bytes = static_cast<double>(calls) * kMatrixBytes;
  const double flops = 2.0 * static_cast<double>(calls * rows * kSize * kSize);
  const auto work = [&] {
    for (std::int64_t call = 0; call < calls; ++call, next = (next + 1) % kMatrices) {
      args.weight = {memory.data() + static_cast<std::size_t>(next) * kMatrixBytes, helix::DType::bf16, kSize,
                     kSize};
      operators.linear(args, stream);
    }
    operators.synchronize(stream);
  };
  // Which kernel takes these rows depends on the machine, so choose_kernels() cannot be told. Instead, make
  // as many calls as each kernel needs to choose a variant.
  constexpr std::int64_t kTurns = 6 * 6;  // at most 6 variants, each timed six times
  for (std::int64_t turns = 0; turns < kTurns; turns += calls) work();
  helix::bench::run_beside_ceilings(
      state, num_threads, bytes, flops, memory, work,
      is_rounded ? helix::bench::Peak::bf16_dots : helix::bench::Peak::multiply_add);
  state.counters["us_per_call"] = state.counters["median_ms"] * 1e3 / static_cast<double>(calls);

  double worst = 0.0;
  for (std::int64_t n = 0; n < kSize; n += 37) {
    const std::int64_t r = n % rows;
    double expected = 0.0;
    double magnitude = 0.0;
    for (std::int64_t k = 0; k < kSize; ++k) {
      helix::bf16 weight;
      std::memcpy(&weight, static_cast<const std::byte*>(args.weight.data) + (n * kSize + k) * 2,
                  sizeof(weight));
      const float x = in[static_cast<std::size_t>(r * kSize + k)];
      const double term = static_cast<double>(is_rounded ? static_cast<float>(helix::bf16(x)) : x) *
                          static_cast<float>(weight);
      expected += term;
      magnitude += std::abs(term);
    }
    worst = helix::test::worse(worst,
                               std::abs(expected - out[static_cast<std::size_t>(r * kSize + n)]) / magnitude);
  }
  state.counters["max_error"] = worst;
  if (!(worst < 1e-6)) state.SkipWithError("the result that was timed is wrong");
}

const int kRegistered = [] {
  using helix::cpu::ProductInputs;
  for (const auto& [text, inputs] : {std::pair{"f32", ProductInputs::f32}, {"bf16", ProductInputs::bf16}}) {
    for (std::int64_t rows : {1, 2, 4, 8, 16, 64, 256, 512}) {
      for (int num_threads : {1, 2}) {
        const std::string name = std::string("linear/") + text + "/" + std::to_string(rows) +
                                 "/threads:" + std::to_string(num_threads);
        benchmark::RegisterBenchmark(
            name.c_str(),
            [=, inputs = inputs](benchmark::State& state) { bench_linear(state, rows, inputs, num_threads); })
            ->UseManualTime()
            ->Iterations(7)
            ->Unit(benchmark::kMillisecond);
      }
    }
  }
  return 0;
}();

}  // namespace
