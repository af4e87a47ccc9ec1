// SPDX-License-Identifier: Apache-2.0
// Vector accesses to rows, and how a launch chooses their width.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "cuda/runtime/convert.cuh"

namespace helix::cuda {

/// Elements of T in 16 bytes, the widest access.
template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

/// `kCount` (a power of two) elements that move in one access, or in several accesses of 16 bytes.
template <class T, int kCount>
struct alignas(std::min<std::size_t>(16, sizeof(T) * kCount)) Vector {
  T elements[kCount];
};

/// Loads a vector; `from` is aligned to a Vector<T, kCount>.
template <int kCount, class T>
__device__ __forceinline__ void load_vector(const T* from, float (&to)[kCount]) {
  const Vector<T, kCount> raw = *reinterpret_cast<const Vector<T, kCount>*>(from);
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = to_float(raw.elements[i]);
}

/// Stores a vector; `to` is aligned to a Vector<T, kCount>.
template <int kCount, class T>
__device__ __forceinline__ void store_vector(T* to, const float (&from)[kCount]) {
  Vector<T, kCount> raw;
#pragma unroll
  for (int i = 0; i < kCount; ++i) raw.elements[i] = from_float<T>(from[i]);
  *reinterpret_cast<Vector<T, kCount>*>(to) = raw;
}

/// The largest power of two up to 16 that divides every address and byte step. Null and 0 are divisible by
/// all.
inline std::size_t common_alignment(std::initializer_list<std::uintptr_t> addresses_and_steps) {
  std::uintptr_t bits = 16;
  for (const std::uintptr_t value : addresses_and_steps) bits |= value;
  return bits & (~bits + 1);
}

inline std::uintptr_t address_of(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

/// Whether `data` is aligned for vectors of 16 bytes.
inline bool is_aligned_16(const void* data) {
  return common_alignment({address_of(data)}) == 16;
}

/// The byte step of `count` elements of T, for common_alignment().
template <class T>
std::uintptr_t step_of(std::int64_t count) {
  return static_cast<std::uintptr_t>(count) * sizeof(T);
}

/// Whether the copy engine can step through `extent` items that are `bytes` apart: less than 2^40 and not
/// negative.
inline bool is_map_stride(std::int64_t extent, std::int64_t bytes) {
  return extent <= 1 || (bytes >= 0 && bytes < std::int64_t{1} << 40);
}

/// Calls use(std::integral_constant<int, elements per access>): kVector<T> if `is_aligned`, else 1.
template <class T, class Use>
void with_vector(bool is_aligned, const Use& use) {
  if (is_aligned) {
    use(std::integral_constant<int, kVector<T>>{});
  } else {
    use(std::integral_constant<int, 1>{});
  }
}

}  // namespace helix::cuda
