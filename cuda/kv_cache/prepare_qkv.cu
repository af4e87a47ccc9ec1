// SPDX-License-Identifier: Apache-2.0
// cuda::Operators::prepare_qkv: norm of q and k, rope and the append to the pages in one kernel.
#include <cstdint>

#include <helix/cuda/backend.hpp>

#include "cuda/elementwise/rotation.cuh"
#include "cuda/kv_cache/appended_tokens.cuh"
#include "cuda/kv_cache/kv_transfer.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/operators_state.hpp"

namespace helix::cuda {
namespace {

constexpr int kWarps = 8;  // of a block; each takes one head
constexpr int kThreads = kWarps * kWarp;
constexpr int kMaxPairs = 128;
constexpr int kLanePairs = 2;  // that a lane rotates at a time
constexpr int kCopied = 4;     // elements of v that a lane copies at a time

/// Heads of q or of k, rotated in place.
template <class T>
struct Heads {
  T* data;  // [tokens, count, dim]
  std::int64_t token_stride;
  std::int64_t head_stride;
  int count;
  const void* norm;  // [dim] or null
  DType norm_dtype;
};

template <class T, class S>
struct Preparation {
  Heads<T> q;
  Heads<T> k;
  KvTransfer<const T, S> transfer;
  int dim;
  int pairs;
  const float* inverse_frequency;
  float magnitude;
  float epsilon;
  AppendedTokens appended;
};

/// The factor that norms a head. Called by whole warps.
template <class T>
__device__ float norm_scale(const T* head, int dim, float epsilon) {
  float squares = 0.0f;
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < dim; i += kWarp) {
    const float x = to_float(head[i]);
    squares += x * x;
  }
  return 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(dim) + epsilon);
}

/// Elements `at` and `at` + 1 of a head, normed if it has a norm, rounded to T.
template <class T>
__device__ __forceinline__ void load_normed(const Heads<T>& heads, const T* head, int at, float scale,
                                            float (&x)[kLanePairs]) {
  load_vector(head + at, x);
  if (heads.norm == nullptr) return;
#pragma unroll
  for (int i = 0; i < kLanePairs; ++i)
    x[i] = to_float(from_float<T>(x[i] * scale * load_element(heads.norm, heads.norm_dtype, at + i)));
}

/// Stores two elements in the head, and in its row of the pages if there is one.
template <class T, class S>
__device__ __forceinline__ void store_both(T* head, S* stored, float kv_scale, int at,
                                           float (&x)[kLanePairs]) {
  store_vector(head + at, x);
  if (stored == nullptr) return;
#pragma unroll
  for (int i = 0; i < kLanePairs; ++i) {
    x[i] = to_float(from_float<T>(x[i]));
    if (kv_scale != 1.0f) x[i] /= kv_scale;
  }
  store_vector(stored + at, x);
}

/// Prepares one head, by one warp. `stored`: its row of the pages, or null.
template <bool kIsInterleaved, class T, class S>
__device__ void prepare_head(const Preparation<T, S>& p, const Heads<T>& heads, T* head, S* stored,
                             float kv_scale, const Rotation* rotations) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const float scale = heads.norm != nullptr ? norm_scale(head, p.dim, p.epsilon) : 1.0f;
  __syncwarp();  // all lanes have read the head before it changes
  for (int pair = lane * kLanePairs; pair < p.pairs; pair += kWarp * kLanePairs) {
    const TwoPairs<kIsInterleaved> at(pair, p.pairs);
    float x[kLanePairs];
    float y[kLanePairs];
    load_normed(heads, head, at.first, scale, x);
    load_normed(heads, head, at.second, scale, y);
    at.turn(rotations + pair, x, y);
    store_both(head, stored, kv_scale, at.first, x);
    store_both(head, stored, kv_scale, at.second, y);
  }
  if (stored == nullptr && heads.norm == nullptr) return;
  for (int at = 2 * p.pairs + lane * kLanePairs; at < p.dim; at += kWarp * kLanePairs) {
    float x[kLanePairs];
    load_normed(heads, head, at, scale, x);
    store_both(head, stored, kv_scale, at, x);
  }
}

/// Grid: x over tokens, y over the heads of q, k and v, which share a block's rotations.
template <class T, class S, bool kIsInterleaved>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ Preparation<T, S> p) {
  __shared__ Rotation rotations[kMaxPairs];
  const int pair = static_cast<int>(threadIdx.x);
  const float frequency = pair < p.pairs ? p.inverse_frequency[pair] : 0.0f;
  wait_for_previous();
  start_next();  // not before: see AttentionParams::reads_ahead
  const std::int64_t token = blockIdx.x;
  const std::int64_t position = p.appended.positions[token];
  // Requests where a head of k or v goes before it computes sines: four loads in a row.
  const int item = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  const int plane = item - p.q.count;
  const bool is_stored = plane >= 0 && plane < p.transfer.planes && p.appended.has(token, position);
  typename KvTransfer<const T, S>::Row row{nullptr, nullptr, 0, 1.0f};
  if (is_stored) {
    const unsigned sequence = p.appended.sequence(token);
    row =
        p.transfer.row(token, plane, p.appended.sequence_slots[sequence], p.appended.layout.local(position));
  }
  if (pair < p.pairs) rotations[pair] = Rotation::at(position, frequency, p.magnitude);
  __syncthreads();

  if (plane >= p.k.count) {
    if (is_stored) store_row<kCopied>(row);
    return;
  }
  const Heads<T>& heads = plane < 0 ? p.q : p.k;
  T* head = heads.data + token * heads.token_stride + (plane < 0 ? item : plane) * heads.head_stride;
  prepare_head<kIsInterleaved>(p, heads, head, row.stored, row.scale, rotations);
}

template <class T>
Heads<T> heads_of(const TensorView<T, 3>& x, const WeightView& norm) {
  return {x.data(), x.stride(0), x.stride(1), static_cast<int>(x.extent(1)), norm.data, norm.dtype};
}

/// Whether every row is aligned for the kernel's accesses.
template <class T>
bool is_aligned(const PrepareQkvArgs<T>& args) {
  const auto has = [](const auto& x, int count) {
    return common_alignment({address_of(x.data()), step_of<T>(x.stride(0)), step_of<T>(x.stride(1))}) >=
           count * sizeof(T);
  };
  const KvPlaces places(args.kv);
  const std::size_t element = static_cast<std::size_t>(args.kv.format.element_bytes());
  return has(args.q, kLanePairs) && has(args.k, kLanePairs) && has(args.v, kCopied) &&
         places.k.alignment(args.kv) >= kLanePairs * element &&
         places.v.alignment(args.kv) >= kCopied * element;
}

template <class T>
bool fits(const PrepareQkvArgs<T>& args) {
  const KvFormat& format = args.kv.format;
  const std::int64_t pairs = args.rope.rotary_dim / 2;
  return !format.is_latent && format.num_heads == args.k.extent(1) && args.q.extent(2) == format.head_dim &&
         pairs <= kMaxPairs && pairs % kLanePairs == 0 && format.head_dim % kLanePairs == 0 &&
         format.value_dim % kCopied == 0 && is_aligned(args);
}

}  // namespace

template <class T>
void Operators<T>::prepare_qkv(const PrepareQkvArgs<T>& args, Stream stream) const {
  const Batch& batch = args.batch;
  const KvView& kv = args.kv;
  const std::int64_t tokens = args.q.extent(0);
  if (tokens == 0 || !fits(args)) {
    if (!args.q_norm.empty())
      head_rms_norm(HeadRmsNormArgs<T>{.x = args.q, .weight = args.q_norm, .epsilon = args.epsilon}, stream);
    if (!args.k_norm.empty())
      head_rms_norm(HeadRmsNormArgs<T>{.x = args.k, .weight = args.k_norm, .epsilon = args.epsilon}, stream);
    rope(RopeArgs<T>{.in = args.q, .out = args.q, .positions = batch.positions, .rope = args.rope}, stream);
    rope(RopeArgs<T>{.in = args.k, .out = args.k, .positions = batch.positions, .rope = args.rope}, stream);
    append_kv(AppendKvArgs<T>{.k = args.k, .v = args.v, .batch = batch, .kv = kv}, stream);
    return;
  }
  const DeviceScope scope(state_->device);
  dispatch(kv.format.dtype, [&]<class S>(S*) {
    const Preparation<T, S> preparation{
        .q = heads_of(args.q, args.q_norm),
        .k = heads_of(args.k, args.k_norm),
        .transfer = transfer_of<const T, S>(kv, args.k, args.v),
        .dim = static_cast<int>(kv.format.head_dim),
        .pairs = static_cast<int>(args.rope.rotary_dim / 2),
        .inverse_frequency = args.rope.inverse_frequency,
        .magnitude = args.rope.magnitude,
        .epsilon = args.epsilon,
        .appended = {batch, kv},
    };
    const dim3 grid(static_cast<unsigned>(tokens),
                    head_blocks("prepare_qkv", preparation.q.count, kWarps, preparation.transfer.planes));
    launch_early(args.rope.is_interleaved ? prepare_kernel<T, S, true> : prepare_kernel<T, S, false>, grid,
                 kThreads, 0, stream.handle(), state_->is_hopper, preparation);
  });
}

#define HELIX_INSTANTIATE(T) template void Operators<T>::prepare_qkv(const PrepareQkvArgs<T>&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
