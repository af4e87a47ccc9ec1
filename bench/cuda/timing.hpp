// SPDX-License-Identifier: Apache-2.0
// How GPU work is timed: graphs of several launches between two events, beside the read ceiling of the same
// run.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <vector>

#include <benchmark/benchmark.h>

#include <helix/cuda/graph.hpp>
#include <helix/cuda/runtime.hpp>

#include "ceilings.hpp"

namespace helix::bench {

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

/// Bytes a second that a grid-stride loop reads of `bytes` bytes at `data`.
inline double measure_read(const void* data, std::size_t bytes, cuda::Stream stream) {
  const cuda::Buffer sink(256);
  const double us = time_launches(
      stream, 1, 9, [&](int) { cuda::bench::launch_read(data, bytes, sink.data(), stream.handle()); });
  return static_cast<double>(bytes) / us * 1e6;
}

}  // namespace helix::bench
