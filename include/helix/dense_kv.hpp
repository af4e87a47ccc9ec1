// SPDX-License-Identifier: Apache-2.0
// dense_kv: a view of a KV pool that is one dense tensor, whatever the order of its axes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <helix/dtype.hpp>
#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/kv_format.hpp>
#include <helix/limits.hpp>

namespace helix {
namespace detail {

/// `pool` advanced by `elements`; null stays null.
inline void* behind(void* pool, std::int64_t elements, DType dtype) {
  if (pool == nullptr) return nullptr;
  return static_cast<std::byte*>(pool) + size_product(elements, static_cast<std::int64_t>(size_bytes(dtype)));
}

/// Throws Error(invalid_argument) unless the pool has the layer.
inline void check_layer_of_pool(std::int64_t layer, std::int64_t num_layers) {
  HELIX_EXPECTS(num_layers <= kMaxCount && layer >= 0 && layer < num_layers, ErrorCode::invalid_argument,
                "KV pool: layer is ", layer, "; the pool has ", num_layers, " layers, of at most ",
                kMaxCount);
}

/// The product of a pool's sizes, in elements. A size below 0 counts as 0 here: the operation that reads the
/// view reports it. @throws Error(invalid_argument) if the bytes exceed the address space.
template <class... Sizes>
std::int64_t pool_elements(std::int64_t first, Sizes... sizes) {
  constexpr std::int64_t kMax = kSaturated / 8;  // f32 is the widest type of a pool
  const std::int64_t elements = size_product(first, sizes...);
  HELIX_EXPECTS(elements <= kMax, ErrorCode::invalid_argument,
                "KV pool: its sizes exceed the address space; were their units mixed up?");
  return elements;
}

}  // namespace detail

/// An axis of a pool that is one dense tensor; the columns of a row are inside of all axes. `half` is K, then
/// V.
enum class KvAxis { page, layer, half, token, head };

/// Sizes of a pool that is one dense tensor of K and V, in any order of its axes.
struct DenseKvArgs {
  void* pool = nullptr;
  DType dtype = DType::bf16;
  std::int64_t num_pages = 0;
  std::int64_t num_layers = 1;
  std::int64_t layer = 0;  ///< Layer of the pool that the view shows.
  std::int64_t num_kv_heads = 0;
  std::int64_t page_tokens = 0;  ///< Tokens a page.
  std::int64_t head_dim = 0;
};

/// View of a pool whose axes lie in `order`, outermost first. foreign_kv.hpp does this for the engines that
/// it names; this function is for others. vLLM's pools of several layers, for instance, are {page, layer,
/// half, token, head} in its NHD layout; the permutation is that of get_kv_cache_stride_order(True).
/// @throws Error(invalid_argument) if the pool has no such layer or exceeds the address space, or `order`
/// names an axis twice.
inline KvView dense_kv(const DenseKvArgs& args, const std::array<KvAxis, 5>& order) {
  detail::check_layer_of_pool(args.layer, args.num_layers);
  const std::array<std::int64_t, 5> extents{args.num_pages, args.num_layers, 2, args.page_tokens,
                                            args.num_kv_heads};
  std::array<std::int64_t, 5> strides{};
  std::int64_t stride = detail::pool_elements(args.head_dim);
  unsigned seen = 0;
  for (std::size_t i = order.size(); i-- > 0;) {
    const auto axis = static_cast<std::size_t>(order[i]);
    HELIX_EXPECTS(axis < order.size() && (seen >> axis & 1u) == 0, ErrorCode::invalid_argument,
                  "dense_kv: place ", i, " of the order is axis ", axis,
                  "; give each of page, layer, half, token and head once");
    seen |= 1u << axis;
    strides[axis] = stride;
    stride = detail::pool_elements(stride, extents[axis]);
  }
  const auto stride_of = [&](KvAxis axis) { return strides[static_cast<std::size_t>(axis)]; };
  KvView view;
  view.format.dtype = args.dtype;
  view.format.num_heads = args.num_kv_heads;
  view.format.head_dim = view.format.value_dim = args.head_dim;
  view.format.page_tokens = args.page_tokens;
  view.format.k = {stride_of(KvAxis::page), stride_of(KvAxis::head), stride_of(KvAxis::token)};
  view.format.v = view.format.k;
  view.num_pages = args.num_pages;
  view.k = detail::behind(args.pool, args.layer * stride_of(KvAxis::layer), args.dtype);
  view.v = detail::behind(view.k, stride_of(KvAxis::half), args.dtype);
  return view;
}

}  // namespace helix
