// SPDX-License-Identifier: Apache-2.0
// Rows of DType::fp8_ds_mla on the device: reads values from them and stores values into them.
#pragma once

#include <cstdint>

#include <helix/kv_format.hpp>

#include "cuda/kv_cache/paged_rows.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// Stands for the element type of DType::fp8_ds_mla in kernel templates.
struct MixedByte {
  std::uint8_t bits;
};

/// Column `i` of a row that is a key (or a value). The first `latent_columns` columns are latent; column i of
/// the others is element i of `rope`, so `rope` may begin before them (see rope_from_zero()).
template <class KV>
__device__ __forceinline__ float key_element(const KV* latent, const KV* rope, int i, int latent_columns) {
  return to_float((i < latent_columns ? latent : rope)[i]);
}
__device__ __forceinline__ float key_element(const MixedByte* latent, const MixedByte* rope, int i,
                                             int latent_columns) {
  if (i >= latent_columns) return to_float(reinterpret_cast<const bf16*>(rope)[i]);
  const auto* scales = reinterpret_cast<const float*>(latent + latent_columns);
  return to_float(fp8_e4m3::from_bits(latent[i].bits)) * scales[i / static_cast<int>(kScaledColumns)];
}
/// The pointer for key_element() such that its rope columns begin at `rope`.
template <class KV>
__device__ __forceinline__ const KV* rope_from_zero(const std::byte* rope, int latent_columns) {
  return reinterpret_cast<const KV*>(rope) - latent_columns;
}
template <>
__device__ __forceinline__ const MixedByte* rope_from_zero(const std::byte* rope, int latent_columns) {
  return reinterpret_cast<const MixedByte*>(reinterpret_cast<const bf16*>(rope) - latent_columns);
}

/// dispatch() that also accepts DType::fp8_ds_mla, as MixedByte.
template <class Use>
decltype(auto) dispatch_rows(DType dtype, Use&& use) {
  if (dtype == DType::fp8_ds_mla) return use(static_cast<MixedByte*>(nullptr));
  return dispatch(dtype, use);
}

/// One row, with the values that a warp moves to it or from it.
template <class V>
struct MixedRow {
  V* values;  // [head_dim], latent columns first; or null
  std::byte* latent;
  std::byte* rope;
  int head_dim;
  int value_dim;

  __device__ float* scales() const { return reinterpret_cast<float*>(latent + value_dim); }
};

/// The largest finite magnitude in `x`; 0 for none.
template <int kCount>
__device__ __forceinline__ float largest_finite(const float (&x)[kCount]) {
  float most = 0.0f;
#pragma unroll
  for (const float value : x)
    if (const float size = fabsf(value); size < kInfinity) most = fmaxf(most, size);
  return most;
}

/// Stores element(i) as column i of the row. Called by one warp.
template <class V, class Element>
__device__ __forceinline__ void store_mixed_row(const MixedRow<V>& row, const Element& element) {
  constexpr int kColumns = static_cast<int>(kScaledColumns);
  constexpr int kLaneColumns = kColumns / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int first = 0; first < row.value_dim; first += kColumns) {
    const int column = first + lane * kLaneColumns;
    const bool is_there = column < row.value_dim;  // a multiple of kLaneColumns
    float x[kLaneColumns];
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) x[j] = is_there ? element(column + j) : 0.0f;
    const float scale = mixed_scale(warp_max(largest_finite(x)));
    if (is_there) {
      unsigned four = 0;
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j)
        four |= static_cast<unsigned>(from_float<fp8_e4m3>(x[j] / scale).bits) << (8 * j);
      *reinterpret_cast<unsigned*>(row.latent + column) = four;
    }
    if (lane == 0) row.scales()[first / kColumns] = scale;
  }
  auto* rope = reinterpret_cast<bf16*>(row.rope);
  for (int i = row.value_dim + lane; i < row.head_dim; i += kWarp)
    rope[i - row.value_dim] = from_float<bf16>(element(i));
}
template <int, class V>
__device__ __forceinline__ void store_row(const MixedRow<V>& row) {
  store_mixed_row(row, [&](int i) { return to_float(row.values[i]); });
}

/// Reads the row back as values.
template <int, class V>
__device__ __forceinline__ void load_row(const MixedRow<V>& row) {
  const auto* latent = reinterpret_cast<const MixedByte*>(row.latent);
  const MixedByte* rope = rope_from_zero<MixedByte>(row.rope, row.value_dim);
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < row.head_dim; i += kWarp)
    row.values[i] = from_float<V>(key_element(latent, rope, i, row.value_dim));
}

/// As KvTransfer, for rows of DType::fp8_ds_mla: a token has one plane.
template <class V>
struct MixedTransfer {
  static constexpr int planes = 1;

  V* values;  // [tokens, 1, head_dim]
  std::int64_t token_stride;
  PagedRows latent;
  PagedRows rope;
  PageLists lists;
  std::int64_t page_tokens;
  int head_dim;
  int value_dim;

  __device__ MixedRow<V> row(std::int64_t token, int, std::int64_t slot, std::int64_t local) const {
    const std::int64_t page = lists.pages[lists.first_of(slot) + local / page_tokens];
    const std::int64_t in_page = local % page_tokens;
    return {values + token * token_stride, latent.at(page, 0, in_page), rope.at(page, 0, in_page), head_dim,
            value_dim};
  }
};

/// The transfer of the tokens of k in `kv`, which is of DType::fp8_ds_mla.
template <class V>
MixedTransfer<V> mixed_transfer_of(const KvView& kv, const TensorView<V, 3>& k) {
  const KvPlaces places(kv);
  return {k.data(),
          k.stride(0),
          places.k,
          places.rope,
          PageLists(kv),
          kv.format.page_tokens,
          static_cast<int>(kv.format.head_dim),
          static_cast<int>(kv.format.value_dim)};
}

}  // namespace helix::cuda
