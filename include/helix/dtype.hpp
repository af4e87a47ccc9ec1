// SPDX-License-Identifier: Apache-2.0
// Storage types bf16, f16 and fp8_e4m3, usable without CUDA, and DType, their runtime names.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include <helix/error.hpp>

namespace helix {

/// Element type of a tensor, known at run time only. fp8_ds_mla is not an element type but a row format of
/// MLA KV caches: e4m3 latent columns, f32 scales, bf16 rope columns (KvFormat).
enum class DType : std::uint8_t { f32, f16, bf16, fp8_e4m3, fp8_ds_mla };

/// Bytes of one element. For fp8_ds_mla it is 1, because its strides count bytes.
constexpr std::size_t size_bytes(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::fp8_e4m3:
    case DType::fp8_ds_mla:
      return 1;
  }
  return 0;
}

/// Name of the type as command lines and messages write it: "bf16".
constexpr std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::fp8_e4m3:
      return "fp8_e4m3";
    case DType::fp8_ds_mla:
      return "fp8_ds_mla";
  }
  return "unknown";
}

/// The inverse of to_string; nullopt for any other name.
constexpr std::optional<DType> parse_dtype(std::string_view name) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3, DType::fp8_ds_mla}) {
    if (name == to_string(dtype)) return dtype;
  }
  return std::nullopt;
}

namespace detail {

/// Whether weights may be stored in the type, and sums made in it: true for f32, f16 and bf16, false for
/// types of KV caches alone and for values without a name.
constexpr bool is_arithmetic(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

/// Rounds float bits to nearest-even after dropping `shift` low bits.
constexpr std::uint32_t round_shift_right(std::uint32_t bits, unsigned shift) {
  const std::uint32_t half = 1u << (shift - 1);
  const std::uint32_t odd = (bits >> shift) & 1u;
  return (bits + half - 1u + odd) >> shift;
}

/// f32 to a small IEEE-like format of `kExponentBits` and `kMantissaBits`, nearest-even with subnormals.
/// Returns magnitude bits; a result past the largest exponent carries into it, and the caller decides what
/// that means.
template <unsigned kExponentBits, unsigned kMantissaBits>
constexpr std::uint32_t shrink_magnitude(std::uint32_t magnitude) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr unsigned kShift = 23 - kMantissaBits;
  const int exponent = static_cast<int>(magnitude >> 23) - 127 + kBias;
  if (exponent >= 1) {
    const std::uint32_t rebased = magnitude - (static_cast<std::uint32_t>(127 - kBias) << 23);
    return round_shift_right(rebased, kShift);
  }
  const unsigned shift = kShift + static_cast<unsigned>(1 - exponent);
  if (shift > 24) return 0;  // below half of the smallest subnormal
  return round_shift_right((magnitude & 0x7fffffu) | 0x800000u, shift);
}

/// Magnitude bits of the small format back to f32 bits; exact.
template <unsigned kExponentBits, unsigned kMantissaBits>
constexpr std::uint32_t grow_magnitude(std::uint32_t magnitude) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr unsigned kShift = 23 - kMantissaBits;
  const std::uint32_t exponent = magnitude >> kMantissaBits;
  std::uint32_t mantissa = magnitude & ((1u << kMantissaBits) - 1u);
  if (exponent != 0) return (magnitude << kShift) + (static_cast<std::uint32_t>(127 - kBias) << 23);
  if (mantissa == 0) return 0;
  const auto leading = static_cast<unsigned>(std::countl_zero(mantissa)) - (31u - kMantissaBits);
  mantissa = (mantissa << leading) & ((1u << kMantissaBits) - 1u);
  return (static_cast<std::uint32_t>(127 - kBias + 1) - leading) << 23 | mantissa << kShift;
}

}  // namespace detail

/// bfloat16: the upper half of a float. Conversion rounds to nearest-even; NaN stays NaN, infinities stay.
struct bf16 {
  std::uint16_t bits = 0;

  bf16() = default;
  constexpr explicit bf16(float value) {
    const auto f = std::bit_cast<std::uint32_t>(value);
    if ((f & 0x7fffffffu) > 0x7f800000u) {
      bits =
          static_cast<std::uint16_t>(f >> 16 | 0x40u);  // quiet, so that the payload cannot round to infinity
    } else {
      bits = static_cast<std::uint16_t>(detail::round_shift_right(f, 16));
    }
  }
  constexpr explicit operator float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  static constexpr bf16 from_bits(std::uint16_t bits) {
    bf16 value;
    value.bits = bits;
    return value;
  }
};

/// IEEE half. Conversion rounds to nearest-even; overflow gives infinity, NaN stays NaN.
struct f16 {
  std::uint16_t bits = 0;

  f16() = default;
  constexpr explicit f16(float value) {
    const auto f = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = f >> 16 & 0x8000u;
    const std::uint32_t magnitude = f & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
      bits = static_cast<std::uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    } else if (magnitude >= 0x477ff000u) {  // 65520: halfway past the largest finite value
      bits = static_cast<std::uint16_t>(sign | 0x7c00u);
    } else {
      bits = static_cast<std::uint16_t>(sign | detail::shrink_magnitude<5, 10>(magnitude));
    }
  }
  constexpr explicit operator float() const {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    return std::bit_cast<float>(sign | detail::grow_magnitude<5, 10>(magnitude));
  }
  static constexpr f16 from_bits(std::uint16_t bits) {
    f16 value;
    value.bits = bits;
    return value;
  }
};

/// OCP e4m3 ("fn"): largest finite 448, no infinity, NaN is 0x7f / 0xff. Conversion rounds to nearest-even
/// and saturates (infinities too), as cvt.rn.satfinite does; NaN stays NaN.
struct fp8_e4m3 {
  std::uint8_t bits = 0;

  fp8_e4m3() = default;
  constexpr explicit fp8_e4m3(float value) {
    const auto f = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = f >> 24 & 0x80u;
    const std::uint32_t magnitude = f & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
      bits = static_cast<std::uint8_t>(sign | 0x7fu);
    } else if (magnitude >= 0x43e00000u) {  // 448
      bits = static_cast<std::uint8_t>(sign | 0x7eu);
    } else {
      bits = static_cast<std::uint8_t>(sign | detail::shrink_magnitude<4, 3>(magnitude));
    }
  }
  constexpr explicit operator float() const {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
    const std::uint32_t magnitude = bits & 0x7fu;
    if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
    return std::bit_cast<float>(sign | detail::grow_magnitude<4, 3>(magnitude));
  }
  static constexpr fp8_e4m3 from_bits(std::uint8_t bits) {
    fp8_e4m3 value;
    value.bits = bits;
    return value;
  }
};

/// DType of a C++ element type.
template <class T>
inline constexpr DType kDTypeOf = [] {
  static_assert(sizeof(T) == 0, "no DType for this element type");
  return DType::f32;
}();
/// DType of `float`.
template <>
inline constexpr DType kDTypeOf<float> = DType::f32;
/// DType of `f16`.
template <>
inline constexpr DType kDTypeOf<f16> = DType::f16;
/// DType of `bf16`.
template <>
inline constexpr DType kDTypeOf<bf16> = DType::bf16;
/// DType of `fp8_e4m3`.
template <>
inline constexpr DType kDTypeOf<fp8_e4m3> = DType::fp8_e4m3;

/// Calls `use` with a null pointer to the element type of `dtype`: `dispatch(dtype, [&]<class T>(T*) { ...
/// })`. This is the one place where a runtime type becomes a C++ type. Throws Error(unsupported) for
/// fp8_ds_mla.
template <class Use>
constexpr decltype(auto) dispatch(DType dtype, Use&& use) {
  switch (dtype) {
    case DType::f32:
      return use(static_cast<float*>(nullptr));
    case DType::f16:
      return use(static_cast<f16*>(nullptr));
    case DType::bf16:
      return use(static_cast<bf16*>(nullptr));
    case DType::fp8_e4m3:
      return use(static_cast<fp8_e4m3*>(nullptr));
    case DType::fp8_ds_mla:
      break;
  }
  throw Error(ErrorCode::unsupported, "dispatch: DType ", to_string(dtype), " (", static_cast<int>(dtype),
              ") is no element type");
}

}  // namespace helix
