// SPDX-License-Identifier: Apache-2.0
// Moves rows of activations to the rows of KV pages that hold them, and back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/kv_cache/mixed_rows.cuh"
#include "cuda/kv_cache/paged_rows.cuh"
#include "cuda/runtime/rows.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// One half of a token: where its values are, and where they are stored. V is T (const to store).
template <class V>
struct KvHalf {
  V* values;  // [tokens, heads, count]
  std::int64_t token_stride;
  std::int64_t head_stride;
  PagedRows stored;
  const float* scales;  // [heads] or null
  std::int64_t count;
};

/// Pairs rows of values with rows of pages of type S. A token has one plane per head of the first half, then
/// one per head of the second half.
template <class V, class S>
struct KvTransfer {
  KvHalf<V> first;   // keys; latent: the columns that serve as values too
  KvHalf<V> second;  // values; latent: the rope columns, if any
  PageLists lists;
  std::int64_t page_tokens;
  int heads;
  int planes;

  struct Row {
    V* values;
    S* stored;
    std::int64_t count;
    float scale;
  };

  __device__ Row row(std::int64_t token, int plane, std::int64_t slot, std::int64_t local) const {
    const bool is_second = plane >= heads;
    const int head = is_second ? plane - heads : plane;
    // Both halves are launch constants, so this selects between values and not between addresses.
    const auto pick = [&](auto of_first, auto of_second) { return is_second ? of_second : of_first; };
    const float* scales = pick(first.scales, second.scales);
    const std::int64_t page = lists.pages[lists.first_of(slot) + local / page_tokens];
    Row row;
    row.values = pick(first.values, second.values) + token * pick(first.token_stride, second.token_stride) +
                 head * pick(first.head_stride, second.head_stride);
    row.stored =
        reinterpret_cast<S*>(pick(first.stored.first, second.stored.first) +
                             page * pick(first.stored.page_bytes, second.stored.page_bytes) +
                             head * pick(first.stored.head_bytes, second.stored.head_bytes) +
                             local % page_tokens * pick(first.stored.token_bytes, second.stored.token_bytes));
    row.count = pick(first.count, second.count);
    row.scale = scales == nullptr ? 1.0f : scales[head];
    return row;
  }
};

/// stored = nearest(value / scale), by one warp. Divides instead of multiplying by the inverse, so that
/// reading a row and storing it again gives the same bits.
template <int kCount, class Row>
__device__ __forceinline__ void store_row(const Row& row) {
  for (std::int64_t i = threadIdx.x % kWarp * kCount; i < row.count; i += kWarp * kCount) {
    float x[kCount];
    load_vector(row.values + i, x);
    if (row.scale != 1.0f) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = x[j] / row.scale;
    }
    store_vector(row.stored + i, x);
  }
}

/// value = stored * scale, by one warp.
template <int kCount, class Row>
__device__ __forceinline__ void load_row(const Row& row) {
  for (std::int64_t i = threadIdx.x % kWarp * kCount; i < row.count; i += kWarp * kCount) {
    float x[kCount];
    load_vector(row.stored + i, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] *= row.scale;
    store_vector(row.values + i, x);
  }
}

/// The sequence of a batch that `token` belongs to: the number of sequences, also empty ones, that end at or
/// before it. Whole warps.
__device__ inline unsigned sequence_of(std::int64_t token, const std::int32_t* query_offsets,
                                       std::int64_t sequences) {
  unsigned before = 0;
  for (std::int64_t b = threadIdx.x % kWarp; b < sequences; b += kWarp)
    before += query_offsets[b + 1] <= token;
  return __reduce_add_sync(~0u, before);
}

/// The transfer of the tokens of k and v in `kv`.
template <class V, class S>
KvTransfer<V, S> transfer_of(const KvView& kv, const TensorView<V, 3>& k, const TensorView<V, 3>& v) {
  const KvFormat& format = kv.format;
  const KvPlaces places(kv);
  KvTransfer<V, S> transfer;
  transfer.first = {k.data(), k.stride(0), k.stride(1), places.k, kv.k_scale, format.k_columns()};
  if (format.is_latent) {
    transfer.second = {k.data() + format.value_dim, k.stride(0), k.stride(1), places.rope, kv.k_scale,
                       format.rope_columns()};
  } else {
    transfer.second = {v.data(), v.stride(0), v.stride(1), places.v, kv.v_scale, format.value_dim};
  }
  transfer.lists = PageLists(kv);
  transfer.page_tokens = format.page_tokens;
  transfer.heads = static_cast<int>(format.num_heads);
  transfer.planes = transfer.heads * (transfer.second.count > 0 ? 2 : 1);
  return transfer;
}

/// Calls use(transfer, std::integral_constant<int, elements an access>) for the type of the pages.
template <class V, class Use>
void with_transfer(const KvView& kv, const TensorView<V, 3>& k, const TensorView<V, 3>& v, const Use& use) {
  using Value = std::remove_const_t<V>;
  if (kv.format.is_mixed()) return use(mixed_transfer_of(kv, k), std::integral_constant<int, 1>{});
  dispatch(kv.format.dtype, [&]<class S>(S*) {
    constexpr int kCount = std::min(kVector<Value>, kVector<S>);
    const auto transfer = transfer_of<V, S>(kv, k, v);
    const auto is_aligned = [&](const KvHalf<V>& half) {
      return half.count == 0 ||
             (common_alignment({address_of(half.values), step_of<Value>(half.token_stride),
                                step_of<Value>(half.head_stride)}) >= kCount * sizeof(Value) &&
              half.stored.alignment(kv) >= kCount * sizeof(S) && half.count % kCount == 0);
    };
    if (is_aligned(transfer.first) && is_aligned(transfer.second)) {
      use(transfer, std::integral_constant<int, kCount>{});
    } else {
      use(transfer, std::integral_constant<int, 1>{});
    }
  });
}

}  // namespace helix::cuda
