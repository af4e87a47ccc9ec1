// SPDX-License-Identifier: Apache-2.0
// cuda::Operators: rms_norm, head_rms_norm and logit_norms.
#include <algorithm>
#include <cstdint>

#include <helix/cuda/backend.hpp>

#include "cuda/elementwise/block_sum.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/rows.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/weight_type.hpp"

namespace helix::cuda {
namespace {

template <class T, class W>
struct RmsNormRows {
  const T* delta;  // [rows, width] or null
  T* residual;     // [rows, width]
  const W* weight;
  T* out;  // [rows, width] or null; may be residual
  std::int64_t delta_stride;
  std::int64_t residual_stride;
  std::int64_t out_stride;
  std::int64_t width;
  float epsilon;
};

/// One block per row. Moves 2 to 4 rows of T; latency-bound at decode sizes. A thread reads its own elements
/// again for the second pass, from L1, so any width fits. kIsOnce: there is a thread per vector of the row,
/// so elements stay in registers.
template <class T, class W, int kCount, bool kIsOnce>
__global__ void rms_norm_kernel(RmsNormRows<T, W> rows) {
  start_next();
  const std::int64_t row = blockIdx.x;
  const std::int64_t first = static_cast<std::int64_t>(threadIdx.x) * kCount;
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kCount;
  T* residual = rows.residual + row * rows.residual_stride;
  float x[kCount];
  float weight[kCount];
  if (kIsOnce && rows.out != nullptr && first < rows.width) load_vector(rows.weight + first, weight);
  wait_for_previous();
  float squares = 0.0f;
  for (std::int64_t i = first; i < rows.width; i += step) {
    load_vector(residual + i, x);
    if (rows.delta != nullptr) {
      float delta[kCount];
      load_vector(rows.delta + row * rows.delta_stride + i, delta);
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = to_float(from_float<T>(x[j] + delta[j]));  // rounded as stored
      store_vector(residual + i, x);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) squares += x[j] * x[j];
    if (kIsOnce) break;
  }
  if (rows.out == nullptr) return;
  const float mean = block_sum(squares) / static_cast<float>(rows.width);
  const float scale = 1.0f / sqrtf(mean + rows.epsilon);
  T* out = rows.out + row * rows.out_stride;
  for (std::int64_t i = first; i < rows.width; i += step) {
    if (!kIsOnce) {
      load_vector(residual + i, x);
      load_vector(rows.weight + i, weight);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = x[j] * scale * weight[j];
    store_vector(out + i, x);
    if (kIsOnce) break;
  }
}

constexpr int kHeadRmsNormWarps = 4;

/// One warp per head, in place.
template <class T, class W, int kCount>
__global__ void __launch_bounds__(kHeadRmsNormWarps* kWarp)
    head_rms_norm_kernel(T* x, std::int64_t token_stride, std::int64_t head_stride, std::int64_t tokens,
                         std::int64_t heads, std::int64_t dim, const W* weight, float epsilon) {
  follow_previous();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kHeadRmsNormWarps + threadIdx.x / kWarp;
  if (row >= tokens * heads) return;
  T* head = x + row / heads * token_stride + row % heads * head_stride;
  const int first = static_cast<int>(threadIdx.x % kWarp) * kCount;
  float squares = 0.0f;
  for (std::int64_t i = first; i < dim; i += kWarp * kCount) {
    float values[kCount];
    load_vector(head + i, values);
#pragma unroll
    for (int j = 0; j < kCount; ++j) squares += values[j] * values[j];
  }
  const float scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(dim) + epsilon);
  for (std::int64_t i = first; i < dim; i += kWarp * kCount) {
    float values[kCount];
    float weights[kCount];
    load_vector(head + i, values);
    load_vector(weight + i, weights);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = values[j] * scale * weights[j];
    store_vector(head + i, values);
  }
}

constexpr int kLogitNormThreads = 1024;

/// One block per row.
template <class T>
__global__ void __launch_bounds__(kLogitNormThreads)
    logit_norms_kernel(TensorView<const T, 3> logits, const std::int64_t* shard_begins, float* norms) {
  follow_previous();
  float squares = 0.0f;
  for (std::int64_t shard = 0; shard < logits.extent(0); ++shard) {
    const T* row = logits.data() + shard * logits.stride(0) + blockIdx.x * logits.stride(1);
    const std::int64_t width = shard_begins[shard + 1] - shard_begins[shard];  // the rest is padding
#pragma unroll 4
    for (std::int64_t i = threadIdx.x; i < width; i += kLogitNormThreads) {
      const float x = to_float(row[i * logits.stride(2)]);
      squares += x * x;
    }
  }
  squares = block_sum(squares);
  if (threadIdx.x == 0) norms[blockIdx.x] = sqrtf(squares);
}

}  // namespace

template <class T>
void Operators<T>::rms_norm(const RmsNormArgs<T>& args, Stream stream) const {
  const std::int64_t rows = args.residual.extent(0);
  const std::int64_t width = args.residual.extent(1);
  if (rows == 0 || width == 0) return;
  const DeviceScope scope(state_->device);
  const bool is_aligned =
      common_alignment({address_of(args.delta.data()), step_of<T>(args.delta.stride(0)),
                        address_of(args.residual.data()), step_of<T>(args.residual.stride(0)),
                        address_of(args.out.data()), step_of<T>(args.out.stride(0)),
                        address_of(args.weight.data), step_of<T>(width)}) == 16;
  dispatch_weight(args.weight.dtype, [&]<class W>(W*) {
    with_vector<T>(is_aligned, [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      const auto threads =
          static_cast<unsigned>(std::min<std::int64_t>(1024, round_up(width, kCount * kWarp) / kCount));
      const RmsNormRows<T, W> params{args.delta.data(),
                                     args.residual.data(),
                                     static_cast<const W*>(args.weight.data),
                                     args.out.data(),
                                     args.delta.stride(0),
                                     args.residual.stride(0),
                                     args.out.stride(0),
                                     width,
                                     args.epsilon};
      const bool is_once = width <= std::int64_t{threads} * kCount;
      launch_early(is_once ? rms_norm_kernel<T, W, kCount, true> : rms_norm_kernel<T, W, kCount, false>,
                   static_cast<unsigned>(rows), static_cast<int>(threads), 0, stream.handle(),
                   state_->is_hopper, params);
    });
  });
}

template <class T>
void Operators<T>::head_rms_norm(const HeadRmsNormArgs<T>& args, Stream stream) const {
  const std::int64_t tokens = args.x.extent(0);
  const std::int64_t heads = args.x.extent(1);
  const std::int64_t dim = args.x.extent(2);
  if (tokens == 0 || heads == 0 || dim == 0) return;
  const DeviceScope scope(state_->device);
  const bool is_aligned =
      common_alignment({address_of(args.x.data()), step_of<T>(args.x.stride(0)), step_of<T>(args.x.stride(1)),
                        step_of<T>(dim), address_of(args.weight.data)}) == 16;
  dispatch_weight(args.weight.dtype, [&]<class W>(W*) {
    with_vector<T>(is_aligned, [&](auto count) {
      launch_early(head_rms_norm_kernel<T, W, decltype(count)::value>,
                   grid_blocks(tokens * heads, kHeadRmsNormWarps), kHeadRmsNormWarps * kWarp, 0,
                   stream.handle(), state_->is_hopper, args.x.data(), args.x.stride(0), args.x.stride(1),
                   tokens, heads, dim, static_cast<const W*>(args.weight.data), args.epsilon);
    });
  });
}

template <class T>
void Operators<T>::logit_norms(const LogitNormsArgs<T>& args, Stream stream) const {
  const std::int64_t rows = args.logits.extent(1);
  if (rows == 0) return;
  const DeviceScope scope(state_->device);
  launch_early(logit_norms_kernel<T>, static_cast<unsigned>(rows), kLogitNormThreads, 0, stream.handle(),
               state_->is_hopper, args.logits, args.shard_begins, args.norms);
}

#define HELIX_INSTANTIATE(T)                                                          \
  template void Operators<T>::rms_norm(const RmsNormArgs<T>&, Stream) const;          \
  template void Operators<T>::head_rms_norm(const HeadRmsNormArgs<T>&, Stream) const; \
  template void Operators<T>::logit_norms(const LogitNormsArgs<T>&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
