// SPDX-License-Identifier: Apache-2.0
// Operators::linear, router_logits and head_linear. If activations and weights share a 16-bit type, Hopper
// uses the kernel of few rows where it fits (few_rows.cu), else the library (4096 x 16384 weights at 92 to 95
// % of the read ceiling from 1 to 16 rows on an H200, where the thin kernel here reached 68 %). The thin
// tensor-core kernel takes layouts that the library does not. For all other types, and where rows or weights
// are not aligned, kernels stream the weights once for a few rows, and a tiled kernel takes more rows.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>

#include "cuda/linear/dot_rows.cuh"
#include "cuda/linear/few_rows.hpp"
#include "cuda/linear/matmul.hpp"
#include "cuda/linear/product.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/rows.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/weight_type.hpp"

namespace helix::cuda {
namespace {

/// Prefetches into L2 the first `span` columns of part `split` of a weight row, one line per lane. Called
/// before a kernel waits for its input.
template <class W>
__device__ __forceinline__ void prefetch_span(const W* row, int cols, int span, int split, int lane) {
  constexpr int kLine = 128 / static_cast<int>(sizeof(W));
  const int column = split * span + lane * kLine;
  if (lane * kLine < span && column < cols) prefetch_line(row + column);
}

/// Exact f32 products of p.rows <= kRows rows. Grid (groups of weight rows, heads). A group is kDotOutputs
/// weight rows, whose columns p.splits warps of a block share. Reads each weight once, bypassing L1, and the
/// activations through L1.
template <class T, class W, int kRows, bool kVector>
__global__ void __launch_bounds__(kDotThreads) dot_kernel(const Product<T> p) {
  constexpr int kWidth = kVector ? 16 / static_cast<int>(sizeof(W)) : 1;
  constexpr int kSums = kRows * kDotOutputs;
  __shared__ float partial[kDotWarps][kSums];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int groups = kDotWarps / p.splits;  // groups of this block
  const int first_group = static_cast<int>(blockIdx.x) * groups;
  const int first = (first_group + warp / p.splits) * kDotOutputs;
  const int head = static_cast<int>(blockIdx.y);

  // Past the end, read the last row again; its sums are not stored.
  const W* weights[kDotOutputs];
  const T* rows[kRows];
#pragma unroll
  for (int o = 0; o < kDotOutputs; ++o) {
    const std::int64_t row = std::int64_t{head} * p.width + min(first + o, p.width - 1);
    weights[o] = static_cast<const W*>(p.weight) + row * p.cols;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = p.in + min(r, p.rows - 1) * p.in_row + head * p.in_head;
  start_next();
#pragma unroll
  for (int o = 0; o < kDotOutputs; ++o)
    prefetch_span(weights[o], p.cols, kWarp * kWidth, warp % p.splits, static_cast<int>(threadIdx.x) % kWarp);
  wait_for_previous();
  dot_rows<kWidth>(weights, rows, p.cols, warp % p.splits, p.splits, partial[warp]);

  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < groups * kSums; i += kDotThreads) {
    const int group = i / kSums;
    const int index = i % kSums;
    float sum = 0.0f;
    for (int split = 0; split < p.splits; ++split) sum += partial[group * p.splits + split][index];
    store(p, index / kDotOutputs, head, (first_group + group) * kDotOutputs + index % kDotOutputs, sum);
  }
}

/// Loads 16 bytes, or zeros if not `is_inside`, in one instruction; a condition in C++ may become a branch.
/// `kIsWeight`: bypasses L1, see load_weight().
template <bool kIsWeight>
__device__ __forceinline__ uint4 load_inside(const void* data, bool is_inside) {
  uint4 bits = make_uint4(0, 0, 0, 0);
  if constexpr (kIsWeight) {
    asm("{\n .reg .pred inside;\n setp.ne.b32 inside, %5, 0;\n"
        " @inside ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w)
        : "l"(data), "r"(static_cast<int>(is_inside)));
  } else {
    asm("{\n .reg .pred inside;\n setp.ne.b32 inside, %5, 0;\n"
        " @inside ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w)
        : "l"(data), "r"(static_cast<int>(is_inside)));
  }
  return bits;
}

constexpr int kTileRows = 16;     // activation rows of an instruction
constexpr int kTileWidth = 8;     // weight rows of an instruction
constexpr int kChunk = 32;        // columns of a row that a warp reads at once, 16 bytes per lane
constexpr int kChunksInSpan = 4;  // chunks in flight
constexpr int kTileSpan = kChunk * kChunksInSpan;

/// Tensor-core products of up to 16 rows (8 unless kWide) with kTiles * 8 weight rows per warp. Grid
/// (groups of weight rows, heads, row tiles). A lane reads 16 bytes of a row at columns 8 * (lane % 4). That
/// is not the column order of the instruction, but it is the same for both operands, so the sum is the same.
template <class T, int kTiles, bool kWide>
__global__ void __launch_bounds__(kDotThreads) thin_tile_kernel(const Product<T> p) {
  constexpr int kRows = kWide ? kTileRows : kTileRows / 2;
  constexpr int kGroupWidth = kTiles * kTileWidth;
  __shared__ float partial[kDotWarps][kRows][kGroupWidth];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int lane_row = lane / 4;
  const int lane_col = lane % 4;
  const int groups = kDotWarps / p.splits;
  const int first_group = static_cast<int>(blockIdx.x) * groups;
  const int first = (first_group + warp / p.splits) * kGroupWidth;
  const int head = static_cast<int>(blockIdx.y);
  const int first_row = static_cast<int>(blockIdx.z) * kRows;

  // Past the end, read the last row again; its sums are not stored.
  const T* weights[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int n = min(first + tile * kTileWidth + lane_row, p.width - 1);
    weights[tile] = static_cast<const T*>(p.weight) + (std::int64_t{head} * p.width + n) * p.cols;
  }
  const T* in = p.in + head * p.in_head;
  const T* low = in + min(first_row + lane_row, p.rows - 1) * p.in_row;
  const T* high = in + min(first_row + lane_row + 8, p.rows - 1) * p.in_row;

  start_next();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
    prefetch_span(weights[tile], p.cols, kTileSpan, warp % p.splits, lane_col);
  wait_for_previous();
  float sums[kTiles][4] = {};
  for (std::int64_t begin = warp % p.splits * kTileSpan; begin < p.cols; begin += p.splits * kTileSpan) {
    uint4 b[kChunksInSpan][kTiles];
    uint4 a_low[kChunksInSpan];
    uint4 a_high[kChunksInSpan];
#pragma unroll
    for (int chunk = 0; chunk < kChunksInSpan; ++chunk) {
      const std::int64_t k = begin + chunk * kChunk + lane_col * 8;
      const bool is_inside = k < p.cols;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        b[chunk][tile] = load_inside<true>(weights[tile] + k, is_inside);
      a_low[chunk] = load_inside<false>(low + k, is_inside);
      a_high[chunk] = kWide ? load_inside<false>(high + k, is_inside) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunksInSpan; ++chunk) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4& bits = b[chunk][tile];
        multiply<T>(sums[tile], a_low[chunk].x, a_high[chunk].x, a_low[chunk].y, a_high[chunk].y, bits.x,
                    bits.y);
        multiply<T>(sums[tile], a_low[chunk].z, a_high[chunk].z, a_low[chunk].w, a_high[chunk].w, bits.z,
                    bits.w);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < (kWide ? 4 : 2); ++i)
      partial[warp][lane_row + i / 2 * 8][tile * kTileWidth + lane_col * 2 + i % 2] = sums[tile][i];
  }

  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < groups * kRows * kGroupWidth; i += kDotThreads) {
    const int group = i / (kRows * kGroupWidth);
    const int row = i / kGroupWidth % kRows;
    const int n = i % kGroupWidth;
    float sum = 0.0f;
    for (int split = 0; split < p.splits; ++split) sum += partial[group * p.splits + split][row][n];
    store(p, first_row + row, head, (first_group + group) * kGroupWidth + n, sum);
  }
}

constexpr int kBlockTile = 64;  // rows, and weight rows, per block
constexpr int kBlockCols = 16;  // columns in shared memory at a time
constexpr int kThreadTile = 4;  // rows, and weight rows, per thread
constexpr int kTiledThreads = (kBlockTile / kThreadTile) * (kBlockTile / kThreadTile);

/// Exact f32 products for any number of rows, types and strides. Grid (64 weight rows, 64 rows, heads); each
/// thread computes 4 x 4 sums; 8.5 KiB of shared memory.
template <class T, class W>
__global__ void __launch_bounds__(kTiledThreads) tiled_kernel(const Product<T> p) {
  constexpr int kStride = kBlockTile + 4;  // keeps float4 reads aligned and spreads the transposed writes
  __shared__ __align__(16) float in_tile[kBlockCols][kStride];
  __shared__ __align__(16) float weight_tile[kBlockCols][kStride];
  const int thread = static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(blockIdx.x) * kBlockTile;
  const int first_row = static_cast<int>(blockIdx.y) * kBlockTile;
  const int head = static_cast<int>(blockIdx.z);
  const T* in = p.in + head * p.in_head;
  const W* weight = static_cast<const W*>(p.weight) + std::int64_t{head} * p.width * p.cols;
  const int thread_n = thread % (kBlockTile / kThreadTile) * kThreadTile;
  const int thread_row = thread / (kBlockTile / kThreadTile) * kThreadTile;

  float sums[kThreadTile][kThreadTile] = {};
  for (int begin = 0; begin < p.cols; begin += kBlockCols) {
#pragma unroll
    for (int i = thread; i < kBlockTile * kBlockCols; i += kTiledThreads) {
      const int row = i / kBlockCols;
      const int col = i % kBlockCols;
      const int k = begin + col;
      const bool has_row = first_row + row < p.rows && k < p.cols;
      const bool has_weight = first + row < p.width && k < p.cols;
      in_tile[col][row] = has_row ? to_float(in[(first_row + row) * p.in_row + k]) : 0.0f;
      weight_tile[col][row] = has_weight ? to_float(weight[std::int64_t{first + row} * p.cols + k]) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int col = 0; col < kBlockCols; ++col) {
      const float4 a = *reinterpret_cast<const float4*>(&in_tile[col][thread_row]);
      const float4 b = *reinterpret_cast<const float4*>(&weight_tile[col][thread_n]);
      const float rows[kThreadTile] = {a.x, a.y, a.z, a.w};
      const float weights[kThreadTile] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int r = 0; r < kThreadTile; ++r)
#pragma unroll
        for (int n = 0; n < kThreadTile; ++n) sums[r][n] = fmaf(rows[r], weights[n], sums[r][n]);
    }
    __syncthreads();  // before the tiles are overwritten
  }
#pragma unroll
  for (int r = 0; r < kThreadTile; ++r)
#pragma unroll
    for (int n = 0; n < kThreadTile; ++n)
      store(p, first_row + thread_row + r, head, first + thread_n + n, sums[r][n]);
}

/// out[r, n] += bias[n], after the library's product.
template <class T>
__global__ void add_bias_kernel(const Product<T> p) {
  const int n = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  if (n >= p.width) return;
  T& out = static_cast<T*>(p.out)[row * p.out_row + n];
  out = from_float<T>(to_float(out) + load_element(p.bias, p.bias_dtype, n));
}

/// Whether activation rows may be read 16 bytes at a time.
template <class T>
bool has_aligned_rows(const Product<T>& p) {
  constexpr std::int64_t kElements = 16 / static_cast<std::int64_t>(sizeof(T));
  return is_aligned_16(p.in) && (p.rows == 1 || p.in_row % kElements == 0) &&
         (p.heads == 1 || p.in_head % kElements == 0);
}

/// The properties of a rank that launches need.
struct Machine {
  MatmulLibrary& library;
  int num_sms;
  bool is_hopper;
};

template <class State>
Machine machine_of(const State& state) {
  return {*state.matmul, state.num_sms, state.is_hopper};
}

template <class T, class W, int kRows>
void launch_dots(Product<T> p, const Machine& machine, cudaStream_t stream) {
  constexpr int kWidth = 16 / static_cast<int>(sizeof(W));
  const bool is_vector = p.cols % kWidth == 0 && is_aligned_16(p.weight) && has_aligned_rows(p);
  const std::int64_t groups = ceil_div(p.width, kDotOutputs);
  p.splits = choose_splits(groups * p.heads, p.cols, kWarp * (is_vector ? kWidth : 1), machine.num_sms);
  const dim3 grid(grid_blocks(groups, kDotWarps / p.splits), static_cast<unsigned>(p.heads));
  const auto kernel = is_vector ? dot_kernel<T, W, kRows, true> : dot_kernel<T, W, kRows, false>;
  launch_early(kernel, grid, kDotThreads, 0, stream, machine.is_hopper, p);
}

/// Calls launch(Product) for as many rows at a time as a grid of blocks of `block_rows` rows can cover.
template <class T, class Launch>
void in_launches(const Product<T>& p, int block_rows, const Launch& launch) {
  Product<T> part = p;
  for (std::int64_t begin = 0; begin < p.rows; begin += part.rows) {
    part.in = p.in + begin * p.in_row;
    part.out =
        static_cast<std::byte*>(p.out) + begin * p.out_row * (p.is_out_f32 ? sizeof(float) : sizeof(T));
    part.rows = static_cast<int>(std::min(p.rows - begin, kMaxGridRows * block_rows));
    launch(part);
    HELIX_CHECK_LAUNCH();
  }
}

template <class T, class W>
void launch_f32(const Product<T>& p, const Machine& machine, cudaStream_t stream) {
  if (p.rows == 1) return launch_dots<T, W, 1>(p, machine, stream);
  if (p.rows == 2) return launch_dots<T, W, 2>(p, machine, stream);
  if (p.rows <= 4) return launch_dots<T, W, 4>(p, machine, stream);
  if (p.rows <= kMaxDotRows) return launch_dots<T, W, kMaxDotRows>(p, machine, stream);
  in_launches(p, kBlockTile, [&](const Product<T>& part) {
    const dim3 grid(grid_blocks(part.width, kBlockTile), grid_blocks(part.rows, kBlockTile),
                    static_cast<unsigned>(part.heads));
    tiled_kernel<T, W><<<grid, kTiledThreads, 0, stream>>>(part);
  });
}

template <class T, int kTiles, bool kWide>
void launch_tiles(Product<T> p, const Machine& machine, cudaStream_t stream) {
  constexpr int kRows = kWide ? kTileRows : kTileRows / 2;
  const std::int64_t groups = ceil_div(p.width, kTiles * kTileWidth);
  p.splits = choose_splits(groups * p.heads * ceil_div(p.rows, kRows), p.cols, kTileSpan, machine.num_sms);
  in_launches(p, kRows, [&](const Product<T>& part) {
    const dim3 grid(grid_blocks(groups, kDotWarps / p.splits), static_cast<unsigned>(p.heads),
                    grid_blocks(part.rows, kRows));
    // Uses the same shared-memory carveout as attention: with another one its blocks could not start beside
    // these. A token of DeepSeek-V2-Lite's shape takes 1.357 ms with it, 1.407 without (H100).
    if (machine.is_hopper)
      HELIX_CUDA_CHECK(cudaFuncSetAttribute(thin_tile_kernel<T, kTiles, kWide>,
                                            cudaFuncAttributePreferredSharedMemoryCarveout,
                                            cudaSharedmemCarveoutMaxShared));
    launch_early(thin_tile_kernel<T, kTiles, kWide>, grid, kDotThreads, 0, stream, machine.is_hopper, part);
  });
}

template <class T>
void launch_tensor_core(const Product<T>& p, const Machine& machine, cudaStream_t stream) {
  const bool is_wide = p.rows > kTileRows / 2;
  // Two tiles per warp halve the reads of activations; used if there is still a block for each SM.
  const std::int64_t warps = ceil_div(p.width, 2 * kTileWidth) * std::int64_t{p.heads} *
                             std::min(kDotWarps, ceil_div(p.cols, kTileSpan));
  const bool has_two = warps >= std::int64_t{kDotWarps} * machine.num_sms;
  if (is_wide && has_two) return launch_tiles<T, 2, true>(p, machine, stream);
  if (is_wide) return launch_tiles<T, 1, true>(p, machine, stream);
  if (has_two) return launch_tiles<T, 2, false>(p, machine, stream);
  launch_tiles<T, 1, false>(p, machine, stream);
}

template <class T>
void launch_bias(const Product<T>& p, cudaStream_t stream) {
  constexpr int kThreads = 256;
  in_launches(p, 1, [&](const Product<T>& part) {
    const dim3 grid(grid_blocks(part.width, kThreads), static_cast<unsigned>(part.rows));
    add_bias_kernel<T><<<grid, kThreads, 0, stream>>>(part);
  });
}

/// Rows from which the library takes a product of several heads. It is faster with 512 rows of 16 heads and
/// with 2048 rows of 128: prompts of latent attention take 21 ms instead of 23, and 88 instead of 111. Fewer
/// rows were not measured separately.
constexpr int kLibraryHeadRows = 64;

template <class T>
void launch_product(const Product<T>& p, DType weight_dtype, const Machine& machine, const Stream& stream) {
  if constexpr (sizeof(T) == 2) {
    if (machine.is_hopper && weight_dtype == kDTypeOf<T> && fits_few_rows(p))
      return multiply_few_rows(p, machine.num_sms, stream.handle());
    constexpr std::int64_t kElements = 8;  // elements in 16 bytes
    if (weight_dtype == kDTypeOf<T> && p.cols % kElements == 0 && is_aligned_16(p.weight) &&
        has_aligned_rows(p)) {
      const std::int64_t out_elements = p.is_out_f32 ? kElements / 2 : kElements;
      const bool is_library = (p.heads == 1 || p.rows >= kLibraryHeadRows) && p.rows > 0 && p.cols > 0 &&
                              p.in_row >= p.cols && is_aligned_16(p.out) && p.out_row % out_elements == 0 &&
                              p.out_row >= p.width && p.out_head % out_elements == 0;
      if (!is_library) return launch_tensor_core(p, machine, stream.handle());
      // A bias of another type is added afterwards, so the output is rounded once more.
      const bool is_fused = p.bias != nullptr && p.bias_dtype == kDTypeOf<T> && is_aligned_16(p.bias);
      library_matmul(machine.library,
                     {.dtype = weight_dtype,
                      .out_dtype = p.is_out_f32 ? DType::f32 : weight_dtype,
                      .in = p.in,
                      .in_row = p.in_row,
                      .in_head = p.in_head,
                      .weight = p.weight,
                      .bias = is_fused ? p.bias : nullptr,
                      .out = p.out,
                      .out_row = p.out_row,
                      .out_head = p.out_head,
                      .heads = p.heads,
                      .rows = p.rows,
                      .cols = p.cols,
                      .width = p.width,
                      .accumulate = p.accumulate},
                     stream);
      if (p.bias != nullptr && !is_fused) launch_bias(p, stream.handle());
      return;
    }
  }
  dispatch_weight(weight_dtype, [&]<class W>(W*) { launch_f32<T, W>(p, machine, stream.handle()); });
}

}  // namespace

template <class T>
void Operators<T>::linear(const LinearArgs<T>& args, Stream stream) const {
  if (args.in.extent(0) == 0 || args.weight.rows == 0) return;
  check_linear(args);
  const DeviceScope scope(state_->device);
  launch_product(product_of(args), args.weight.dtype, machine_of(*state_), stream);
}

template <class T>
void Operators<T>::linear_swiglu(const LinearSwigluArgs<T>& args, Stream stream) const {
  if constexpr (sizeof(T) == 2) {
    const bool is_one_type =
        args.weight.dtype == kDTypeOf<T> && (args.bias.empty() || detail::is_arithmetic(args.bias.dtype));
    if (state_->is_hopper && is_one_type && args.in.extent(0) > 0 && args.weight.rows > 0) {
      check_weight("linear_swiglu", args.weight, args.in.extent(0));
      Product<T> product = product_of(args.in, args.weight);
      product.bias = args.bias.data;
      product.bias_dtype = args.bias.dtype;
      product.out = args.out.data();
      product.out_row = args.out.stride(0);
      product.width /= 2;
      if (fits_few_rows(product)) {
        const DeviceScope scope(state_->device);
        return multiply_few_rows_gated(product, state_->num_sms, stream.handle());
      }
    }
  }
  linear(LinearArgs<T>{.in = args.in, .weight = args.weight, .bias = args.bias, .out = args.gate_up}, stream);
  swiglu(SwigluArgs<T>{.gate_up = args.gate_up, .out = args.out}, stream);
}

template <class T>
void Operators<T>::router_logits(const RouterLogitsArgs<T>& args, Stream stream) const {
  if (args.in.extent(0) == 0 || args.weight.rows == 0) return;
  check_weight("router_logits", args.weight, args.in.extent(0));
  const DeviceScope scope(state_->device);
  Product<T> product = product_of(args.in, args.weight);
  product.out = args.out.data();
  product.out_row = args.out.stride(0);
  product.is_out_f32 = true;
  launch_product(product, args.weight.dtype, machine_of(*state_), stream);
}

template <class T>
void Operators<T>::head_linear(const HeadLinearArgs<T>& args, Stream stream) const {
  if (args.in.extent(0) == 0 || args.in.extent(1) == 0 || args.out.extent(2) == 0) return;
  check_weight("head_linear", args.weight, args.in.extent(0));
  (void)head_blocks("head_linear", args.in.extent(1), 1);
  const DeviceScope scope(state_->device);
  Product<T> product{};
  product.in = args.in.data();
  product.in_row = args.in.stride(0);
  product.in_head = args.in.stride(1);
  product.weight = args.weight.data;
  product.out = args.out.data();
  product.out_row = args.out.stride(0);
  product.out_head = args.out.stride(1);
  product.rows = static_cast<int>(args.in.extent(0));
  product.heads = static_cast<int>(args.in.extent(1));
  product.width = static_cast<int>(args.out.extent(2));
  product.cols = static_cast<int>(args.weight.cols);
  launch_product(product, args.weight.dtype, machine_of(*state_), stream);
}

#define HELIX_INSTANTIATE(T)                                                           \
  template void Operators<T>::linear(const LinearArgs<T>&, Stream) const;              \
  template void Operators<T>::linear_swiglu(const LinearSwigluArgs<T>&, Stream) const; \
  template void Operators<T>::router_logits(const RouterLogitsArgs<T>&, Stream) const; \
  template void Operators<T>::head_linear(const HeadLinearArgs<T>&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
