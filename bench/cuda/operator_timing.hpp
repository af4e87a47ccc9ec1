// SPDX-License-Identifier: Apache-2.0
// Times a bf16 operator next to a read of as many bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <helix/cuda/backend.hpp>

#include "device_data.hpp"
#include "timing.hpp"

namespace helix::bench {

inline constexpr double kTolerance = 1e-2;  // relative error of 16-bit results, Euclidean

inline std::vector<float> as_floats(const std::vector<bf16>& values) {
  return {values.begin(), values.end()};
}

/// Times `queue(place)` next to a read of `bytes` and sets the counters. `error()` checks the result of one
/// of these launches, or of an extra launch.
inline void measure(benchmark::State& state, const cuda::Operators<bf16>& operators, double bytes,
                    int launches, const std::function<void(int, cuda::Stream)>& queue,
                    const std::function<double(cuda::Stream)>& error) {
  const cuda::Stream stream = operators.create_stream();
  const auto read_bytes = static_cast<std::size_t>(bytes);
  ReadRates read;
  {
    const std::size_t pool_bytes =
        place_stride(read_bytes) * static_cast<std::size_t>(cold_launches(read_bytes));
    const cuda::Buffer pool = random_bf16(static_cast<std::int64_t>(pool_bytes / 2), kSeed);
    warm_up(pool.data(), pool_bytes, stream);
    read = measure_cold_read(pool.data(), pool_bytes, read_bytes, stream);
  }
  const double us = time_launches(stream, launches, 15, [&](int i) { queue(i, stream); });
  const double worst = error(stream);
  if (!(worst < kTolerance)) state.SkipWithError("the result is wrong");
  for (auto _ : state) state.SetIterationTime(us * 1e-6);
  state.counters["us"] = us;
  state.counters["bytes"] = bytes;
  state.counters["bytes/s"] = bytes / us * 1e6;
  report_reads(state, read);
  state.counters["%_of_read"] = 100.0 * bytes / us * 1e6 / read.best();
  state.counters["error"] = worst;
}

}  // namespace helix::bench
