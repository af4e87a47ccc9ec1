// SPDX-License-Identifier: Apache-2.0
// cuda::Operators: tokens into the KV pages and back.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <helix/cuda/backend.hpp>

#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/rows.cuh"

namespace helix::cuda {
namespace {

constexpr int kWarps = 4;  // of a block

/// Rows of values beside rows of pages: V is T (const to store) and S the type of the pages. A token has a
/// plane for each K head, then for each V head (MLA: one plane, the latent row).
template <class V, class S>
struct KvTransfer {
  V* k;  // [tokens, heads, head_dim]
  V* v;  // [tokens, heads, value_dim]
  std::int64_t k_token_stride;
  std::int64_t k_head_stride;
  std::int64_t v_token_stride;
  std::int64_t v_head_stride;
  S* pages;
  const std::int32_t* page_table;
  const float* k_scale;  // [heads] or null
  const float* v_scale;
  std::int64_t max_pages;
  std::int64_t page_elements;
  std::int64_t page_tokens;
  std::int64_t head_dim;
  std::int64_t value_dim;
  int heads;
  int planes;

  struct Row {
    V* values;
    S* stored;
    std::int64_t count;
    float scale;
  };

  __device__ Row row(std::int64_t token, int plane, std::int64_t slot, std::int64_t local) const {
    const bool is_value = plane >= heads;
    const int head = is_value ? plane - heads : plane;
    const float* scales = is_value ? v_scale : k_scale;
    const std::int64_t page = page_table[slot * max_pages + local / page_tokens];
    Row row;
    row.values = is_value ? v + token * v_token_stride + head * v_head_stride
                          : k + token * k_token_stride + head * k_head_stride;
    row.stored = pages + page * page_elements + (plane * page_tokens + local % page_tokens) * head_dim;
    row.count = is_value ? value_dim : head_dim;
    row.scale = scales == nullptr ? 1.0f : scales[head];
    return row;
  }
};

/// What one warp moves: a plane of the `row`-th of a launch's tokens.
struct WarpPlane {
  std::int64_t row;
  int plane;
};

__device__ __forceinline__ WarpPlane warp_plane(int planes) {
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  return {warp / planes, static_cast<int>(warp % planes)};
}

/// stored = nearest(value / scale), by one warp. Division, not a product with the inverse: reading a row and
/// storing it again then gives the same bits.
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

/// One warp a plane of a token of the batch.
template <int kCount, class T, class S>
__global__ void __launch_bounds__(kWarps* kWarp)
    append_kernel(KvTransfer<const T, S> transfer, const std::int32_t* query_offsets,
                  const std::int64_t* positions, const std::int32_t* sequence_slots, std::int64_t sequences,
                  std::int64_t first_token, std::int64_t tokens, KvLayout layout, std::int64_t kvp_rank) {
  const WarpPlane at = warp_plane(transfer.planes);
  if (at.row >= tokens) return;
  const std::int64_t token = first_token + at.row;
  const std::int64_t position = positions[token];
  if (position < 0 || layout.owner(position) != kvp_rank) return;
  // The sequences that end at or before the token, the empty ones between too, come before its own.
  unsigned before = 0;
  for (std::int64_t b = threadIdx.x % kWarp; b < sequences; b += kWarp)
    before += query_offsets[b + 1] <= token;
  before = __reduce_add_sync(~0u, before);
  store_row<kCount>(transfer.row(token, at.plane, sequence_slots[before], layout.local(position)));
}

/// One warp a plane of one of the `owned` local tokens; row 0 of the values is global position
/// first_position.
template <int kCount, class T, class S>
__global__ void __launch_bounds__(kWarps* kWarp)
    write_kernel(KvTransfer<const T, S> transfer, std::int64_t slot, std::int64_t first_position,
                 TokenRange owned, KvLayout layout, std::int64_t kvp_rank) {
  const WarpPlane at = warp_plane(transfer.planes);
  const std::int64_t local = owned.begin + at.row;
  if (local >= owned.end) return;
  store_row<kCount>(transfer.row(layout.global(kvp_rank, local) - first_position, at.plane, slot, local));
}

/// One warp a plane of a token: value = stored * scale.
template <int kCount, class S>
__global__ void __launch_bounds__(kWarps* kWarp) read_kernel(KvTransfer<float, S> transfer, std::int64_t slot,
                                                             std::int64_t first_local, std::int64_t tokens) {
  const WarpPlane at = warp_plane(transfer.planes);
  if (at.row >= tokens) return;
  const auto row = transfer.row(at.row, at.plane, slot, first_local + at.row);
  for (std::int64_t i = threadIdx.x % kWarp * kCount; i < row.count; i += kWarp * kCount) {
    float x[kCount];
    load_vector(row.stored + i, x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] *= row.scale;
    store_vector(row.values + i, x);
  }
}

/// Calls use(transfer, std::integral_constant<int, elements an access>) for the type of the pages.
template <class V, class Use>
void with_transfer(const KvView& kv, const TensorView<V, 3>& k, const TensorView<V, 3>& v, const Use& use) {
  using Value = std::remove_const_t<V>;
  const std::size_t values_alignment =
      common_alignment({address_of(k.data()), step_of<Value>(k.stride(0)), step_of<Value>(k.stride(1)),
                        step_of<Value>(kv.head_dim), address_of(v.data()), step_of<Value>(v.stride(0)),
                        step_of<Value>(v.stride(1)), kv.is_mla ? 0 : step_of<Value>(kv.value_dim)});
  dispatch(kv.dtype, [&]<class S>(S*) {
    KvTransfer<V, S> transfer;
    transfer.k = k.data();
    transfer.v = v.data();
    transfer.k_token_stride = k.stride(0);
    transfer.k_head_stride = k.stride(1);
    transfer.v_token_stride = v.stride(0);
    transfer.v_head_stride = v.stride(1);
    transfer.pages = static_cast<S*>(kv.pages);
    transfer.page_table = kv.page_table;
    transfer.k_scale = kv.k_scale;
    transfer.v_scale = kv.v_scale;
    transfer.max_pages = kv.max_pages;
    transfer.page_elements = kv.page_elements();
    transfer.page_tokens = kv.page_tokens;
    transfer.head_dim = kv.head_dim;
    transfer.value_dim = kv.value_dim;
    transfer.heads = static_cast<int>(kv.num_heads);
    transfer.planes = transfer.heads * (kv.is_mla ? 1 : 2);
    constexpr int kCount = std::min(kVector<Value>, kVector<S>);
    const bool is_aligned =
        values_alignment >= kCount * sizeof(Value) &&
        common_alignment({address_of(kv.pages), step_of<S>(kv.head_dim)}) >= kCount * sizeof(S);
    if (is_aligned) {
      use(transfer, std::integral_constant<int, kCount>{});
    } else {
      use(transfer, std::integral_constant<int, 1>{});
    }
  });
}

}  // namespace

template <class T>
void Operators<T>::append_kv(const AppendKvArgs<T>& args, Stream stream) const {
  const Batch& batch = args.batch;
  const KvView& kv = args.kv;
  const std::int64_t tokens = batch.num_tokens();
  if (tokens == 0 || kv.num_heads == 0) return;
  const DeviceScope scope(state_->device);
  with_transfer(kv, args.k, args.v, [&]<class S>(const KvTransfer<const T, S>& transfer, auto count) {
    append_kernel<decltype(count)::value, T, S>
        <<<ceil_div(tokens * transfer.planes, kWarps), kWarps * kWarp, 0, stream.handle()>>>(
            transfer, batch.query_offsets, batch.positions, batch.sequence_slots, batch.num_sequences(),
            batch.first_token(), tokens, kv.layout, kv.kvp_rank);
    HELIX_CHECK_LAUNCH();
  });
}

template <class T>
void Operators<T>::write_kv(const WriteKvArgs<T>& args, Stream stream) const {
  const KvView& kv = args.kv;
  const TokenRange span{args.first_position, args.first_position + args.k.extent(0)};
  const TokenRange owned = kv.layout.local_range(span, kv.kvp_rank);
  if (owned.size() <= 0 || kv.num_heads == 0) return;
  const DeviceScope scope(state_->device);
  with_transfer(kv, args.k, args.v, [&]<class S>(const KvTransfer<const T, S>& transfer, auto count) {
    write_kernel<decltype(count)::value, T, S>
        <<<ceil_div(owned.size() * transfer.planes, kWarps), kWarps * kWarp, 0, stream.handle()>>>(
            transfer, args.sequence_slot, args.first_position, owned, kv.layout, kv.kvp_rank);
    HELIX_CHECK_LAUNCH();
  });
}

template <class T>
void Operators<T>::read_kv(const ReadKvArgs& args, Stream stream) const {
  const KvView& kv = args.kv;
  const std::int64_t tokens = args.k.extent(0);
  if (tokens == 0 || kv.num_heads == 0) return;
  const DeviceScope scope(state_->device);
  with_transfer(kv, args.k, args.v, [&]<class S>(const KvTransfer<float, S>& transfer, auto count) {
    read_kernel<decltype(count)::value, S>
        <<<ceil_div(tokens * transfer.planes, kWarps), kWarps * kWarp, 0, stream.handle()>>>(
            transfer, args.sequence_slot, args.first_local, tokens);
    HELIX_CHECK_LAUNCH();
  });
}

#define HELIX_INSTANTIATE(T)                                                   \
  template void Operators<T>::append_kv(const AppendKvArgs<T>&, Stream) const; \
  template void Operators<T>::write_kv(const WriteKvArgs<T>&, Stream) const;   \
  template void Operators<T>::read_kv(const ReadKvArgs&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
