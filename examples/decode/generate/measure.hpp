// SPDX-License-Identifier: Apache-2.0
// Measurements of a generation: times and the memory of its process.
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

/// Peak resident memory of this process in bytes.
std::int64_t peak_resident_bytes();

/// Current resident memory of this process in bytes; 0 if the system does not tell.
std::int64_t resident_bytes();

/// Median and 99th percentile of `values`, which must not be empty.
std::pair<double, double> median_and_p99(std::vector<double> values);

}  // namespace helix::decode
