// SPDX-License-Identifier: Apache-2.0
// The limits of this machine, measured beside each benchmark: streaming reads and f32 multiply-adds.
#pragma once

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <span>
#include <string_view>

#include <benchmark/benchmark.h>

namespace helix::bench {

/// Bytes per second that `num_threads` threads read from `data`. Each thread reads its own contiguous part as
/// `streams` interleaved sequential streams; with one stream this is the plain streaming read, front to back.
double measure_read(std::span<const std::byte> data, int num_threads, int streams);

/// f32 operations per second (a multiply-add counts as two) that `num_threads` threads reach in registers,
/// measured for about 5 ms.
double measure_multiply_add(int num_threads);

/// Operations per second on pairs of bf16 with f32 sums, measured like measure_multiply_add(). 0 if the
/// machine can do this only with tile registers, or not at all.
double measure_bf16_dots(int num_threads);

/// The peak rate with which a benchmark's arithmetic is compared.
enum class Peak { multiply_add, bf16_dots };

/// `bytes` (at most 1.125 GiB) of uniform random bf16 in (-1, 1), the same on every call. The maximum exceeds
/// most last-level caches, so that each pass finds them cold.
std::span<std::byte> random_bf16(std::size_t bytes);

/// Runs `work` once per iteration of `state`, with the ceilings measured next to it each time, because shared
/// machines and clocks drift. Reports medians: the time, bytes/s and flop/s of `work`, which moves `bytes`
/// and computes `flops`; % of the streaming read; % of the roofline, which is the larger of bytes / streaming
/// read and flops / multiply-adds, divided by the time; and % of the faster of the streaming read and a read
/// in 8 interleaved streams, which some memories serve faster. The read ceilings read `streamed`. With
/// Peak::bf16_dots the roofline uses the rate of bf16 dot products if there is one, else that of
/// multiply-adds.
void run_beside_ceilings(benchmark::State& state, int num_threads, double bytes, double flops,
                         std::span<const std::byte> streamed, const std::function<void()>& work,
                         Peak peak = Peak::multiply_add);

/// Hardware threads of this machine.
int num_cores();

/// Repeats `work` until `kernels` (names of helix::cpu::tuning()) have chosen a variant; until then their
/// calls take turns. Also stops for a kernel whose calls are too small to be timed.
void choose_kernels(std::initializer_list<std::string_view> kernels, const std::function<void()>& work);

}  // namespace helix::bench
