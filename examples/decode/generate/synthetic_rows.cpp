// SPDX-License-Identifier: Apache-2.0
// Fills runs of synthetic rows with SIMD, compiled for each instruction set and chosen at run time.

// As in the library's kernels: machines before 2013 use the portable code.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "generate/synthetic_rows.cpp"
#include <hwy/foreach_target.h>
// These must come after foreach_target.h.

#include <hwy/highway.h>

#include "generate/synthetic_rows.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::decode::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr hn::ScalableTag<float> kF32;
constexpr hn::RebindToSigned<decltype(kF32)> kI32;
constexpr hn::RebindToUnsigned<decltype(kF32)> kU32;
constexpr hn::Rebind<std::uint16_t, decltype(kF32)> kU16;
using Vec = hn::Vec<decltype(kF32)>;

/// synthetic_element() of several columns; `products` are the column numbers times 0x9e3779b9.
HWY_INLINE Vec elements(std::uint32_t key, hn::Vec<decltype(kU32)> products) {
  auto x = hn::Xor(hn::Set(kU32, key), products);
  x = hn::Xor(x, hn::ShiftRight<16>(x));
  x = hn::Mul(x, hn::Set(kU32, 0x7feb352du));
  x = hn::Xor(x, hn::ShiftRight<15>(x));
  x = hn::Mul(x, hn::Set(kU32, 0x846ca68bu));
  x = hn::Xor(x, hn::ShiftRight<16>(x));
  return hn::Mul(hn::ConvertTo(kF32, hn::BitCast(kI32, x)), hn::Set(kF32, 0x1p-31f));
}

HWY_INLINE void store(Vec values, float* out) {
  hn::StoreU(values, kF32, out);
}

/// Rounds like bf16(float) does for finite values.
HWY_INLINE void store(Vec values, bf16* out) {
  const auto bits = hn::BitCast(kU32, values);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(kU32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(hn::Set(kU32, 0x7fff), odd)));
  hn::StoreU(hn::DemoteTo(kU16, hn::BitCast(kI32, rounded)), kU16, &out->bits);
}

/// Types whose conversion is not worth vectorizing.
template <class T>
HWY_INLINE void store(Vec values, T* out) {
  HWY_ALIGN float lanes[hn::MaxLanes(kF32)];
  hn::Store(values, kF32, lanes);
  for (std::size_t i = 0; i < hn::Lanes(kF32); ++i) out[i] = T(lanes[i]);
}

template <class T>
void fill_rows(const SyntheticRows& rows, T* out, std::int64_t stride) {
  constexpr std::uint32_t kColumn = 0x9e3779b9u;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(kF32));
  const auto first = static_cast<std::uint32_t>(rows.first_column);
  const auto products = hn::Mul(hn::Add(hn::Iota(kU32, 0), hn::Set(kU32, first)), hn::Set(kU32, kColumn));
  const auto step = hn::Set(kU32, kColumn * static_cast<std::uint32_t>(lanes));
  const auto scale = hn::Set(kF32, rows.scale);
  const bool is_scaled = rows.scale != 1.0f;
  for (std::int64_t row = 0; row < rows.num_rows; ++row) {
    const std::uint32_t key =
        synthetic_row_key(rows.layer, rows.head, rows.first_position + row, rows.is_value);
    T* const to = out + row * stride;
    auto columns = products;
    std::int64_t i = 0;
    for (; i + lanes <= rows.num_columns; i += lanes) {
      const Vec values = elements(key, columns);
      store(is_scaled ? hn::Div(values, scale) : values, to + i);
      columns = hn::Add(columns, step);
    }
    for (; i < rows.num_columns; ++i)
      to[i] = T(synthetic_element(key, first + static_cast<std::uint32_t>(i)) / rows.scale);
  }
}

void fill_target(const SyntheticRows& rows, DType dtype, void* out, std::int64_t stride) {
  dispatch(dtype, [&]<class T>(T*) { fill_rows(rows, static_cast<T*>(out), stride); });
}

}  // namespace
}  // namespace helix::decode::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace helix::decode {

HWY_EXPORT(fill_target);

void fill_synthetic_rows(const SyntheticRows& rows, DType dtype, void* out, std::int64_t stride) {
  HWY_DYNAMIC_DISPATCH(fill_target)(rows, dtype, out, stride);
}

}  // namespace helix::decode
#endif
