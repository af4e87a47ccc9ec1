// SPDX-License-Identifier: Apache-2.0
// Storage types: every bit pattern compared with values computed in double, and rounding compared with a
// search for the nearest value.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <helix/dtype.hpp>
#include <helix/error.hpp>
#include <helix/mixed_row.hpp>

#include "support/catch.hpp"

namespace {

using helix::bf16;
using helix::DType;
using helix::f16;
using helix::fp8_e4m3;

/// A format as the tests know it, independent of the library: widths of sign, exponent and mantissa, and
/// special values.
struct Format {
  const char* name;
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  ///< the largest exponent holds infinity and NaN; otherwise only its last pattern is NaN
};

constexpr Format kBf16{"bf16", 8, 7, true};
constexpr Format kF16{"f16", 5, 10, true};
constexpr Format kFp8{"fp8_e4m3", 4, 3, false};

std::uint32_t num_patterns(const Format& f) {
  return 1u << (1 + f.exponent_bits + f.mantissa_bits);
}
std::uint32_t sign_bit(const Format& f) {
  return 1u << (f.exponent_bits + f.mantissa_bits);
}
std::uint32_t first_special(const Format& f) {
  const std::uint32_t magnitudes = sign_bit(f);
  return f.has_infinity ? magnitudes - (1u << f.mantissa_bits) : magnitudes - 1;
}

/// The value of a finite magnitude pattern, by the definition of the format.
double finite_value(const Format& f, std::uint32_t magnitude) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const auto exponent = static_cast<int>(magnitude >> f.mantissa_bits);
  const double fraction =
      static_cast<double>(magnitude & ((1u << f.mantissa_bits) - 1)) * std::ldexp(1.0, -f.mantissa_bits);
  if (exponent == 0) return std::ldexp(fraction, 1 - bias);
  return std::ldexp(1.0 + fraction, exponent - bias);
}

/// All finite magnitudes in increasing order.
std::vector<double> finite_values(const Format& f) {
  std::vector<double> values;
  for (std::uint32_t magnitude = 0; magnitude < first_special(f); ++magnitude)
    values.push_back(finite_value(f, magnitude));
  return values;
}

/// The pattern nearest to `value`, ties to the even pattern, found by search in the table of all magnitudes.
/// Beyond the largest value, a format with infinity treats infinity as the next value of the series; a format
/// without it saturates.
std::uint32_t nearest_by_search(const Format& f, const std::vector<double>& table, double value) {
  const std::uint32_t sign = std::signbit(value) ? sign_bit(f) : 0;
  const double magnitude = std::abs(value);
  if (magnitude >= table.back()) {
    if (!f.has_infinity) return sign | (first_special(f) - 1);
    const double step = table[table.size() - 1] - table[table.size() - 2];
    const bool to_infinity =
        magnitude >= table.back() + step / 2;  // the last finite pattern is odd, so a tie rounds away from it
    return sign | (to_infinity ? first_special(f) : first_special(f) - 1);
  }
  const auto above = std::upper_bound(table.begin(), table.end(), magnitude);
  const auto high = static_cast<std::uint32_t>(above - table.begin());
  const std::uint32_t low = high - 1;
  const double to_low = magnitude - table[low];
  const double to_high = table[high] - magnitude;
  if (to_low < to_high) return sign | low;
  if (to_high < to_low) return sign | high;
  return sign | (low % 2 == 0 ? low : high);
}

template <class T>
std::uint32_t pattern_of(float value) {
  return T(value).bits;
}

template <class T>
float value_of(std::uint32_t pattern) {
  return static_cast<float>(T::from_bits(static_cast<decltype(T{}.bits)>(pattern)));
}

template <class T>
void check_every_pattern(const Format& f) {
  std::uint32_t failures = 0;
  for (std::uint32_t pattern = 0; pattern < num_patterns(f); ++pattern) {
    const float value = value_of<T>(pattern);
    const std::uint32_t magnitude = pattern & (sign_bit(f) - 1);
    const bool negative = (pattern & sign_bit(f)) != 0;
    bool right = std::signbit(value) == negative;
    if (magnitude < first_special(f)) {
      right = right && std::abs(static_cast<double>(value)) == finite_value(f, magnitude);
      right = right && pattern_of<T>(value) == pattern;
    } else if (f.has_infinity && magnitude == first_special(f)) {
      right = right && std::isinf(value) && pattern_of<T>(value) == pattern;
    } else {
      const std::uint32_t back =
          pattern_of<T>(value);  // still NaN with the same sign; the payload may become quiet
      right = right && std::isnan(value) && std::isnan(value_of<T>(back)) &&
              (back & sign_bit(f)) == (pattern & sign_bit(f));
    }
    if (!right && ++failures <= 5) {
      CAPTURE(f.name, pattern, value, pattern_of<T>(value));
      CHECK(right);
    }
  }
  CHECK(failures == 0);
}

/// Values around which rounding decides: each representable value, the midpoints between neighbours, and the
/// floats next to them.
template <class T>
void check_rounding(const Format& f) {
  const std::vector<double> table = finite_values(f);
  std::uint32_t failures = 0;
  const auto check = [&](float value) {
    for (const float signed_value : {value, -value}) {
      const std::uint32_t expected = nearest_by_search(f, table, static_cast<double>(signed_value));
      const std::uint32_t found = pattern_of<T>(signed_value);
      if (found != expected && ++failures <= 5) {
        CAPTURE(f.name, signed_value, found, expected);
        CHECK(found == expected);
      }
    }
  };
  const auto check_around = [&](double value) {
    const auto at = static_cast<float>(value);
    REQUIRE(static_cast<double>(at) ==
            value);  // representable values and midpoints are floats, so the tie is exact
    check(at);
    check(std::nextafter(at, 0.0f));
    const float above = std::nextafter(at, std::numeric_limits<float>::infinity());
    if (std::isfinite(above)) check(above);
  };
  for (std::size_t i = 0; i < table.size(); ++i) {
    check_around(table[i]);
    if (i + 1 < table.size()) check_around((table[i] + table[i + 1]) / 2);
  }
  const double step = table[table.size() - 1] - table[table.size() - 2];
  if (table.back() + step / 2 < static_cast<double>(std::numeric_limits<float>::max())) {
    check_around(table.back() + step / 2);
  }
  check(std::numeric_limits<float>::max());
  check(std::numeric_limits<float>::min());
  check(std::numeric_limits<float>::denorm_min());
  std::mt19937 random(17);
  for (int i = 0; i < 200000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random()) & 0x7fffffffu);
    if (std::isfinite(value)) check(value);
  }
  CHECK(failures == 0);
}

/// Checks that every NaN float stays NaN: all payload bits one at a time, both signs, and random payloads.
template <class T>
void check_nan(const Format& f) {
  std::vector<std::uint32_t> payloads{1, 0x7fffff, 0x400000, 0x3fffff};
  for (int bit = 0; bit < 23; ++bit) payloads.push_back(1u << bit);
  std::mt19937 random(18);
  for (int i = 0; i < 1000; ++i) payloads.push_back((static_cast<std::uint32_t>(random()) & 0x7fffffu) | 1u);
  for (const std::uint32_t payload : payloads) {
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const std::uint32_t pattern = pattern_of<T>(std::bit_cast<float>(sign | 0x7f800000u | payload));
      CAPTURE(f.name, payload, sign, pattern);
      REQUIRE(std::isnan(value_of<T>(pattern)));
      REQUIRE(((pattern & sign_bit(f)) != 0) == (sign != 0));
    }
  }
}

}  // namespace

TEST_CASE("every pattern has the value of its definition and survives a round trip") {
  check_every_pattern<bf16>(kBf16);
  check_every_pattern<f16>(kF16);
  check_every_pattern<fp8_e4m3>(kFp8);
}

TEST_CASE("conversion from float takes the nearest value, ties to even") {
  SECTION("bf16") {
    check_rounding<bf16>(kBf16);
  }
  SECTION("f16") {
    check_rounding<f16>(kF16);
  }
  SECTION("fp8_e4m3") {
    check_rounding<fp8_e4m3>(kFp8);
  }
}

TEST_CASE("NaN stays NaN and keeps its sign") {
  check_nan<bf16>(kBf16);
  check_nan<f16>(kF16);
  check_nan<fp8_e4m3>(kFp8);
}

TEST_CASE("known values by hand") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  CHECK(bf16(1.0f).bits == 0x3f80);
  CHECK(bf16(-0.0f).bits == 0x8000);
  CHECK(bf16(3.0e38f).bits == 0x7f62);
  CHECK(bf16(std::numeric_limits<float>::max()).bits == 0x7f80);
  CHECK(bf16(kInfinity).bits == 0x7f80);
  CHECK(bf16(-kInfinity).bits == 0xff80);

  CHECK(f16(1.0f).bits == 0x3c00);
  CHECK(f16(65504.0f).bits == 0x7bff);
  CHECK(f16(65519.996f).bits == 0x7bff);
  CHECK(f16(65520.0f).bits == 0x7c00);
  CHECK(f16(-kInfinity).bits == 0xfc00);
  CHECK(f16(std::ldexp(1.0f, -24)).bits == 0x0001);
  CHECK(f16(std::ldexp(1.0f, -25)).bits == 0x0000);
  CHECK(f16(std::nextafter(std::ldexp(1.0f, -25), 1.0f)).bits == 0x0001);
  CHECK(f16(-0.0f).bits == 0x8000);

  CHECK(fp8_e4m3(1.0f).bits == 0x38);
  CHECK(fp8_e4m3(448.0f).bits == 0x7e);
  CHECK(fp8_e4m3(464.0f).bits == 0x7e);
  CHECK(fp8_e4m3(1.0e30f).bits == 0x7e);
  CHECK(fp8_e4m3(kInfinity).bits == 0x7e);
  CHECK(fp8_e4m3(-kInfinity).bits == 0xfe);
  CHECK(fp8_e4m3(std::ldexp(1.0f, -9)).bits == 0x01);
  CHECK(fp8_e4m3(std::ldexp(1.0f, -10)).bits == 0x00);
  CHECK(fp8_e4m3(-0.0f).bits == 0x80);
}

TEST_CASE("conversions are constant expressions") {
  static_assert(bf16(1.5f).bits == 0x3fc0);
  static_assert(static_cast<float>(bf16::from_bits(0x3fc0)) == 1.5f);
  static_assert(static_cast<float>(f16(0.1f)) == 0.0999755859375f);
  static_assert(static_cast<float>(f16::from_bits(0x0001)) == 5.9604644775390625e-8f);
  static_assert(static_cast<float>(fp8_e4m3(0.3f)) == 0.3125f);
  static_assert(static_cast<float>(fp8_e4m3::from_bits(0x01)) == 0.001953125f);
  static_assert(sizeof(bf16) == 2 && sizeof(f16) == 2 && sizeof(fp8_e4m3) == 1);
  static_assert(std::is_trivially_copyable_v<bf16> && std::is_trivially_copyable_v<f16> &&
                std::is_trivially_copyable_v<fp8_e4m3>);
  SUCCEED();
}

TEST_CASE("DType names, sizes and C++ types agree") {
  static_assert(helix::kDTypeOf<float> == DType::f32 && helix::kDTypeOf<f16> == DType::f16);
  static_assert(helix::kDTypeOf<bf16> == DType::bf16 && helix::kDTypeOf<fp8_e4m3> == DType::fp8_e4m3);
  static_assert(helix::parse_dtype("bf16") == DType::bf16);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
    CAPTURE(std::string(helix::to_string(dtype)));
    CHECK(helix::parse_dtype(helix::to_string(dtype)) == dtype);
    const auto [size, same] = helix::dispatch(dtype, [&]<class T>(T*) {
      return std::pair{sizeof(T), helix::kDTypeOf<T> == dtype};
    });
    CHECK(size == helix::size_bytes(dtype));
    CHECK(same);
  }
  for (const char* name : {"", "f64", "BF16", "bf16 ", "fp8", "unknown"}) {
    CAPTURE(name);
    CHECK_FALSE(helix::parse_dtype(name).has_value());
  }
  const auto wild = static_cast<DType>(200);
  CHECK(helix::size_bytes(wild) == 0);
  CHECK(helix::to_string(wild) == "unknown");
  CHECK_THROWS_AS(helix::dispatch(wild, [](auto*) { return 0; }), helix::Error);
}

TEST_CASE("an infinity or a NaN in a mixed row leaves the other columns of its scale their values") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float wild : {kInfinity, -kInfinity, std::nanf("")}) {
    CAPTURE(wild);
    std::vector<float> values{1.0f, -2.0f, wild, 4.0f, 0.5f, -0.25f};  // 4 latent columns, 2 of rope
    std::array<std::byte, 4 + sizeof(float)> latent{};
    std::array<std::byte, 2 * sizeof(bf16)> rope{};
    helix::store_mixed_row(values.data(), 6, 4, latent.data(), rope.data());
    std::array<float, 6> loaded{};
    helix::load_mixed_row(latent.data(), rope.data(), 6, 4, loaded.data());
    // The largest finite value, 4, is stored as 448; the others are exact in e4m3 then too.
    for (const std::size_t i : {0u, 1u, 3u, 4u, 5u}) CHECK(loaded[i] == values[i]);
  }
}
