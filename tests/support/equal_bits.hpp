// SPDX-License-Identifier: Apache-2.0
// have_equal_bits(): whether two results are equal to the last bit.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

namespace helix::test {

/// Whether `a` and `b` have the same size and the same bits. A NaN therefore equals itself, and 0 differs
/// from -0.
template <typename T>
bool have_equal_bits(const std::vector<T>& a, const std::vector<T>& b) {
  static_assert(std::is_trivially_copyable_v<T>);
  // Empty vectors may have no memory, and memcmp must not get a null pointer.
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace helix::test
