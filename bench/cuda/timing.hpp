// SPDX-License-Identifier: Apache-2.0
// Times GPU work: graphs of several launches between two events, next to the read ceiling of the same run,
// which is the faster of reads by loads and reads by bulk copies.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <helix/cuda/graph.hpp>
#include <helix/cuda/runtime.hpp>

#include "cuda/ceilings/ceilings.hpp"

namespace helix::bench {

/// Registers a case that runs once and reports its own time. An exception ends only this case.
template <class Body>
void register_case(const std::string& name, const Body& body) {
  const auto run = [body](benchmark::State& state) {
    try {
      body(state);
    } catch (const std::exception& error) {
      state.SkipWithError(error.what());
    }
  };
  benchmark::RegisterBenchmark(name.c_str(), run)
      ->UseManualTime()
      ->Iterations(1)
      ->Unit(benchmark::kMicrosecond);
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Microseconds of one `queue(i)`. One graph holds the calls for i = 0, 1, ..., launches - 1; the result is
/// the median over `repeats` replays.
inline double time_launches(cuda::Stream stream, int launches, int repeats,
                            const std::function<void(int)>& queue) {
  queue(0);  // loads kernels and plans products
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

/// Keeps the device busy for a third of a second, because clocks rise under load.
inline void warm_up(const void* data, std::size_t bytes, cuda::Stream stream) {
  const cuda::Buffer sink(256);
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(300)) {
    cuda::bench::launch_read(data, bytes, sink.data(), stream.handle());
    cuda::synchronize(stream);
  }
}

/// Bytes per second that the memory delivers to kernels that only read.
struct ReadRates {
  double loads = 0.0;  ///< By a grid-stride loop of 16-byte loads.
  /// Bulk copies with one or two blocks per SM; 0 if the GPU has none.
  double bulk = 0.0;

  /// The read ceiling.
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

/// Rates of reading `bytes` at `data`, which must exceed the caches.
inline ReadRates measure_read(const void* data, std::size_t bytes, cuda::Stream stream) {
  return measure_reads(bytes, 1, stream, [&](int) { return data; });
}

/// Reports the reads of a case; read_bytes/s is its ceiling.
inline void report_reads(benchmark::State& state, const ReadRates& rates) {
  state.counters["read_bytes/s"] = rates.best();
  state.counters["loads_read_bytes/s"] = rates.loads;
  state.counters["bulk_read_bytes/s"] = rates.bulk;
}

/// Number of launches of `bytes` each, all at different places, after which the L2 cache holds nothing of the
/// previous replay: at least 256 MB in total and up to 2 GB, limited to 4096 nodes of a graph (with 33 KB
/// each these are still twice the cache).
inline int cold_launches(std::size_t bytes) {
  constexpr std::size_t kMinBytes = std::size_t{256} << 20;
  constexpr std::size_t kMaxBytes = std::size_t{2} << 30;
  const std::size_t most = std::clamp<std::size_t>(kMinBytes / bytes, 512, 4096);
  return static_cast<int>(std::clamp<std::size_t>(kMaxBytes / bytes, 2, most));
}

/// Distance between two places of `bytes` each, aligned to 256.
inline std::size_t place_stride(std::size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

/// Rates of reads of `bytes` each that visit places of the `pool_bytes` at `pool` in turn: all places, or as
/// many as keep caches cold. This is what the memory delivers to an operation of that size.
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
