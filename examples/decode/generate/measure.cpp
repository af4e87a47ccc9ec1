// SPDX-License-Identifier: Apache-2.0
// Process memory and quantiles.
#include "generate/measure.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>

#include <sys/resource.h>
#include <unistd.h>

namespace helix::decode {

std::int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
}

std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t all = 0;
  std::int64_t resident = 0;
  return file >> all >> resident ? resident * sysconf(_SC_PAGESIZE) : 0;
}

std::pair<double, double> median_and_p99(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto rank = [&](double q) {
    return values[static_cast<std::size_t>(std::ceil(q * static_cast<double>(values.size()))) - 1];
  };
  return {rank(0.5), rank(0.99)};
}

}  // namespace helix::decode
