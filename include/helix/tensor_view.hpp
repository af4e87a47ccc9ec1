// SPDX-License-Identifier: Apache-2.0
// TensorView: a borrowed, strided, typed view of memory, in mdspan's terms.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include <helix/error.hpp>
#include <helix/integers.hpp>

namespace helix {

/// A view of `R` dimensions of `T`. It borrows: the memory must outlive the view. Strides are in elements; in
/// a row-major view the last dimension is the fastest. The memory may be on a device; the view never
/// dereferences it except in operator(), which is for host memory.
template <class T, int R>
class TensorView {
  static_assert(R >= 1);

 public:
  using extents_type = std::array<std::int64_t, static_cast<std::size_t>(R)>;

  constexpr TensorView() = default;

  /// A dense row-major view.
  constexpr TensorView(T* data, extents_type extents) : data_(data), extents_(extents) {
    std::int64_t stride = 1;
    for (std::size_t d = R; d-- > 0;) {
      strides_[d] = stride;
      stride = saturating_product(stride, larger<std::int64_t>(extents_[d], 0));
    }
  }

  /// A view with these strides, in elements and of any sign.
  constexpr TensorView(T* data, extents_type extents, extents_type strides)
      : data_(data), extents_(extents), strides_(strides) {}

  /// Converts a mutable view to a view of const.
  template <class U>
  requires(std::is_same_v<const U, T> && !std::is_same_v<U, T>) constexpr TensorView(
      const TensorView<U, R>& other)  // NOLINT: conversion is the point
      : data_(other.data()), extents_(other.extents()), strides_(other.strides()) {}

  constexpr T* data() const { return data_; }
  constexpr std::int64_t extent(int d) const { return extents_[static_cast<std::size_t>(d)]; }
  constexpr std::int64_t stride(int d) const { return strides_[static_cast<std::size_t>(d)]; }
  constexpr const extents_type& extents() const { return extents_; }
  constexpr const extents_type& strides() const { return strides_; }

  /// Number of elements: 0 if an extent is below 0, kSaturated beyond int64.
  constexpr std::int64_t size() const {
    std::int64_t n = 1;
    for (std::int64_t e : extents_) n = saturating_product(n, larger<std::int64_t>(e, 0));
    return n;
  }

  /// Whether the view is dense and row-major: a flat loop over size() elements visits all of them.
  constexpr bool is_contiguous() const {
    if (size() == 0) return true;
    std::int64_t expected = 1;
    for (std::size_t d = R; d-- > 0;) {
      if (extents_[d] != 1 && strides_[d] != expected) return false;
      expected = saturating_product(expected, extents_[d]);
    }
    return true;
  }

  /// The element at these indices, unchecked.
  template <std::integral... Index>
  requires(sizeof...(Index) == R) constexpr T& operator()(Index... index) const {
    std::int64_t offset = 0;
    int d = 0;
    ((offset += static_cast<std::int64_t>(index) * stride(d++)), ...);
    return data_[offset];
  }

  /// Elements [begin, begin + count) of dimension `d`; the other dimensions are whole.
  /// @throws Error(invalid_argument) if there is no such dimension or the range leaves its extent.
  constexpr TensorView slice(int d, std::int64_t begin, std::int64_t count) const {
    HELIX_EXPECTS(d >= 0 && d < R, ErrorCode::invalid_argument, "slice of dimension ", d,
                  " of a view of rank ", R);
    HELIX_EXPECTS(begin >= 0 && count >= 0 && begin <= extent(d) && count <= extent(d) - begin,
                  ErrorCode::invalid_argument, "slice of ", count, " from ", begin, " leaves dimension ", d,
                  " of extent ", extent(d));
    TensorView result = *this;
    if (data_ != nullptr) result.data_ = data_ + begin * stride(d);
    result.extents_[static_cast<std::size_t>(d)] = count;
    return result;
  }

 private:
  T* data_ = nullptr;
  extents_type extents_{};
  extents_type strides_{};
};

namespace detail {

/// Throws Error(invalid_argument) if elements of a view that is written share addresses: each stride must
/// step over all that lies at smaller ones, as in every permutation and slice of a dense tensor.
template <class T, int R>
void check_elements_apart(std::string_view operation, std::string_view name, const TensorView<T, R>& view) {
  if (view.size() == 0) return;
  constexpr std::int64_t kMost = kSaturated / 2;
  std::int64_t span = 1;  // elements from the first to the last that the strides up to here reach
  unsigned counted = 0;   // a bit for each dimension
  for (int count = 0; count < R; ++count) {
    int smallest = -1;
    std::int64_t stride = 0;  // absolute value of the smallest stride that is not counted
    for (int d = 0; d < R; ++d) {
      const std::int64_t signed_stride = larger(view.stride(d), -kMost);
      const std::int64_t size =
          view.extent(d) == 1 ? 0 : smaller(signed_stride < 0 ? -signed_stride : signed_stride, kMost);
      if ((counted >> d & 1u) == 0 && (smallest < 0 || size < stride)) {
        smallest = d;
        stride = size;
      }
    }
    counted |= 1u << smallest;
    if (view.extent(smallest) == 1) continue;
    HELIX_EXPECTS(stride >= span, ErrorCode::invalid_argument, operation, ": dimension ", smallest, " of ",
                  name, " has extent ", view.extent(smallest), " and stride ", view.stride(smallest),
                  ", but what lies between takes ", span,
                  " elements, so rows that are written would overlap");
    span = saturating_sum(span, saturating_product(view.extent(smallest) - 1, stride));
  }
}

}  // namespace detail

}  // namespace helix
