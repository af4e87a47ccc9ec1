// SPDX-License-Identifier: Apache-2.0
// What a KvView must hold before an operation may read it.
#pragma once

#include <cstdint>
#include <string_view>

#include <helix/error.hpp>
#include <helix/kv_format.hpp>
#include <helix/limits.hpp>

namespace helix {
namespace detail {

inline void check_kv_size(std::string_view operation, std::string_view name, std::int64_t value,
                          std::int64_t most) {
  HELIX_EXPECTS(value >= 1 && value <= most, ErrorCode::invalid_argument, operation, ": the KV view's ", name,
                " is ", value, "; it must be in [1, ", most, "]: was the field forgotten?");
}

inline void check_kv_pointer(std::string_view operation, std::string_view name, const void* pointer) {
  HELIX_EXPECTS(pointer != nullptr, ErrorCode::invalid_argument, operation, ": the KV view's ", name,
                " is null; point it at the pool");
}

/// Rows of `columns` elements; a stride that nothing steps along is not looked at.
inline void check_kv_strides(std::string_view operation, std::string_view name, const KvStrides& strides,
                             std::int64_t columns, const KvView& kv) {
  const auto check = [&](std::string_view axis, std::int64_t stride, std::int64_t extent) {
    HELIX_EXPECTS(extent <= 1 || stride >= columns || stride <= -columns, ErrorCode::invalid_argument,
                  operation, ": the KV view's ", name, ".", axis, " stride is ", stride, "; rows of ",
                  columns, " elements would overlap");
  };
  check("token", strides.token, kv.format.page_tokens);
  check("head", strides.head, kv.format.num_heads);
  check("page", strides.page, kv.num_pages);
}

}  // namespace detail

inline void check_kv_view(std::string_view operation, const KvView& kv) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  const KvFormat& format = kv.format;
  detail::check_kv_size(operation, "num_heads", format.num_heads, kMost);
  detail::check_kv_size(operation, "head_dim", format.head_dim, kMost);
  detail::check_kv_size(operation, "value_dim", format.value_dim, format.is_latent ? format.head_dim : kMost);
  detail::check_kv_size(operation, "page_tokens", format.page_tokens, kMaxPageTokens);
  detail::check_kv_size(operation, "num_pages", kv.num_pages, kMost);
  HELIX_EXPECTS(size_bytes(format.dtype) != 0, ErrorCode::invalid_argument, operation,
                ": the KV view's dtype value ", static_cast<int>(format.dtype), " names no type");
  detail::check_kv_pointer(operation, "k", kv.k);
  detail::check_kv_pointer(operation, "page_table", kv.page_table);
  detail::check_kv_strides(operation, "k", format.k, format.k_columns(), kv);
  if (!format.is_latent) {
    detail::check_kv_pointer(operation, "v", kv.v);
    detail::check_kv_strides(operation, "v", format.v, format.value_dim, kv);
  } else if (format.rope_columns() > 0) {
    detail::check_kv_pointer(operation, "rope", kv.rope);
    detail::check_kv_strides(operation, "rope", format.rope, format.rope_columns(), kv);
  }
  HELIX_EXPECTS(!format.is_latent || format.num_heads == 1, ErrorCode::invalid_argument, operation,
                ": the KV view is latent with ", format.num_heads, " heads; a latent is one KV head");
  if (kv.page_begins == nullptr) detail::check_kv_size(operation, "max_pages", kv.max_pages, kMost);
  HELIX_EXPECTS(kv.kvp_rank >= 0 && kv.kvp_rank < kv.layout.kvp(), ErrorCode::invalid_argument, operation,
                ": the KV view's kvp_rank is ", kv.kvp_rank, "; its layout has ", kv.layout.kvp(),
                " KVP ranks");
  HELIX_EXPECTS(format.dtype == DType::fp8_e4m3 || (kv.k_scale == nullptr && kv.v_scale == nullptr),
                ErrorCode::invalid_argument, operation, ": the KV view has scales, but its dtype is ",
                to_string(format.dtype), "; only fp8_e4m3 is scaled");
}

}  // namespace helix
