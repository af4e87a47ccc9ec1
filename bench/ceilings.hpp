// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most, measured beside each benchmark: streaming reads and f32 multiply-adds.
#pragma once

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <span>
#include <string_view>

#include <benchmark/benchmark.h>

namespace helix::bench {

/// Bytes a second that `num_threads` read from `data`, each its own contiguous part, as `streams` sequential
/// streams in turn: with one, the plain streaming read, front to back.
double measure_read(std::span<const std::byte> data, int num_threads, int streams);

/// f32 operations a second (a multiply-add is two) that `num_threads` reach in registers, over about 5 ms.
double measure_multiply_add(int num_threads);

/// Operations a second on pairs of bf16 with f32 sums, alike. 0 where the machine has none but tile
/// registers.
double measure_bf16_dots(int num_threads);

/// What the arithmetic of a benchmark is measured against.
enum class Peak { multiply_add, bf16_dots };

/// `bytes` (at most 1.125 GiB) of uniform random bf16 in (-1, 1), the same on every call: enough to leave
/// most last-level caches between two passes.
std::span<std::byte> random_bf16(std::size_t bytes);

/// Runs `work` once an iteration of `state` and the ceilings next to it each time, because shared machines
/// and clocks drift. Reports medians: the time, bytes/s and flop/s of `work`, which moves `bytes` and
/// computes `flops`; % of the streaming read; % of the roofline, the larger of bytes / streaming read and
/// flops / multiply-adds over the time; and % of the faster of the streaming read and a read in 8 interleaved
/// streams, which draws more from some memories. `streamed` is what the read ceilings read. With
/// Peak::bf16_dots the roofline has their rate for multiply-adds', where there is one.
void run_beside_ceilings(benchmark::State& state, int num_threads, double bytes, double flops,
                         std::span<const std::byte> streamed, const std::function<void()>& work,
                         Peak peak = Peak::multiply_add);

/// Hardware threads of this machine.
int num_cores();

/// Repeats `work` until `kernels` (names of helix::cpu::tuning()) work in the way that they stay with: until
/// then calls of them take turns. Ends all the same for a kernel whose calls are too small to be timed.
void choose_kernels(std::initializer_list<std::string_view> kernels, const std::function<void()>& work);

}  // namespace helix::bench
