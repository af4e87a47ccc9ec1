// SPDX-License-Identifier: Apache-2.0
// cuda::Operators: moves tokens into the KV pages and back.
#include <cstdint>

#include <helix/cuda/backend.hpp>

#include "cuda/kv_cache/appended_tokens.cuh"
#include "cuda/kv_cache/kv_transfer.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {
namespace {

constexpr int kWarps = 4;  // warps per block

/// The work of one warp: one plane of the `row`-th token of a launch.
struct WarpPlane {
  std::int64_t row;
  int plane;
};

__device__ __forceinline__ WarpPlane warp_plane(int planes) {
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  return {warp / planes, static_cast<int>(warp % planes)};
}

/// One warp per plane of a token of the batch.
template <int kCount, class Transfer>
__global__ void __launch_bounds__(kWarps* kWarp)
    append_kernel(const __grid_constant__ Transfer transfer,
                  const __grid_constant__ AppendedTokens appended) {
  wait_for_previous();
  start_next();  // not before: see AttentionParams::reads_ahead
  const WarpPlane at = warp_plane(transfer.planes);
  if (at.row >= appended.tokens.size()) return;
  const std::int64_t token = appended.tokens.begin + at.row;
  const std::int64_t position = appended.positions[token];
  if (!appended.owns(position)) return;
  const unsigned sequence = appended.sequence(token);
  store_row<kCount>(
      transfer.row(token, at.plane, appended.sequence_slots[sequence], appended.layout.local(position)));
}

/// One warp per plane of one of the `owned` local tokens. Row 0 of the values is at global position
/// first_position.
template <int kCount, class Transfer>
__global__ void __launch_bounds__(kWarps* kWarp)
    write_kernel(const __grid_constant__ Transfer transfer, std::int64_t slot, std::int64_t first_position,
                 TokenRange owned, KvLayout layout, std::int64_t kvp_rank) {
  const WarpPlane at = warp_plane(transfer.planes);
  const std::int64_t local = owned.begin + at.row;
  if (local >= owned.end) return;
  store_row<kCount>(transfer.row(layout.global(kvp_rank, local) - first_position, at.plane, slot, local));
}

/// One warp per plane of one of `local_tokens` local tokens. Reads no values: `transfer` has none.
template <class S>
__global__ void __launch_bounds__(kWarps* kWarp)
    fill_kernel(const __grid_constant__ KvTransfer<const float, S> transfer, std::int64_t slot,
                std::int64_t local_tokens, std::int64_t layer, std::int64_t first_head, KvLayout layout,
                std::int64_t kvp_rank, bool is_latent) {
  const WarpPlane at = warp_plane(transfer.planes);
  if (at.row >= local_tokens) return;
  const auto row = transfer.row(0, at.plane, slot, at.row);
  const bool is_second = at.plane >= transfer.heads;
  const std::uint32_t key = synthetic_row_key(layer, first_head + at.plane % transfer.heads,
                                              layout.global(kvp_rank, at.row), is_second && !is_latent);
  // The rope columns of a latent row follow the columns that serve as values too.
  const auto first = static_cast<std::uint32_t>(is_second && is_latent ? transfer.first.count : 0);
  for (auto i = static_cast<std::uint32_t>(threadIdx.x % kWarp); i < row.count; i += kWarp) {
    const float x = synthetic_element(key, first + i);
    row.stored[i] = from_float<S>(row.scale == 1.0f ? x : x / row.scale);
  }
}

/// One warp per token of `local_tokens` local tokens, which are rows of DType::fp8_ds_mla.
__global__ void __launch_bounds__(kWarps* kWarp)
    fill_mixed_kernel(const __grid_constant__ MixedTransfer<const float> transfer, std::int64_t slot,
                      std::int64_t local_tokens, std::int64_t layer, std::int64_t head, KvLayout layout,
                      std::int64_t kvp_rank) {
  const WarpPlane at = warp_plane(transfer.planes);
  if (at.row >= local_tokens) return;
  const std::uint32_t key = synthetic_row_key(layer, head, layout.global(kvp_rank, at.row), false);
  store_mixed_row(transfer.row(0, 0, slot, at.row),
                  [&](int i) { return synthetic_element(key, static_cast<std::uint32_t>(i)); });
}

/// One warp per plane of a token: value = stored * scale.
template <int kCount, class Transfer>
__global__ void __launch_bounds__(kWarps* kWarp)
    read_kernel(const __grid_constant__ Transfer transfer, std::int64_t slot, std::int64_t first_local,
                std::int64_t tokens) {
  const WarpPlane at = warp_plane(transfer.planes);
  if (at.row >= tokens) return;
  load_row<kCount>(transfer.row(at.row, at.plane, slot, first_local + at.row));
}

/// As read_kernel, for the sequence whose slot is in device memory.
template <int kCount, class Transfer>
__global__ void __launch_bounds__(kWarps* kWarp)
    read_latents_kernel(const __grid_constant__ Transfer transfer, const std::int32_t* slot,
                        std::int64_t first_local, std::int64_t tokens) {
  const WarpPlane at = warp_plane(transfer.planes);
  if (at.row >= tokens) return;
  load_row<kCount>(transfer.row(at.row, at.plane, *slot, first_local + at.row));
}

}  // namespace

template <class T>
void Operators<T>::append_kv(const AppendKvArgs<T>& args, Stream stream) const {
  detail::check_append_kv(args);
  const Batch& batch = args.batch;
  const KvView& kv = args.kv;
  const std::int64_t tokens = batch.num_tokens();
  if (tokens == 0) return;
  const DeviceScope scope(state_->device);
  with_transfer(kv, args.k, args.v, [&]<class Transfer>(const Transfer& transfer, auto count) {
    launch_early(append_kernel<decltype(count)::value, Transfer>,
                 grid_blocks(tokens * transfer.planes, kWarps), kWarps * kWarp, 0, stream.handle(),
                 state_->is_hopper, transfer, AppendedTokens(batch, kv));
  });
}

template <class T>
void Operators<T>::write_kv(const WriteKvArgs<T>& args, Stream stream) const {
  detail::check_write_kv(args);
  const KvView& kv = args.kv;
  const TokenRange span{args.first_position, args.first_position + args.k.extent(0)};
  const TokenRange owned = kv.layout.local_range(span, kv.kvp_rank);
  if (owned.size() <= 0) return;
  const DeviceScope scope(state_->device);
  with_transfer(kv, args.k, args.v, [&]<class Transfer>(const Transfer& transfer, auto count) {
    write_kernel<decltype(count)::value, Transfer>
        <<<grid_blocks(owned.size() * transfer.planes, kWarps), kWarps * kWarp, 0, stream.handle()>>>(
            transfer, args.sequence_slot, args.first_position, owned, kv.layout, kv.kvp_rank);
    HELIX_CHECK_LAUNCH();
  });
}

template <class T>
void Operators<T>::read_kv(const ReadKvArgs& args, Stream stream) const {
  detail::check_read_kv(args);
  const KvView& kv = args.kv;
  const std::int64_t tokens = args.k.extent(0);
  if (tokens == 0) return;
  const DeviceScope scope(state_->device);
  with_transfer(kv, args.k, args.v, [&]<class Transfer>(const Transfer& transfer, auto count) {
    read_kernel<decltype(count)::value, Transfer>
        <<<grid_blocks(tokens * transfer.planes, kWarps), kWarps * kWarp, 0, stream.handle()>>>(
            transfer, args.sequence_slot, args.first_local, tokens);
    HELIX_CHECK_LAUNCH();
  });
}

template <class T>
void Operators<T>::read_latents(const ReadLatentsArgs<T>& args, Stream stream) const {
  detail::check_read_latents(args);
  const KvView& kv = args.kv;
  const std::int64_t tokens = args.rows.extent(0);
  if (tokens == 0) return;
  const DeviceScope scope(state_->device);
  const TensorView<T, 3> k(args.rows.data(), {tokens, 1, args.rows.extent(1)}, {args.rows.stride(0), 0, 1});
  with_transfer(kv, k, TensorView<T, 3>{}, [&]<class Transfer>(const Transfer& transfer, auto count) {
    read_latents_kernel<decltype(count)::value, Transfer>
        <<<grid_blocks(tokens * transfer.planes, kWarps), kWarps * kWarp, 0, stream.handle()>>>(
            transfer, args.sequence_slot, args.first_local, tokens);
    HELIX_CHECK_LAUNCH();
  });
}

template <class T>
void Operators<T>::fill_synthetic_kv(const SyntheticKvArgs& args, Stream stream) const {
  const KvView& kv = args.kv;
  check_kv_view("fill_synthetic_kv", kv);
  HELIX_EXPECTS(args.tokens >= 0 && args.tokens <= kMaxTokens, ErrorCode::invalid_argument,
                "fill_synthetic_kv: tokens is ", args.tokens, "; it must be 0 to ", kMaxTokens);
  detail::check_slot("fill_synthetic_kv", kv, args.sequence_slot);
  const std::int64_t tokens = kv.layout.length(args.tokens, kv.kvp_rank);
  detail::check_local_end("fill_synthetic_kv", kv, tokens);
  if (tokens == 0) return;
  const DeviceScope scope(state_->device);
  if (kv.format.is_mixed()) {
    fill_mixed_kernel<<<grid_blocks(tokens, kWarps), kWarps * kWarp, 0, stream.handle()>>>(
        mixed_transfer_of(kv, TensorView<const float, 3>{}), args.sequence_slot, tokens, args.layer,
        args.first_head, kv.layout, kv.kvp_rank);
    HELIX_CHECK_LAUNCH();
    return;
  }
  dispatch(kv.format.dtype, [&]<class S>(S*) {
    const auto transfer =
        transfer_of<const float, S>(kv, TensorView<const float, 3>{}, TensorView<const float, 3>{});
    fill_kernel<S><<<grid_blocks(tokens * transfer.planes, kWarps), kWarps * kWarp, 0, stream.handle()>>>(
        transfer, args.sequence_slot, tokens, args.layer, args.first_head, kv.layout, kv.kvp_rank,
        kv.format.is_latent);
    HELIX_CHECK_LAUNCH();
  });
}

#define HELIX_INSTANTIATE(T)                                                           \
  template void Operators<T>::fill_synthetic_kv(const SyntheticKvArgs&, Stream) const; \
  template void Operators<T>::append_kv(const AppendKvArgs<T>&, Stream) const;         \
  template void Operators<T>::write_kv(const WriteKvArgs<T>&, Stream) const;           \
  template void Operators<T>::read_kv(const ReadKvArgs&, Stream) const;                \
  template void Operators<T>::read_latents(const ReadLatentsArgs<T>&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
