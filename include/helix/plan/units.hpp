// SPDX-License-Identifier: Apache-2.0
// The planner's units: bytes, time, flops and tokens as types of their own, so that a mistaken unit does not
// compile.
#pragma once

#include <compare>
#include <limits>
#include <type_traits>

namespace helix::plan {

/// A value of dimension bytes^kBytes * time^kTime * flops^kFlops * tokens^kTokens. Sums and comparisons need
/// equal dimensions, products and quotients form the right one, and a quotient of equals is a plain double.
///
/// Held as a double in bytes, microseconds, flops and tokens: whole bytes are exact up to 2^53, and so is the
/// quotient of whole bytes and a bandwidth of whole megabytes a second, as rounded as a literal is.
template <int kBytes, int kTime, int kFlops, int kTokens>
class Quantity {
 public:
  constexpr Quantity() = default;  ///< Zero

  /// From and to the units above; callers use the named functions below.
  static constexpr Quantity from_base(double value) {
    Quantity result;
    result.value_ = value;
    return result;
  }
  constexpr double base() const { return value_; }

  static constexpr Quantity unlimited() { return from_base(std::numeric_limits<double>::infinity()); }

  constexpr Quantity& operator+=(Quantity other) {
    value_ += other.value_;
    return *this;
  }
  constexpr Quantity& operator-=(Quantity other) {
    value_ -= other.value_;
    return *this;
  }
  friend constexpr Quantity operator+(Quantity a, Quantity b) { return a += b; }
  friend constexpr Quantity operator-(Quantity a, Quantity b) { return a -= b; }
  friend constexpr auto operator<=>(const Quantity&, const Quantity&) = default;
  friend constexpr bool operator==(const Quantity&, const Quantity&) = default;

  template <class Number>
  requires std::is_arithmetic_v<Number>
  friend constexpr Quantity operator*(Quantity a, Number factor) {
    return from_base(a.value_ * static_cast<double>(factor));
  }
  template <class Number>
  requires std::is_arithmetic_v<Number>
  friend constexpr Quantity operator*(Number factor, Quantity a) { return a * factor; }
  template <class Number>
  requires std::is_arithmetic_v<Number>
  friend constexpr Quantity operator/(Quantity a, Number divisor) {
    return from_base(a.value_ / static_cast<double>(divisor));
  }

 private:
  double value_ = 0.0;
};

/// Product of two quantities: a quantity of the sums of their exponents, or a number.
template <int b1, int t1, int f1, int k1, int b2, int t2, int f2, int k2>
constexpr auto operator*(Quantity<b1, t1, f1, k1> a, Quantity<b2, t2, f2, k2> b) {
  const double value = a.base() * b.base();
  if constexpr (b1 + b2 == 0 && t1 + t2 == 0 && f1 + f2 == 0 && k1 + k2 == 0) {
    return value;
  } else {
    return Quantity<b1 + b2, t1 + t2, f1 + f2, k1 + k2>::from_base(value);
  }
}

/// Quotient of two quantities: a quantity of the differences of their exponents, or a number.
template <int b1, int t1, int f1, int k1, int b2, int t2, int f2, int k2>
constexpr auto operator/(Quantity<b1, t1, f1, k1> a, Quantity<b2, t2, f2, k2> b) {
  const double value = a.base() / b.base();
  if constexpr (b1 == b2 && t1 == t2 && f1 == f2 && k1 == k2) {
    return value;
  } else {
    return Quantity<b1 - b2, t1 - t2, f1 - f2, k1 - k2>::from_base(value);
  }
}

using Bytes = Quantity<1, 0, 0, 0>;       ///< Size of data.
using Time = Quantity<0, 1, 0, 0>;        ///< Length of time.
using Flops = Quantity<0, 0, 1, 0>;       ///< Floating-point operations.
using Tokens = Quantity<0, 0, 0, 1>;      ///< Number of tokens.
using Bandwidth = Quantity<1, -1, 0, 0>;  ///< Bytes over time.
using FlopRate = Quantity<0, -1, 1, 0>;   ///< Operations over time.
using TokenRate = Quantity<0, -1, 0, 1>;  ///< Tokens over time.

/// `n` bytes.
constexpr Bytes bytes(double n) {
  return Bytes::from_base(n);
}
/// `n` times 1e9 bytes.
constexpr Bytes gigabytes(double n) {
  return Bytes::from_base(n * 1e9);
}
/// `elements` of `bits` each: 4-bit formats take exact halves of bytes.
constexpr Bytes packed_bytes(double elements, double bits) {
  return Bytes::from_base(elements * bits / 8.0);
}
/// `n` microseconds.
constexpr Time microseconds(double n) {
  return Time::from_base(n);
}
/// `n` milliseconds.
constexpr Time milliseconds(double n) {
  return Time::from_base(n * 1e3);
}
/// `n` seconds.
constexpr Time seconds(double n) {
  return Time::from_base(n * 1e6);
}
/// `n` operations.
constexpr Flops flops(double n) {
  return Flops::from_base(n);
}
/// `n` tokens.
constexpr Tokens tokens(double n) {
  return Tokens::from_base(n);
}
/// `n` times 1e9 bytes a second.
constexpr Bandwidth gigabytes_per_second(double n) {
  return Bandwidth::from_base(n * 1e3);
}
/// `n` times 1e12 operations a second.
constexpr FlopRate teraflops_per_second(double n) {
  return FlopRate::from_base(n * 1e6);
}

/// Number of bytes.
constexpr double in_bytes(Bytes x) {
  return x.base();
}
/// Number of 1e9 bytes.
constexpr double in_gigabytes(Bytes x) {
  return x.base() / 1e9;
}
/// Number of microseconds.
constexpr double in_microseconds(Time x) {
  return x.base();
}
/// Number of milliseconds.
constexpr double in_milliseconds(Time x) {
  return x.base() / 1e3;
}
/// Number of seconds.
constexpr double in_seconds(Time x) {
  return x.base() / 1e6;
}
/// Number of operations.
constexpr double in_flops(Flops x) {
  return x.base();
}
/// Number of tokens.
constexpr double in_tokens(Tokens x) {
  return x.base();
}
/// Number of 1e9 bytes a second.
constexpr double in_gigabytes_per_second(Bandwidth x) {
  return x.base() / 1e3;
}
/// Number of 1e12 operations a second.
constexpr double in_teraflops_per_second(FlopRate x) {
  return x.base() / 1e6;
}
/// Number of tokens a second.
constexpr double in_tokens_per_second(TokenRate x) {
  return x.base() * 1e6;
}

}  // namespace helix::plan
