// SPDX-License-Identifier: Apache-2.0
// What a generation measures of itself: times and the memory of its process.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

namespace helix::decode {

/// Milliseconds from `start` to now.
inline double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

/// Most memory that this process has had resident.
std::int64_t peak_resident_bytes();

/// Memory that this process has resident now; 0 where the system does not tell.
std::int64_t resident_bytes();

/// Median and 99th percentile. There must be a value.
std::pair<double, double> median_and_p99(std::vector<double> values);

}  // namespace helix::decode
