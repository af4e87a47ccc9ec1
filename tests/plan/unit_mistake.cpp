// SPDX-License-Identifier: Apache-2.0
// Programs that confuse one unit with another: only number 0 may compile. See tests/CMakeLists.txt.
#include <helix/plan/units.hpp>

using namespace helix::plan;

int main() {
  const Bytes size = gigabytes(1);
  const Bandwidth bandwidth = gigabytes_per_second(8000);
  const Tokens context = tokens(1e6);
#if HELIX_MISTAKE == 0
  const Time time = size / bandwidth;
#elif HELIX_MISTAKE == 1
  const Time time = size;  // bytes are not a time
#elif HELIX_MISTAKE == 2
  const Time time = size * bandwidth;  // multiplied, not divided
#elif HELIX_MISTAKE == 3
  const Time time = 125.0;  // seconds or microseconds?
#elif HELIX_MISTAKE == 4
  const Time time = (size + context) / bandwidth;  // tokens are not bytes
#elif HELIX_MISTAKE == 5
  const Time time = size / teraflops_per_second(8);  // bytes are not flops
#elif HELIX_MISTAKE == 6
  const Time time = context < size ? Time{} : Time{};
#endif
  return in_microseconds(time) > 0 && context > Tokens{} ? 0 : 1;
}
