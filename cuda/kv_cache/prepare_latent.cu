// SPDX-License-Identifier: Apache-2.0
// cuda::Operators::prepare_latent: latent norm, rope and the append to the pages in one kernel.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <helix/cuda/backend.hpp>
#include <helix/prepare_latent.hpp>

#include "cuda/elementwise/block_sum.cuh"
#include "cuda/elementwise/rotation.cuh"
#include "cuda/kv_cache/appended_tokens.cuh"
#include "cuda/kv_cache/kv_transfer.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/rows.cuh"

namespace helix::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxPairs = 128;
constexpr int kLanePairs = 2;    // that a thread turns at a time
constexpr int kBlockHeads = 16;  // query heads per block

template <class T>
struct Queries {
  const T* in;  // [tokens, heads, 2 * pairs]
  T* out;       // the same
  std::int64_t in_token_stride;
  std::int64_t in_head_stride;
  std::int64_t out_token_stride;
  std::int64_t out_head_stride;
  int heads;
};

/// Rows of pages of type S; MixedByte for DType::fp8_ds_mla.
template <class T, class S>
using LatentTransfer =
    std::conditional_t<std::is_same_v<S, MixedByte>, MixedTransfer<const T>, KvTransfer<const T, S>>;

template <class T, class S>
struct Preparation {
  T* latents;  // [tokens, columns + 2 * pairs]
  std::int64_t latent_stride;
  int columns;
  int pairs;
  const void* norm;  // [columns]
  DType norm_dtype;
  float epsilon;
  Queries<T> queries;
  LatentTransfer<T, S> transfer;
  const float* inverse_frequency;
  float magnitude;
  AppendedTokens appended;
};

/// Rotates kLanePairs pairs from number `pair` on, from `in` to `out`. Calls stored(first of two elements,
/// the two).
template <bool kIsInterleaved, class T, class Stored>
__device__ __forceinline__ void turn_pairs(const T* in, T* out, int pair, int pairs,
                                           const Rotation* rotations, const Stored& stored) {
  const TwoPairs<kIsInterleaved> at(pair, pairs);
  float x[kLanePairs];
  float y[kLanePairs];
  load_vector(in + at.first, x);
  load_vector(in + at.second, y);
  at.turn(rotations + pair, x, y);
  store_vector(out + at.first, x);
  store_vector(out + at.second, y);
  stored(at.first, x);
  stored(at.second, y);
}

/// `x` as T holds it.
template <class T, int kCount>
__device__ __forceinline__ void round_to(float (&x)[kCount]) {
#pragma unroll
  for (float& value : x) value = to_float(from_float<T>(value));
}

/// The place of a token's latent in pages of type S. Values are of type T before they are stored.
template <class T, class S>
class LatentPlace {
 public:
  LatentPlace() = default;
  __device__ LatentPlace(const LatentTransfer<T, S>& transfer, std::int64_t token, std::int64_t slot,
                         std::int64_t local)
      : columns_(transfer.row(token, 0, slot, local)), rope_(transfer.row(token, 1, slot, local)) {}

  /// Stores this thread's columns, from `first` on, if it has any; all threads of the block.
  template <int kCount>
  __device__ __forceinline__ void store_columns(int first, bool has_columns, float (&x)[kCount]) const {
    if (has_columns) store(columns_, first, x);
  }
  /// Stores rope columns from `first` on.
  template <int kCount>
  __device__ __forceinline__ void store_rope(int first, float (&x)[kCount]) const {
    store(rope_, first, x);
  }

 private:
  using Row = typename LatentTransfer<T, S>::Row;

  template <int kCount>
  static __device__ __forceinline__ void store(const Row& row, int first, float (&x)[kCount]) {
    round_to<T>(x);
#pragma unroll
    for (float& value : x)
      if (row.scale != 1.0f) value /= row.scale;
    store_vector(row.stored + first, x);
  }

  Row columns_{};
  Row rope_{};
};

/// The same in rows of DType::fp8_ds_mla. Gives the bits of store_mixed_row().
template <class T>
class LatentPlace<T, MixedByte> {
 public:
  LatentPlace() = default;
  __device__ LatentPlace(const MixedTransfer<const T>& transfer, std::int64_t token, std::int64_t slot,
                         std::int64_t local)
      : row_(transfer.row(token, 0, slot, local)) {}

  template <int kCount>
  __device__ __forceinline__ void store_columns(int first, bool has_columns, float (&x)[kCount]) const {
    constexpr int kColumns = static_cast<int>(kScaledColumns);
    constexpr int kScaleLanes = kColumns / kCount;  // threads whose columns share a scale
    static_assert(kScaleLanes <= kWarp);
    round_to<T>(x);
    float most = largest_finite(x);
#pragma unroll
    for (int offset = 1; offset < kScaleLanes; offset *= 2)
      most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    if (!has_columns) return;
    const float scale = mixed_scale(most);
#pragma unroll
    for (float& value : x) value /= scale;
    store_vector(reinterpret_cast<fp8_e4m3*>(row_.latent) + first, x);
    if (first % kColumns == 0) row_.scales()[first / kColumns] = scale;
  }
  template <int kCount>
  __device__ __forceinline__ void store_rope(int first, float (&x)[kCount]) const {
    round_to<T>(x);
    store_vector(reinterpret_cast<bf16*>(row_.rope) + first, x);
  }

 private:
  MixedRow<const T> row_{};
};

/// Grid: x over tokens; y: first the latent, then kBlockHeads query heads per block.
template <class T, class S, bool kIsInterleaved>
__global__ void __launch_bounds__(kThreads)
    prepare_latent_kernel(const __grid_constant__ Preparation<T, S> p) {
  constexpr int kCount = kVector<T>;
  __shared__ Rotation rotations[kMaxPairs];
  const int thread = static_cast<int>(threadIdx.x);
  const bool is_latent = blockIdx.y == 0;
  const int first = thread * kCount;
  const bool has_columns = is_latent && first < p.columns;
  const float frequency = thread < p.pairs ? p.inverse_frequency[thread] : 0.0f;
  float weight[kCount] = {};
  if (has_columns) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) weight[i] = load_element(p.norm, p.norm_dtype, first + i);
  }
  wait_for_previous();
  start_next();  // not before: see AttentionParams::reads_ahead
  const std::int64_t token = blockIdx.x;
  T* const latent = p.latents + token * p.latent_stride;
  float x[kCount] = {};
  if (has_columns) load_vector(latent + first, x);
  const std::int64_t position = p.appended.positions[token];

  if (!is_latent) {
    if (thread < p.pairs) rotations[thread] = Rotation::at(position, frequency, p.magnitude);
    __syncthreads();
    const Queries<T>& q = p.queries;
    const int first_head = (static_cast<int>(blockIdx.y) - 1) * kBlockHeads;
    const int heads = min(kBlockHeads, q.heads - first_head);
    const int vectors = p.pairs / kLanePairs;
    for (int i = thread; i < heads * vectors; i += kThreads) {
      const int head = first_head + i / vectors;
      turn_pairs<kIsInterleaved>(q.in + token * q.in_token_stride + head * q.in_head_stride,
                                 q.out + token * q.out_token_stride + head * q.out_head_stride,
                                 i % vectors * kLanePairs, p.pairs, rotations, [](int, const auto&) {});
    }
    return;
  }

  // Requests the row's place before it computes sines and sums.
  const bool is_stored = p.appended.has(token, position);
  LatentPlace<T, S> place;
  if (is_stored) {
    const std::int64_t slot = p.appended.sequence_slots[p.appended.sequence(token)];
    place = LatentPlace<T, S>(p.transfer, token, slot, p.appended.layout.local(position));
  }
  if (thread < p.pairs) rotations[thread] = Rotation::at(position, frequency, p.magnitude);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) squares += x[i] * x[i];
  const float mean = block_sum(squares) / static_cast<float>(p.columns);  // also makes rotations visible
  const float scale = 1.0f / sqrtf(mean + p.epsilon);
  if (has_columns) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = x[i] * scale * weight[i];
    store_vector(latent + first, x);
  }
  if (is_stored) place.store_columns(first, has_columns, x);
  T* const turned = latent + p.columns;
  for (int pair = thread * kLanePairs; pair < p.pairs; pair += kThreads * kLanePairs)
    turn_pairs<kIsInterleaved>(turned, turned, pair, p.pairs, rotations, [&](int at, auto& elements) {
      if (is_stored) place.store_rope(at, elements);
    });
}

template <class T, class S>
LatentTransfer<T, S> latent_transfer_of(const KvView& kv, const TensorView<const T, 3>& rows) {
  if constexpr (std::is_same_v<S, MixedByte>) {
    return mixed_transfer_of(kv, rows);
  } else {
    return transfer_of<const T, S>(kv, rows, TensorView<const T, 3>{});
  }
}

/// Whether every row is aligned for the kernel's accesses, and the norm's weights suit a sum in rms_norm()'s
/// order.
template <class T>
bool is_aligned(const PrepareLatentArgs<T>& args) {
  const KvPlaces places(args.kv);
  const auto element = static_cast<std::size_t>(args.kv.format.element_bytes());
  const std::size_t rope_element = args.kv.format.is_mixed() ? sizeof(bf16) : element;
  const auto has = [](const auto& x, int count) {
    return common_alignment({address_of(x.data()), step_of<T>(x.stride(0)), step_of<T>(x.stride(1))}) >=
           count * sizeof(T);
  };
  return address_of(args.norm.data) % 16 == 0 && has(args.q_in, kLanePairs) && has(args.q_out, kLanePairs) &&
         common_alignment({address_of(args.latents.data()), step_of<T>(args.latents.stride(0))}) == 16 &&
         places.k.alignment(args.kv) >= std::min<std::size_t>(16, kVector<T> * element) &&
         places.rope.alignment(args.kv) >= kLanePairs * rope_element;
}

template <class T>
bool fits(const PrepareLatentArgs<T>& args) {
  const KvFormat& format = args.kv.format;
  const std::int64_t pairs = args.rope.rotary_dim / 2;
  return format.num_heads == 1 && pairs > 0 && pairs <= kMaxPairs && pairs % kLanePairs == 0 &&
         2 * pairs == format.rope_columns() && format.value_dim % kVector<T> == 0 &&
         format.value_dim <= std::int64_t{kThreads} * kVector<T> && is_aligned(args);
}

}  // namespace

template <class T>
void Operators<T>::prepare_latent(const PrepareLatentArgs<T>& args, Stream stream) const {
  const KvView& kv = args.kv;
  const std::int64_t tokens = args.latents.extent(0);
  if (tokens == 0 || !fits(args)) return detail::prepare_latent_in_turn(*this, args, stream);
  const DeviceScope scope(state_->device);
  const TensorView<const T, 3> rows(args.latents.data(), {tokens, 1, args.latents.extent(2)},
                                    {args.latents.stride(0), args.latents.stride(1), 1});
  dispatch_rows(kv.format.dtype, [&]<class S>(S*) {
    const Preparation<T, S> preparation{
        .latents = args.latents.data(),
        .latent_stride = args.latents.stride(0),
        .columns = static_cast<int>(kv.format.value_dim),
        .pairs = static_cast<int>(args.rope.rotary_dim / 2),
        .norm = args.norm.data,
        .norm_dtype = args.norm.dtype,
        .epsilon = args.epsilon,
        .queries = {args.q_in.data(), args.q_out.data(), args.q_in.stride(0), args.q_in.stride(1),
                    args.q_out.stride(0), args.q_out.stride(1), static_cast<int>(args.q_in.extent(1))},
        .transfer = latent_transfer_of<T, S>(kv, rows),
        .inverse_frequency = args.rope.inverse_frequency,
        .magnitude = args.rope.magnitude,
        .appended = {args.batch, kv},
    };
    const dim3 grid(static_cast<unsigned>(tokens),
                    head_blocks("prepare_latent", args.q_in.extent(1), kBlockHeads, kBlockHeads));
    launch_early(
        args.rope.is_interleaved ? prepare_latent_kernel<T, S, true> : prepare_latent_kernel<T, S, false>,
        grid, kThreads, 0, stream.handle(), state_->is_hopper, preparation);
  });
}

#define HELIX_INSTANTIATE(T) \
  template void Operators<T>::prepare_latent(const PrepareLatentArgs<T>&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
