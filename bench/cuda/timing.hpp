// SPDX-License-Identifier: Apache-2.0
// How GPU work is timed: graphs of several launches between two events, beside the read ceiling of the same
// run, which is the better of reading by loads and by bulk copies.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <helix/cuda/graph.hpp>
#include <helix/cuda/runtime.hpp>

#include "cuda/ceilings/ceilings.hpp"

namespace helix::bench {

/// A case that is run once and says itself what time it took.
template <class Body>
void register_case(const std::string& name, const Body& body) {
  benchmark::RegisterBenchmark(name.c_str(), body)
      ->UseManualTime()
      ->Iterations(1)
      ->Unit(benchmark::kMicrosecond);
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Microseconds of one `queue(i)`, i = 0, 1, ..., launches - 1, of which one graph holds all; median over
/// `repeats` replays.
inline double time_launches(cuda::Stream stream, int launches, int repeats,
                            const std::function<void(int)>& queue) {
  queue(0);  // plans and lazy loading
  const auto graph = cuda::Graph::capture(stream, [&] {
    for (int i = 0; i < launches; ++i) queue(i);
  });
  const auto start = cuda::Event::create(true);
  const auto stop = cuda::Event::create(true);
  std::vector<double> times;
  for (int i = 0; i < repeats + 1; ++i) {
    cuda::record(start, stream);
    graph.replay(stream);
    cuda::record(stop, stream);
    cuda::synchronize(stream);
    if (i > 0) times.push_back(1e3 * static_cast<double>(cuda::elapsed_ms(start, stop)) / launches);
  }
  return median(times);
}

/// Keeps the device busy for a third of a second: clocks rise with use.
inline void warm_up(const void* data, std::size_t bytes, cuda::Stream stream) {
  const cuda::Buffer sink(256);
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(300)) {
    cuda::bench::launch_read(data, bytes, sink.data(), stream.handle());
    cuda::synchronize(stream);
  }
}

/// What the memory gives to kernels that only read, bytes a second.
struct ReadRates {
  double loads = 0.0;  ///< By a grid-stride loop of 16-byte loads.
  double bulk = 0.0;   ///< By bulk copies, with one or two blocks an SM; 0 where the GPU has none.

  /// The ceiling.
  double best() const { return std::max(loads, bulk); }
};

/// Rates of reading `bytes` (rounded down to 16) at `place(i)`, i = 0, 1, ..., launches - 1.
inline ReadRates measure_reads(std::size_t bytes, int launches, cuda::Stream stream,
                               const std::function<const void*(int)>& place) {
  const cuda::Buffer sink(256);
  const std::size_t whole = bytes / 16 * 16;
  const auto rate = [&](const auto& launch) {
    return static_cast<double>(bytes) / time_launches(stream, launches, 9, launch) * 1e6;
  };
  ReadRates rates;
  rates.loads = rate([&](int i) { cuda::bench::launch_read(place(i), whole, sink.data(), stream.handle()); });
  if (!cuda::bench::has_bulk_read()) return rates;
  for (const int blocks_per_sm : {1, 2}) {
    rates.bulk = std::max(rates.bulk, rate([&](int i) {
                            cuda::bench::launch_bulk_read(place(i), whole, blocks_per_sm, sink.data(),
                                                          stream.handle());
                          }));
  }
  return rates;
}

/// Rates of reading `bytes` at `data`, more than the caches hold.
inline ReadRates measure_read(const void* data, std::size_t bytes, cuda::Stream stream) {
  return measure_reads(bytes, 1, stream, [&](int) { return data; });
}

/// Tells what the reads beside a case gave: read_bytes/s is its ceiling.
inline void report_reads(benchmark::State& state, const ReadRates& rates) {
  state.counters["read_bytes/s"] = rates.best();
  state.counters["loads_read_bytes/s"] = rates.loads;
  state.counters["bulk_read_bytes/s"] = rates.bulk;
}

/// How many launches of `bytes` each, all at different places, leave nothing of one replay in the L2 cache
/// for the next: 256 MB in all at least and up to 2 GB, as far as 4096 nodes of a graph go (of 33 KB each
/// these are still twice the cache).
inline int cold_launches(std::size_t bytes) {
  constexpr std::size_t kMinBytes = std::size_t{256} << 20;
  constexpr std::size_t kMaxBytes = std::size_t{2} << 30;
  const std::size_t most = std::clamp<std::size_t>(kMinBytes / bytes, 512, 4096);
  return static_cast<int>(std::clamp<std::size_t>(kMaxBytes / bytes, 2, most));
}

/// Bytes between two places of `bytes` each, aligned to 256.
inline std::size_t place_stride(std::size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

/// Rates of reads of `bytes` each, at as many places of the `pool_bytes` at `pool` in turn as there are or as
/// keep caches cold: what the memory gives to an operation of that size.
inline ReadRates measure_cold_read(const void* pool, std::size_t pool_bytes, std::size_t bytes,
                                   cuda::Stream stream) {
  const std::size_t stride = place_stride(bytes);
  const int launches = static_cast<int>(
      std::clamp<std::size_t>(pool_bytes / stride, 1, static_cast<std::size_t>(cold_launches(bytes))));
  return measure_reads(bytes, launches, stream, [&](int i) -> const void* {
    return static_cast<const std::byte*>(pool) + static_cast<std::size_t>(i) * stride;
  });
}

}  // namespace helix::bench
