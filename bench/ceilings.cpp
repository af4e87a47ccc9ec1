// SPDX-License-Identifier: Apache-2.0
// Measures the ceilings with SIMD code that is compiled for each instruction set and chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ceilings.cpp"
#include <hwy/foreach_target.h>
// These must come after foreach_target.h.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <string_view>
#include <thread>
#include <vector>

#include <hwy/highway.h>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/tuning.hpp>
#include <helix/dtype.hpp>
#include <helix/error.hpp>

#include "ceilings.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::bench::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

/// Reads 8 vectors from each stream in turn.
float read_target(const float* data, std::size_t count, std::size_t streams) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  auto a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0;
  const std::size_t part = count / streams;
  for (std::size_t i = 0; i + 8 * lanes <= part; i += 8 * lanes) {
    for (std::size_t stream = 0; stream < streams; ++stream) {
      const float* from = data + stream * part + i;
      a0 = hn::Add(a0, hn::LoadU(d, from));
      a1 = hn::Add(a1, hn::LoadU(d, from + lanes));
      a2 = hn::Add(a2, hn::LoadU(d, from + 2 * lanes));
      a3 = hn::Add(a3, hn::LoadU(d, from + 3 * lanes));
      a4 = hn::Add(a4, hn::LoadU(d, from + 4 * lanes));
      a5 = hn::Add(a5, hn::LoadU(d, from + 5 * lanes));
      a6 = hn::Add(a6, hn::LoadU(d, from + 6 * lanes));
      a7 = hn::Add(a7, hn::LoadU(d, from + 7 * lanes));
    }
  }
  const auto sum =
      hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)), hn::Add(hn::Add(a4, a5), hn::Add(a6, a7)));
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

/// Floating-point operations in one step of multiply_add_target.
double step_flops_target() {
  return 12.0 * 2.0 * static_cast<double>(hn::Lanes(hn::ScalableTag<float>()));
}

// 12 chains: more than latency times throughput of any core, and they fit in 16 registers.
float multiply_add_target(std::int64_t steps) {
  const hn::ScalableTag<float> d;
  const auto x = hn::Set(d, 0.999f), y = hn::Set(d, 0.125f);
  auto a0 = hn::Iota(d, 0), a1 = hn::Iota(d, 1), a2 = hn::Iota(d, 2), a3 = hn::Iota(d, 3),
       a4 = hn::Iota(d, 4), a5 = hn::Iota(d, 5), a6 = hn::Iota(d, 6), a7 = hn::Iota(d, 7),
       a8 = hn::Iota(d, 8), a9 = hn::Iota(d, 9), a10 = hn::Iota(d, 10), a11 = hn::Iota(d, 11);
  for (std::int64_t i = 0; i < steps; ++i) {
    a0 = hn::MulAdd(a0, x, y), a1 = hn::MulAdd(a1, x, y), a2 = hn::MulAdd(a2, x, y),
    a3 = hn::MulAdd(a3, x, y);
    a4 = hn::MulAdd(a4, x, y), a5 = hn::MulAdd(a5, x, y), a6 = hn::MulAdd(a6, x, y),
    a7 = hn::MulAdd(a7, x, y);
    a8 = hn::MulAdd(a8, x, y), a9 = hn::MulAdd(a9, x, y), a10 = hn::MulAdd(a10, x, y),
    a11 = hn::MulAdd(a11, x, y);
  }
  const auto sum =
      hn::Add(hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)), hn::Add(hn::Add(a4, a5), hn::Add(a6, a7))),
              hn::Add(hn::Add(a8, a9), hn::Add(a10, a11)));
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

}  // namespace
}  // namespace helix::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace helix::bench {
namespace {

#if defined(__x86_64__)
#define HELIX_BENCH_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

constexpr int kDotChains = 12;

HELIX_BENCH_BF16 float bf16_dots(std::int64_t steps) {
  const __m512 ones = _mm512_set1_ps(0.5f);
  __m512bh x;
  std::memcpy(&x, &ones, sizeof(x));
  __m512 sums[kDotChains];
  for (int chain = 0; chain < kDotChains; ++chain) sums[chain] = _mm512_set1_ps(static_cast<float>(chain));
  for (std::int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int chain = 0; chain < kDotChains; ++chain) sums[chain] = _mm512_dpbf16_ps(sums[chain], x, x);
  }
  float total = 0.0f;
  for (const __m512& sum : sums) total += _mm512_cvtss_f32(sum);
  return total;
}
#endif

HWY_EXPORT(read_target);
HWY_EXPORT(step_flops_target);
HWY_EXPORT(multiply_add_target);

constexpr std::size_t kMaxRandomBytes = std::size_t{9} << 27;  // a latent cache of 1M tokens

/// Seconds until all of `body(0 .. num_threads - 1)` have returned.
template <class Body>
double time_threads(int num_threads, const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int thread = 1; thread < num_threads; ++thread) others.emplace_back([&body, thread] { body(thread); });
  body(0);
  for (std::thread& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

double measure_read(std::span<const std::byte> data, int num_threads, int streams) {
  const std::size_t part = data.size() / sizeof(float) / static_cast<std::size_t>(num_threads);
  const auto* floats = reinterpret_cast<const float*>(data.data());
  const double seconds = time_threads(num_threads, [&](int thread) {
    const float* first = floats + static_cast<std::size_t>(thread) * part;
    float sum = HWY_DYNAMIC_DISPATCH(read_target)(first, part, static_cast<std::size_t>(streams));
    benchmark::DoNotOptimize(sum);
  });
  return static_cast<double>(part * sizeof(float)) * num_threads / seconds;
}

double measure_multiply_add(int num_threads) {
  constexpr std::int64_t kSteps = 2'000'000;
  const double seconds = time_threads(num_threads, [](int) {
    float sum = HWY_DYNAMIC_DISPATCH(multiply_add_target)(kSteps);
    benchmark::DoNotOptimize(sum);
  });
  return static_cast<double>(kSteps) * HWY_DYNAMIC_DISPATCH(step_flops_target)() * num_threads / seconds;
}

double measure_bf16_dots([[maybe_unused]] int num_threads) {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0 || (eax & 1u << 5) == 0) return 0.0;
  constexpr std::int64_t kSteps = 2'000'000;
  const double seconds = time_threads(num_threads, [](int) {
    float sum = bf16_dots(kSteps);
    benchmark::DoNotOptimize(sum);
  });
  return static_cast<double>(kSteps) * kDotChains * 64.0 * num_threads / seconds;
#else
  return 0.0;
#endif
}

std::span<std::byte> random_bf16(std::size_t bytes) {
  HELIX_EXPECTS(bytes <= kMaxRandomBytes, ErrorCode::invalid_argument, "random_bf16: ", bytes,
                " bytes asked, at most ", kMaxRandomBytes);
  static const cpu::Buffer buffer = [] {
    cpu::Buffer memory(kMaxRandomBytes);
    auto* words = reinterpret_cast<std::uint16_t*>(memory.data());
    std::uint64_t state = 0x9e3779b97f4a7c15u;
    for (std::size_t i = 0; i < kMaxRandomBytes / sizeof(bf16); i += 2) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;  // xorshift64
      for (int half = 0; half < 2; ++half) {
        const auto bits = static_cast<std::int32_t>(state >> (32 * half));
        words[i + static_cast<std::size_t>(half)] = bf16(static_cast<float>(bits) * 0x1p-31f).bits;
      }
    }
    return memory;
  }();
  return {buffer.data(), bytes};
}

int num_cores() {
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

void choose_kernels(std::initializer_list<std::string_view> kernels, const std::function<void()>& work) {
  constexpr int kMaxTurns = 128;  // at most 20 variants, each timed six times
  const auto takes_turns = [&](const cpu::KernelTuning& tuning) {
    return tuning.source == cpu::KernelTuning::Source::preset &&
           std::ranges::find(kernels, tuning.kernel) != kernels.end();
  };
  for (int turn = 0; turn < kMaxTurns && std::ranges::any_of(cpu::tuning(), takes_turns); ++turn) work();
}

void run_beside_ceilings(benchmark::State& state, int num_threads, double bytes, double flops,
                         std::span<const std::byte> streamed, const std::function<void()>& work, Peak peak) {
  const bool has_dots = peak == Peak::bf16_dots && measure_bf16_dots(1) > 0.0;
  std::vector<double> times, reads, interleaved_reads, products;
  work();  // warms up page tables, caches and clocks
  for (auto _ : state) {
    reads.push_back(measure_read(streamed, num_threads, 1));
    interleaved_reads.push_back(measure_read(streamed, num_threads, 8));
    products.push_back(has_dots ? measure_bf16_dots(num_threads) : measure_multiply_add(num_threads));
    const auto start = std::chrono::steady_clock::now();
    work();
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    state.SetIterationTime(times.back());
  }
  const double seconds = median(times);
  const double read = median(reads);
  const double best_read = std::max(read, median(interleaved_reads));
  const double product = median(products);
  state.counters["bytes/s"] = bytes / seconds;
  state.counters["flop/s"] = flops / seconds;
  state.counters["read_bytes/s"] = read;
  state.counters["peak_flop/s"] = product;
  state.counters["best_read_bytes/s"] = best_read;
  state.counters["%_of_stream"] = 100.0 * bytes / seconds / read;
  state.counters["%_of_best_read"] = 100.0 * bytes / seconds / best_read;
  state.counters["%_of_roofline"] = 100.0 * std::max(bytes / read, flops / product) / seconds;
  state.counters["median_ms"] = 1e3 * seconds;
}

}  // namespace helix::bench
#endif
