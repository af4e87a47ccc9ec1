// SPDX-License-Identifier: Apache-2.0
// TensorView: addressing, slices and contiguity, compared with plain index arithmetic.
#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include <helix/error.hpp>
#include <helix/tensor_view.hpp>

#include "support/catch.hpp"

namespace {

using helix::Error;
using helix::ErrorCode;
using helix::TensorView;

}  // namespace

TEST_CASE("a dense view is row-major") {
  std::vector<int> data(2 * 3 * 4);
  std::iota(data.begin(), data.end(), 0);
  const TensorView<int, 3> view(data.data(), {2, 3, 4});
  CHECK(view.size() == 24);
  CHECK(view.strides() == std::array<std::int64_t, 3>{12, 4, 1});
  CHECK(view.extents() == std::array<std::int64_t, 3>{2, 3, 4});
  CHECK(view.is_contiguous());
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 3; ++j) {
      for (int k = 0; k < 4; ++k) CHECK(view(i, j, k) == 12 * i + 4 * j + k);
    }
  }
  view(1, 2, 3) = -1;
  CHECK(data.back() == -1);
}

TEST_CASE("slices of every dimension address the same elements") {
  std::vector<int> data(3 * 4 * 5);
  std::iota(data.begin(), data.end(), 0);
  const TensorView<int, 3> view(data.data(), {3, 4, 5});
  for (int d = 0; d < 3; ++d) {
    for (std::int64_t begin = 0; begin <= view.extent(d); ++begin) {
      for (std::int64_t count = 0; begin + count <= view.extent(d); ++count) {
        const auto part = view.slice(d, begin, count);
        CHECK(part.extent(d) == count);
        CHECK(part.strides() == view.strides());
        for (std::int64_t i = 0; i < part.extent(0); ++i) {
          for (std::int64_t j = 0; j < part.extent(1); ++j) {
            for (std::int64_t k = 0; k < part.extent(2); ++k) {
              const std::int64_t expected =
                  20 * (i + (d == 0 ? begin : 0)) + 5 * (j + (d == 1 ? begin : 0)) + k + (d == 2 ? begin : 0);
              REQUIRE(part(i, j, k) == expected);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("slices of slices compose, also over negative and zero strides") {
  std::vector<int> data(24);
  std::iota(data.begin(), data.end(), 0);
  const TensorView<int, 2> view(data.data(), {4, 6});
  const auto part = view.slice(0, 1, 3).slice(1, 2, 4).slice(0, 1, 1).slice(1, 3, 1);
  CHECK(part(0, 0) == 2 * 6 + 5);
  const TensorView<int, 1> backwards(data.data() + 5, {6}, {-1});
  CHECK(backwards(0) == 5);
  CHECK(backwards.slice(0, 4, 2)(1) == 0);
  const TensorView<int, 2> repeated(data.data(), {3, 6}, {0, 1});
  CHECK(repeated(2, 4) == 4);
  CHECK(repeated.slice(0, 2, 1)(0, 3) == 3);
}

TEST_CASE("contiguity means that a flat loop visits every element in order") {
  std::vector<int> data(4 * 6);
  std::iota(data.begin(), data.end(), 0);
  const TensorView<int, 2> view(data.data(), {4, 6});
  CHECK(view.slice(0, 1, 2).is_contiguous());
  CHECK_FALSE(view.slice(1, 0, 5).is_contiguous());
  CHECK(view.slice(1, 2, 3).slice(0, 3, 1).is_contiguous());  // one row: its stride does not matter
  CHECK_FALSE(view.slice(1, 2, 1).is_contiguous());
  CHECK(view.slice(1, 2, 1).slice(0, 0, 1).is_contiguous());
  CHECK(TensorView<int, 1>(data.data(), {24}).is_contiguous());
  CHECK_FALSE(TensorView<int, 1>(data.data(), {12}, {2}).is_contiguous());
  CHECK_FALSE(TensorView<int, 2>(data.data(), {6, 4}, {1, 6}).is_contiguous());  // transposed

  // Without elements, a loop over size() visits nothing, whatever the strides.
  CHECK(TensorView<int, 2>(data.data(), {0, 6}).is_contiguous());
  CHECK(view.slice(0, 4, 0).is_contiguous());
  CHECK(view.slice(1, 0, 0).is_contiguous());
  CHECK(TensorView<int, 2>().is_contiguous());
}

TEST_CASE("sizes beyond int64 saturate, and extents below zero hold nothing") {
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  constexpr TensorView<float, 3> huge(nullptr, {2, kHuge, kHuge});
  static_assert(huge.size() == std::numeric_limits<std::int64_t>::max());
  static_assert(huge.stride(0) == huge.size() && huge.stride(1) == kHuge && huge.is_contiguous());
  constexpr TensorView<float, 2> negative(nullptr, {std::numeric_limits<std::int64_t>::min(), 3});
  static_assert(negative.size() == 0 && negative.stride(0) == 3);
}

TEST_CASE("an empty view has no elements, and slices of nothing stay null") {
  constexpr TensorView<float, 3> empty;
  static_assert(empty.data() == nullptr && empty.size() == 0);
  CHECK(empty.slice(1, 0, 0).data() == nullptr);
  const TensorView<float, 2> shape_only(nullptr, {4, 8});
  CHECK(shape_only.size() == 32);
  CHECK(shape_only.slice(0, 2, 2).data() == nullptr);
  CHECK(shape_only.slice(0, 2, 2).extent(0) == 2);
}

TEST_CASE("a view that is written is refused exactly if two of its elements share an address") {
  std::vector<float> memory(4096);
  // Permutations of dense tensors and of their slices, with padding and from the end, and what breaks them.
  const auto refuses = [&](std::array<std::int64_t, 3> extents, std::array<std::int64_t, 3> strides) {
    const TensorView<float, 3> view(memory.data() + 2048, extents, strides);
    std::set<const float*> seen;
    for (std::int64_t a = 0; a < view.extent(0); ++a) {
      for (std::int64_t b = 0; b < view.extent(1); ++b) {
        for (std::int64_t c = 0; c < view.extent(2); ++c) seen.insert(&view(a, b, c));
      }
    }
    bool is_refused = false;
    try {
      helix::detail::check_elements_apart("test", "x", view);
    } catch (const Error& error) {
      is_refused = error.code() == ErrorCode::invalid_argument;
    }
    CAPTURE(strides[0], strides[1], strides[2]);
    CHECK(is_refused == (static_cast<std::int64_t>(seen.size()) < view.size()));
    return is_refused;
  };
  CHECK_FALSE(refuses({3, 2, 4}, {8, 4, 1}));
  CHECK_FALSE(refuses({3, 2, 4}, {4, 12, 1}));
  CHECK_FALSE(refuses({3, 2, 4}, {-10, 5, 1}));
  CHECK_FALSE(refuses({3, 1, 4}, {4, 0, 1}));
  CHECK_FALSE(refuses({3, 0, 4}, {0, 0, 0}));
  CHECK_FALSE(refuses({1, 1, 1}, {0, 0, 0}));
  CHECK(refuses({3, 2, 4}, {0, 4, 1}));
  CHECK(refuses({3, 2, 4}, {8, 3, 1}));
  CHECK(refuses({3, 2, 4}, {7, 4, 1}));
  CHECK(refuses({3, 2, 4}, {-7, 4, 1}));
  constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  CHECK_NOTHROW(
      helix::detail::check_elements_apart("test", "x", TensorView<float, 2>(nullptr, {9, 4}, {kMin, 1})));
  CHECK_THROWS_WITH(
      helix::detail::check_elements_apart("test", "x", TensorView<float, 2>(nullptr, {2, kMax}, {4, 1})),
      Catch::Matchers::ContainsSubstring("dimension 0 of x has extent 2 and stride 4"));
}

TEST_CASE("a slice outside the extent is refused with both values") {
  std::vector<int> data(12);
  const TensorView<int, 2> view(data.data(), {3, 4});
  CHECK_THROWS_AS(view.slice(0, -1, 1), Error);
  CHECK_THROWS_AS(view.slice(0, 0, 4), Error);
  CHECK_THROWS_AS(view.slice(0, 3, 1), Error);
  CHECK_THROWS_AS(view.slice(1, 2, -1), Error);
  CHECK_THROWS_AS(view.slice(1, 5, 0), Error);
  CHECK_THROWS_AS(view.slice(2, 0, 0), Error);
  CHECK_THROWS_AS(view.slice(-1, 0, 0), Error);
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  CHECK_THROWS_AS(view.slice(0, 1, kHuge), Error);
  CHECK_THROWS_AS(view.slice(0, kHuge, 1), Error);
  CHECK_THROWS_AS(view.slice(0, kHuge, kHuge), Error);
  try {
    (void)view.slice(1, 2, 3);
    FAIL("no Error was thrown");
  } catch (const Error& error) {
    CHECK(error.code() == helix::ErrorCode::invalid_argument);
    CHECK(std::string(error.what()) == "slice of 3 from 2 leaves dimension 1 of extent 4");
  }
}

TEST_CASE("a mutable view reads as const and not the other way round") {
  std::vector<int> data{1, 2, 3};
  const TensorView<int, 1> view(data.data(), {3});
  const TensorView<const int, 1> read = view;
  CHECK(read(2) == 3);
  CHECK(read.data() == data.data());
  static_assert(std::is_convertible_v<TensorView<int, 2>, TensorView<const int, 2>>);
  static_assert(!std::is_convertible_v<TensorView<const int, 2>, TensorView<int, 2>>);
  static_assert(!std::is_convertible_v<TensorView<float, 2>, TensorView<const int, 2>>);
  static_assert(!std::is_convertible_v<TensorView<int, 1>, TensorView<const int, 2>>);
  static_assert(std::is_trivially_copyable_v<TensorView<int, 4>>);
}

TEST_CASE("views work in constant expressions") {
  static constexpr std::array<int, 6> kData{0, 1, 2, 3, 4, 5};
  constexpr TensorView<const int, 2> view(kData.data(), {2, 3});
  static_assert(view(1, 1) == 4);
  static_assert(view.size() == 6 && view.extent(1) == 3 && view.stride(0) == 3);
  // Not a static_assert: with -fsanitize=undefined, g++ 12 refuses to compare an address with null in one.
  CHECK(view.slice(1, 1, 2)(1, 1) == 5);
}
