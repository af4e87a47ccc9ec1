// SPDX-License-Identifier: Apache-2.0
// What a KvView must hold before an operation may read it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>

#include <helix/error.hpp>
#include <helix/kv_format.hpp>
#include <helix/limits.hpp>

namespace helix {
namespace detail {

/// Throws Error(invalid_argument) unless the size (called `name`) is in [1, most].
inline void check_kv_size(std::string_view operation, std::string_view name, std::int64_t value,
                          std::int64_t most) {
  HELIX_EXPECTS(value >= 1 && value <= most, ErrorCode::invalid_argument, operation, ": the KV view's ", name,
                " is ", value, "; it must be in [1, ", most, "]: was the field forgotten?");
}

/// Throws Error(invalid_argument) unless the pointer is given and aligned to elements of `bytes` bytes.
inline void check_kv_pointer(std::string_view operation, std::string_view name, const void* pointer,
                             std::size_t bytes) {
  HELIX_EXPECTS(pointer != nullptr, ErrorCode::invalid_argument, operation, ": the KV view's ", name,
                " is null; point it at device memory");
  HELIX_EXPECTS(reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0, ErrorCode::invalid_argument,
                operation, ": the KV view's ", name, " is at ", pointer, ", which is no multiple of the ",
                bytes, " bytes of what lies there");
}

/// Checks that rows of fp8_ds_mla are latent, aligned, and have columns that fit them.
inline void check_mixed_rows(std::string_view operation, const KvView& kv) {
  const KvFormat& format = kv.format;
  if (!format.is_mixed()) return;
  HELIX_EXPECTS(format.is_latent && fits_mixed_rows(format.head_dim, format.value_dim),
                ErrorCode::invalid_argument, operation, ": the KV view is of ", to_string(format.dtype), ", ",
                format.is_latent ? "latent" : "not latent", ", with ", format.value_dim, " latent and ",
                format.rope_columns(),
                " rope columns; such rows are MLA's, multiples of 4 and of 2 columns wide");
  const auto is_aligned = [](const void* first, const KvStrides& rows) {
    return reinterpret_cast<std::uintptr_t>(first) % 4 == 0 && rows.page % 4 == 0 && rows.token % 4 == 0;
  };
  HELIX_EXPECTS(is_aligned(kv.k, format.k) && is_aligned(kv.rope, format.rope), ErrorCode::invalid_argument,
                operation, ": rows of ", to_string(format.dtype),
                " must begin at multiples of 4 bytes, but those of the KV view do not");
}

/// One axis along which rows lie.
struct KvStep {
  std::string_view axis;
  std::int64_t stride;  // absolute value, in elements; the largest int64 for the smallest
  std::int64_t count;
};

/// The axes by increasing stride. Axes with one row have stride 0 and come first.
inline std::array<KvStep, 3> kv_steps(const KvStrides& strides, const KvView& kv) {
  const auto step = [](std::string_view axis, std::int64_t stride, std::int64_t count) {
    constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
    const std::int64_t size = stride >= 0 ? stride : stride < -kMax ? kMax : -stride;
    return KvStep{axis, count <= 1 ? 0 : size, count};
  };
  std::array<KvStep, 3> steps{step("token", strides.token, kv.format.page_tokens),
                              step("head", strides.head, kv.format.num_heads),
                              step("page", strides.page, kv.num_pages)};
  if (steps[1].stride < steps[0].stride) std::swap(steps[0], steps[1]);
  if (steps[2].stride < steps[1].stride) std::swap(steps[1], steps[2]);
  if (steps[1].stride < steps[0].stride) std::swap(steps[0], steps[1]);
  return steps;
}

/// Checks that rows of `columns` elements do not overlap: each stride steps over all that lies at smaller
/// ones, as in every permutation and slice of a dense tensor. Strides of axes with one row are not checked.
inline void check_kv_strides(std::string_view operation, std::string_view name, const KvStrides& strides,
                             std::int64_t columns, const KvView& kv) {
  std::int64_t span = columns;
  for (const KvStep& step : kv_steps(strides, kv)) {
    if (step.count <= 1) continue;
    HELIX_EXPECTS(step.stride >= span, ErrorCode::invalid_argument, operation, ": the KV view's ", name, ".",
                  step.axis, " stride is ", step.stride, ", but what lies between takes ", span,
                  " elements: rows of ", columns, " would overlap");
    HELIX_EXPECTS(step.stride <= (std::numeric_limits<std::int64_t>::max() / 8 - span) / step.count,
                  ErrorCode::invalid_argument, operation, ": the KV view's ", name, ".", step.axis,
                  " stride is ", step.stride, "; ", step.count, " of it exceed the address space");
    span += (step.count - 1) * step.stride;
  }
}

/// Whether some row of `first_bytes` overlaps some row of `second_bytes`. The second rows lie `distance`
/// bytes after the first ones; both have strides that check_kv_strides() accepts.
inline bool kv_rows_meet(const std::array<KvStep, 3>& steps, int num_steps, std::int64_t element_bytes,
                         std::int64_t distance, std::int64_t first_bytes, std::int64_t second_bytes) {
  if (num_steps == 0) return distance < first_bytes && -distance < second_bytes;
  const KvStep& step = steps[static_cast<std::size_t>(num_steps - 1)];
  const std::int64_t stride = step.stride * element_bytes;
  const auto meet = [&](std::int64_t times) {
    return times > -step.count && times < step.count &&
           kv_rows_meet(steps, num_steps - 1, element_bytes, distance - times * stride, first_bytes,
                        second_bytes);
  };
  if (stride == 0) return meet(0);
  // Smaller strides reach less far than this one, so only the two steps on either side can overlap.
  const std::int64_t below = distance / stride - (distance % stride < 0 ? 1 : 0);
  return meet(below) || meet(below + 1);
}

/// Throws if rows of k and of `other` overlap. If their strides differ, only the first rows are checked: two
/// parts of one pool have equal strides.
inline void check_kv_apart(std::string_view operation, std::string_view name, const KvStrides& strides,
                           const void* other, std::int64_t columns, const KvView& kv) {
  const KvFormat& format = kv.format;
  const auto address = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); };
  const auto distance = static_cast<std::int64_t>(address(other) - address(kv.k));
  const std::int64_t bytes = format.element_bytes();
  const int num_steps = strides == format.k ? 3 : 0;
  HELIX_EXPECTS(!kv_rows_meet(kv_steps(strides, kv), num_steps, bytes, distance, format.k_extent() * bytes,
                              columns * bytes),
                ErrorCode::invalid_argument, operation, ": the KV view's ", name, " lies ", distance,
                " bytes behind its k, where rows of both overlap; a row that is key and value is latent");
}

}  // namespace detail

inline void check_kv_view(std::string_view operation, const KvView& kv) {
  constexpr std::int64_t kMax = std::int64_t{1} << 31;
  const KvFormat& format = kv.format;
  detail::check_kv_size(operation, "num_heads", format.num_heads, kMax);
  detail::check_kv_size(operation, "head_dim", format.head_dim, kMax);
  detail::check_kv_size(operation, "value_dim", format.value_dim, format.is_latent ? format.head_dim : kMax);
  detail::check_kv_size(operation, "page_tokens", format.page_tokens, kMaxPageTokens);
  detail::check_kv_size(operation, "num_pages", kv.num_pages, kMaxPages);
  HELIX_EXPECTS(size_bytes(format.dtype) != 0, ErrorCode::invalid_argument, operation,
                ": the KV view's dtype value ", static_cast<int>(format.dtype), " names no type");
  detail::check_mixed_rows(operation, kv);
  const auto bytes = static_cast<std::size_t>(format.element_bytes());
  detail::check_kv_pointer(operation, "k", kv.k, bytes);
  detail::check_kv_pointer(operation, "page_table", kv.page_table, sizeof(std::int32_t));
  detail::check_kv_strides(operation, "k", format.k, format.k_extent(), kv);
  if (!format.is_latent) {
    detail::check_kv_pointer(operation, "v", kv.v, bytes);
    detail::check_kv_strides(operation, "v", format.v, format.value_dim, kv);
    detail::check_kv_apart(operation, "v", format.v, kv.v, format.value_dim, kv);
  } else if (format.rope_columns() > 0) {
    detail::check_kv_pointer(operation, "rope", kv.rope, bytes);
    detail::check_kv_strides(operation, "rope", format.rope, format.rope_extent(), kv);
    detail::check_kv_apart(operation, "rope", format.rope, kv.rope, format.rope_extent(), kv);
  }
  HELIX_EXPECTS(!format.is_latent || format.num_heads == 1, ErrorCode::invalid_argument, operation,
                ": the KV view is latent with ", format.num_heads, " heads; a latent is one KV head");
  if (kv.page_begins == nullptr) detail::check_kv_size(operation, "max_pages", kv.max_pages, kMax);
  HELIX_EXPECTS(kv.num_slots >= 0 && kv.num_slots <= kMax, ErrorCode::invalid_argument, operation,
                ": the KV view's num_slots is ", kv.num_slots, "; it must be in [0, ", kMax,
                "], 0 where it is not known");
  HELIX_EXPECTS(kv.layout.chunk() <= kMaxChunk, ErrorCode::invalid_argument, operation,
                ": the chunk of the KV view's layout is ", kv.layout.chunk(), "; it must be at most ",
                kMaxChunk);
  HELIX_EXPECTS(kv.layout.is_set() && kv.kvp_rank != -1, ErrorCode::invalid_argument, operation,
                ": the KV view has no ", kv.layout.is_set() ? "kvp_rank" : "layout",
                "; say how sequences are split over ranks: KvLayout(KVP, chunk) and this rank's kvp_rank, or "
                "KvView::whole() where they are not");
  HELIX_EXPECTS(kv.kvp_rank >= 0 && kv.kvp_rank < kv.layout.kvp(), ErrorCode::invalid_argument, operation,
                ": the KV view's kvp_rank is ", kv.kvp_rank, "; its layout has ", kv.layout.kvp(),
                " KVP ranks");
  HELIX_EXPECTS(format.dtype == DType::fp8_e4m3 || (kv.k_scale == nullptr && kv.v_scale == nullptr),
                ErrorCode::invalid_argument, operation, ": the KV view has scales, but its dtype is ",
                to_string(format.dtype), "; only fp8_e4m3 is scaled");
  HELIX_EXPECTS(!format.is_latent || kv.v_scale == nullptr, ErrorCode::invalid_argument, operation,
                ": the KV view is latent and has a v_scale; k_scale serves the whole row");
}

}  // namespace helix
