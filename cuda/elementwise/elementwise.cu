// SPDX-License-Identifier: Apache-2.0
// cuda::Operators: rope, swiglu, embed, gather_rows and advance.
#include <cstdint>

#include <helix/cuda/backend.hpp>

#include "cuda/elementwise/rotation.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/rows.cuh"
#include "cuda/runtime/weight_type.hpp"

namespace helix::cuda {
namespace {

constexpr int kThreads = 256;

/// The first element of thread (x of the block, x of the grid), for vectors of kCount.
template <int kCount>
__device__ __forceinline__ std::int64_t first_element() {
  return (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
}

constexpr int kRopePairs = 256;  // pairs whose cosines and sines a block holds at once
constexpr int kRopeHeads = 16;   // heads per block
constexpr int kRopeVector = 4;   // pairs per thread at once

template <class T>
struct RopeHeads {
  const T* in;  // [tokens, heads, dim]
  T* out;       // the same
  std::int64_t in_token_stride;
  std::int64_t in_head_stride;
  std::int64_t out_token_stride;
  std::int64_t out_head_stride;
  int heads;
  int dim;
  const std::int64_t* positions;
  const float* inverse_frequency;
  int pairs;
  float magnitude;
};

/// One block per token and kRopeHeads heads, which share each pair's rotation. A thread reads both halves of
/// its kCount pairs before it writes them, so in and out may be the same.
template <class T, int kCount, bool kIsInterleaved>
__global__ void __launch_bounds__(kThreads) rope_kernel(RopeHeads<T> rope) {
  __shared__ Rotation rotations[kRopePairs];
  follow_previous();
  const std::int64_t token = blockIdx.x;
  const std::int64_t first_head = static_cast<std::int64_t>(blockIdx.y) * kRopeHeads;
  const int heads = min(kRopeHeads, rope.heads - static_cast<int>(first_head));
  const T* in = rope.in + token * rope.in_token_stride + first_head * rope.in_head_stride;
  T* out = rope.out + token * rope.out_token_stride + first_head * rope.out_head_stride;
  const std::int64_t position = rope.pairs > 0 ? rope.positions[token] : -1;

  for (int tile = 0; tile < rope.pairs; tile += kRopePairs) {
    const int tile_pairs = min(kRopePairs, rope.pairs - tile);
    if (tile > 0) __syncthreads();  // the previous tile has been read
    for (int i = threadIdx.x; i < tile_pairs; i += kThreads)
      rotations[i] = Rotation::at(position, rope.inverse_frequency[tile + i], rope.magnitude);
    __syncthreads();
    const int vectors = tile_pairs / kCount;
    for (int i = threadIdx.x; i < heads * vectors; i += kThreads) {
      const int head = i / vectors;
      const int pair = i % vectors * kCount;  // pair within the tile
      const std::int64_t first = kIsInterleaved ? 2 * (tile + pair) : tile + pair;
      const std::int64_t second = kIsInterleaved ? first + kCount : first + rope.pairs;
      float x[kCount];
      float y[kCount];
      load_vector(in + head * rope.in_head_stride + first, x);
      load_vector(in + head * rope.in_head_stride + second, y);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if constexpr (kIsInterleaved) {  // x, then y, are the elements in a row: (a0 b0 a1 b1) (a2 b2 a3 b3)
          float& a = 2 * j < kCount ? x[2 * j % kCount] : y[2 * j % kCount];
          float& b = 2 * j + 1 < kCount ? x[(2 * j + 1) % kCount] : y[(2 * j + 1) % kCount];
          rotations[pair + j].turn(a, b);
        } else {
          rotations[pair + j].turn(x[j], y[j]);
        }
      }
      store_vector(out + head * rope.out_head_stride + first, x);
      store_vector(out + head * rope.out_head_stride + second, y);
    }
  }

  const int rest = rope.dim - 2 * rope.pairs;
  if (rope.in == rope.out || rest == 0) return;
  for (int i = threadIdx.x; i < heads * rest; i += kThreads) {
    const int head = i / rest;
    const int element = 2 * rope.pairs + i % rest;
    out[head * rope.out_head_stride + element] = in[head * rope.in_head_stride + element];
  }
}

/// out = silu(gate) * up. Grid: x over the row, y over rows. Moves 3 rows of T.
template <class T, int kCount>
__global__ void __launch_bounds__(kThreads)
    swiglu_kernel(const T* gate_up, std::int64_t in_stride, T* out, std::int64_t out_stride,
                  std::int64_t rows, std::int64_t width) {
  follow_previous();
  const std::int64_t i = first_element<kCount>();
  if (i >= width) return;
  for (std::int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    float gate[kCount];
    float up[kCount];
    load_vector(gate_up + row * in_stride + i, gate);
    load_vector(gate_up + row * in_stride + width + i, up);
#pragma unroll
    for (int j = 0; j < kCount; ++j) up[j] = swiglu(gate[j], up[j]);
    store_vector(out + row * out_stride + i, up);
  }
}

/// Grid: x over the row, y over tokens.
template <class T, class W, int kCount>
__global__ void __launch_bounds__(kThreads)
    embed_kernel(const std::int32_t* ids, const W* table, std::int64_t table_rows, std::int64_t first_id,
                 T* out, std::int64_t out_stride, std::int64_t tokens, std::int64_t width) {
  follow_previous();
  const std::int64_t i = first_element<kCount>();
  if (i >= width) return;
  for (std::int64_t token = blockIdx.y; token < tokens; token += gridDim.y) {
    const std::int64_t row = ids[token] - first_id;
    float x[kCount] = {};
    if (row >= 0 && row < table_rows) load_vector(table + row * width + i, x);
    store_vector(out + token * out_stride + i, x);
  }
}

/// Grid: x over the row, y over rows of out.
template <class T, int kCount>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const T* in, std::int64_t in_stride, const std::int32_t* rows, T* out,
                       std::int64_t out_stride, std::int64_t num_rows, std::int64_t width) {
  follow_previous();
  const std::int64_t i = first_element<kCount>();
  if (i >= width) return;
  for (std::int64_t row = blockIdx.y; row < num_rows; row += gridDim.y) {
    using Row = Vector<T, kCount>;
    *reinterpret_cast<Row*>(out + row * out_stride + i) =
        *reinterpret_cast<const Row*>(in + rows[row] * in_stride + i);
  }
}

__global__ void __launch_bounds__(kThreads) advance_kernel(std::int64_t* values, std::int64_t count) {
  follow_previous();
  const std::int64_t i = first_element<1>();
  if (i < count && values[i] >= 0) ++values[i];
}

}  // namespace

template <class T>
void Operators<T>::rope(const RopeArgs<T>& args, Stream stream) const {
  const std::int64_t tokens = args.in.extent(0);
  const RopeHeads<T> heads{args.in.data(),
                           args.out.data(),
                           args.in.stride(0),
                           args.in.stride(1),
                           args.out.stride(0),
                           args.out.stride(1),
                           static_cast<int>(args.in.extent(1)),
                           static_cast<int>(args.in.extent(2)),
                           args.positions,
                           args.rope.inverse_frequency,
                           static_cast<int>(args.rope.rotary_dim / 2),
                           args.rope.magnitude};
  if (tokens == 0 || heads.heads == 0 || heads.dim == 0) return;
  const DeviceScope scope(state_->device);
  const bool is_aligned =
      heads.pairs % kRopeVector == 0 &&
      common_alignment({address_of(heads.in), address_of(heads.out), step_of<T>(heads.in_token_stride),
                        step_of<T>(heads.in_head_stride), step_of<T>(heads.out_token_stride),
                        step_of<T>(heads.out_head_stride)}) >= kRopeVector * sizeof(T);
  const dim3 grid(static_cast<unsigned>(tokens), head_blocks("rope", heads.heads, kRopeHeads));
  const auto launch = [&](auto kernel) {
    launch_early(kernel, grid, kThreads, 0, stream.handle(), state_->is_hopper, heads);
  };
  if (args.rope.is_interleaved) {
    launch(is_aligned ? rope_kernel<T, kRopeVector, true> : rope_kernel<T, 1, true>);
  } else {
    launch(is_aligned ? rope_kernel<T, kRopeVector, false> : rope_kernel<T, 1, false>);
  }
}

template <class T>
void Operators<T>::swiglu(const SwigluArgs<T>& args, Stream stream) const {
  const std::int64_t rows = args.out.extent(0);
  const std::int64_t width = args.out.extent(1);
  if (rows == 0 || width == 0) return;
  const DeviceScope scope(state_->device);
  const bool is_aligned = common_alignment({address_of(args.gate_up.data()),
                                            step_of<T>(args.gate_up.stride(0)), address_of(args.out.data()),
                                            step_of<T>(args.out.stride(0)), step_of<T>(width)}) == 16;
  with_vector<T>(is_aligned, [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    const dim3 grid(grid_blocks(width, kThreads * kCount), row_blocks(rows));
    launch_early(swiglu_kernel<T, kCount>, grid, kThreads, 0, stream.handle(), state_->is_hopper,
                 args.gate_up.data(), args.gate_up.stride(0), args.out.data(), args.out.stride(0), rows,
                 width);
  });
}

template <class T>
void Operators<T>::embed(const EmbedArgs<T>& args, Stream stream) const {
  const std::int64_t tokens = args.out.extent(0);
  const std::int64_t width = args.out.extent(1);
  if (tokens == 0 || width == 0) return;
  const DeviceScope scope(state_->device);
  const bool is_aligned = common_alignment({address_of(args.table.data), address_of(args.out.data()),
                                            step_of<T>(args.out.stride(0)), step_of<T>(width)}) == 16;
  dispatch_weight(args.table.dtype, [&]<class W>(W*) {
    with_vector<T>(is_aligned, [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      const dim3 grid(grid_blocks(width, kThreads * kCount), row_blocks(tokens));
      launch_early(embed_kernel<T, W, kCount>, grid, kThreads, 0, stream.handle(), state_->is_hopper,
                   args.ids, static_cast<const W*>(args.table.data), args.table.rows, args.first_id,
                   args.out.data(), args.out.stride(0), tokens, width);
    });
  });
}

template <class T>
void Operators<T>::gather_rows(const GatherRowsArgs<T>& args, Stream stream) const {
  const std::int64_t rows = args.out.extent(0);
  const std::int64_t width = args.out.extent(1);
  if (rows == 0 || width == 0) return;
  const DeviceScope scope(state_->device);
  const bool is_aligned = common_alignment({address_of(args.in.data()), step_of<T>(args.in.stride(0)),
                                            address_of(args.out.data()), step_of<T>(args.out.stride(0)),
                                            step_of<T>(width)}) == 16;
  with_vector<T>(is_aligned, [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    const dim3 grid(grid_blocks(width, kThreads * kCount), row_blocks(rows));
    launch_early(gather_rows_kernel<T, kCount>, grid, kThreads, 0, stream.handle(), state_->is_hopper,
                 args.in.data(), args.in.stride(0), args.rows, args.out.data(), args.out.stride(0), rows,
                 width);
  });
}

template <class T>
void Operators<T>::advance(const AdvanceArgs& args, Stream stream) const {
  if (args.count == 0) return;
  const DeviceScope scope(state_->device);
  launch_early(advance_kernel, grid_blocks(args.count, kThreads), kThreads, 0, stream.handle(),
               state_->is_hopper, args.values, args.count);
}

#define HELIX_INSTANTIATE(T)                                                       \
  template void Operators<T>::rope(const RopeArgs<T>&, Stream) const;              \
  template void Operators<T>::swiglu(const SwigluArgs<T>&, Stream) const;          \
  template void Operators<T>::embed(const EmbedArgs<T>&, Stream) const;            \
  template void Operators<T>::gather_rows(const GatherRowsArgs<T>&, Stream) const; \
  template void Operators<T>::advance(const AdvanceArgs&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
