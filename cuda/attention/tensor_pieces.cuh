// SPDX-License-Identifier: Apache-2.0
// The pieces in which a lane of the tensor-core kernel reads rows of keys and values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace helix::cuda {

/// Loads kBytes from `from`, which is aligned to kBytes. Two bytes go to the lower half of a word.
template <int kBytes>
__device__ __forceinline__ void load_words(const std::byte* from, unsigned (&to)[(kBytes + 3) / 4]) {
  if constexpr (kBytes == 16) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (kBytes == 8) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    to[0] = x.x, to[1] = x.y;
  } else if constexpr (kBytes == 4) {
    to[0] = *reinterpret_cast<const unsigned*>(from);
  } else {
    static_assert(kBytes == 2);
    to[0] = *reinterpret_cast<const std::uint16_t*>(from);
  }
}

/// Value columns that one step of the second product covers: kWide columns of each lane group, one for each
/// of kWide instructions.
template <int kFirstColumn, int kWideColumns, bool kIsRotatedPart>
struct ValuePart {
  static constexpr int kFirst = kFirstColumn;
  static constexpr int kWide = kWideColumns;
  static constexpr int kTile = kFirst / 8;  ///< First accumulator.

  /// First of lane group `g`'s kWide columns; the e-th of them is column g of the part's instruction e.
  static __device__ __forceinline__ int column_of(int g) {
    return kFirst + (kIsRotatedPart ? (g + 4) % 8 : g) * kWide;
  }
};

}  // namespace helix::cuda
