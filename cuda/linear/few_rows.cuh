// SPDX-License-Identifier: Apache-2.0
// Products of up to 16 activation rows, bound by the weights' way from memory (compute capability 9.0).
//
// Each block takes an equal share of the weight rows, in tiles of up to 32, and reads every byte once: a
// thread of its own has parts of 256 columns copied into a ring of stages, a box at a time (row by row, 512
// bytes a copy, reached half the rate), and eight warps multiply them by tensor cores, 32 columns each, and
// add up what they found at the end of a tile. The ring is filled with weights before the kernel ahead has
// ended: only activations wait for it.
#pragma once

#include <cstdint>

#include "cuda/linear/product.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/warp_groups.cuh"

namespace helix::cuda::few_rows {

inline constexpr int kConsumers = 8;  // warps that multiply
inline constexpr int kConsumerThreads = kConsumers * kWarp;
inline constexpr int kThreads = kConsumerThreads + kWarp;
inline constexpr int kTileWidth =
    32;  // weight rows of a tile, of which the copying warp's lanes take one each
inline constexpr int kMatrixWidth = 8;  // of one instruction
inline constexpr int kMatrices = kTileWidth / kMatrixWidth;
inline constexpr int kLaneColumns = 8;                      // 16 bytes
inline constexpr int kWarpColumns = 4 * kLaneColumns;       // of a stage
inline constexpr int kColumns = kConsumers * kWarpColumns;  // of a stage
inline constexpr unsigned kRowBytes = 2 * kColumns;
inline constexpr int kSumStride = kTileWidth + kMatrixWidth;  // elements; on which rows do not share banks
inline constexpr int kConsumersMeet = 1;                      // barrier; 0 is the block's

/// Shared memory of a block, for up to kRows activation rows.
template <int kRows, int kStages>
struct Shared {
  struct Stage {
    unsigned char weights[kTileWidth][kRowBytes];
    unsigned char rows[kRows][kRowBytes];
  };
  Stage stages[kStages];
  float sums[kConsumers][kRows][kSumStride];
  RingBarriers<kStages> ring;
};

/// How the weight rows (pairs of them, if gate and up are one product) are cut. Every block but the last has
/// as many tiles, and every tile as many rows.
struct Tiles {
  int height;  ///< Rows of a tile, or pairs.
  int count;   ///< Of a block.
  int blocks;

  Tiles(int width, int most_height, int num_sms) {
    const int share = (width + num_sms - 1) / num_sms;
    count = (share + most_height - 1) / most_height;
    height = (share + count - 1) / count;
    blocks = (width + height * count - 1) / (height * count);
  }

  __device__ int begin(int tile) const { return (static_cast<int>(blockIdx.x) * count + tile) * height; }
  /// Tiles of this block.
  __device__ int mine(int width) const {
    const int left = (width - begin(0) + height - 1) / height;
    return min(count, left);
  }
};

/// What the kernel is given.
template <class T>
struct Params {
  CUtensorMap weights;  ///< Columns, rows of a half, halves; a box is a tile's part.
  CUtensorMap rows;     ///< Columns, activation rows, 1; a box is a part of them all.
  Product<T> product;
  Tiles tiles;
};

/// The thread that copies.
template <class T, int kRows, int kStages, bool kIsGated>
__device__ void copy_tiles(const Params<T>& p, Shared<kRows, kStages>& shared) {
  const int parts = (p.product.cols + kColumns - 1) / kColumns;
  const int all = p.tiles.mine(p.product.width) * parts;
  const int ahead = min(all, kStages);
  const unsigned bytes = kRowBytes * static_cast<unsigned>(p.tiles.height * (kIsGated ? 2 : 1) + kRows);
  const auto copy_weights = [&](const RingPlace<kStages>& place, int tile, int part) {
    barrier_expect(place.full(), bytes);
    copy_query_box(static_cast<unsigned>(__cvta_generic_to_shared(shared.stages[place.stage()].weights)),
                   p.weights, part * kColumns, p.tiles.begin(tile), 0, place.full());
  };
  const auto copy_rows = [&](const RingPlace<kStages>& place, int part) {
    copy_query_box(static_cast<unsigned>(__cvta_generic_to_shared(shared.stages[place.stage()].rows)), p.rows,
                   part * kColumns, 0, 0, place.full());
  };
  RingPlace<kStages> place(shared.ring);
  RingPlace<kStages> first(shared.ring);
  for (int i = 0; i < ahead; ++i, place.advance()) copy_weights(place, i / parts, i % parts);
  wait_for_previous();
  for (int i = 0; i < ahead; ++i, first.advance()) copy_rows(first, i % parts);
  int tile = ahead / parts;
  int part = ahead % parts;
  for (int i = ahead; i < all; ++i, place.advance()) {
    place.wait_empty();
    copy_weights(place, tile, part);
    copy_rows(place, part);
    if (++part == parts) {
      part = 0;
      ++tile;
    }
  }
}

/// The warps that multiply.
template <class T, int kRows, int kStages, bool kIsGated>
struct Consumer {
  using Block = Shared<kRows, kStages>;
  static constexpr bool kIsWide = kRows > 8;

  __device__ Consumer(const Params<T>& params, Block& block)
      : p(params.product),
        tiles(params.tiles),
        shared(block),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        lane(static_cast<int>(threadIdx.x) % kWarp) {}

  /// A lane reads 16 bytes of a row at columns 8 * (lane % 4): not the order in which the instruction names
  /// its columns, but the same for both operands, and the sum does not mind. What lies past the last column
  /// is zero in both.
  __device__ __forceinline__ void multiply_stage(const typename Block::Stage& stage,
                                                 float (&sums)[kMatrices][4]) const {
    const int row = lane / 4;
    const int at = 2 * (warp * kWarpColumns + lane % 4 * kLaneColumns);
    const auto load = [&](const unsigned char* from) { return *reinterpret_cast<const uint4*>(from + at); };
    const uint4 low = load(stage.rows[row]);
    const uint4 high = kIsWide ? load(stage.rows[row + kRows - 8]) : uint4{};
    uint4 weights[kMatrices];
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) weights[i] = load(stage.weights[i * kMatrixWidth + row]);
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
      multiply<T>(sums[i], low.x, high.x, low.y, high.y, weights[i].x, weights[i].y);
      multiply<T>(sums[i], low.z, high.z, low.w, high.w, weights[i].z, weights[i].w);
    }
  }

  /// What the warps found, added in their order and stored.
  __device__ void store_tile(int tile, const float (&sums)[kMatrices][4]) const {
    group_sync(kConsumersMeet, kConsumerThreads);  // the tile before has been read
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
      float* to = &shared.sums[warp][lane / 4][i * kMatrixWidth + lane % 4 * 2];
      *reinterpret_cast<float2*>(to) = {sums[i][0], sums[i][1]};
      if constexpr (kIsWide) *reinterpret_cast<float2*>(to + 8 * kSumStride) = {sums[i][2], sums[i][3]};
    }
    group_sync(kConsumersMeet, kConsumerThreads);
    for (int i = static_cast<int>(threadIdx.x); i < p.rows * kTileWidth; i += kConsumerThreads) {
      const int row = i / kTileWidth;
      const int n = i % kTileWidth;
      if (n < tiles.height) store_one(row, n, tiles.begin(tile) + n);
    }
  }

  /// Element `n` of the tile, `at` of the output.
  __device__ __forceinline__ void store_one(int row, int n, int at) const {
    if constexpr (kIsGated) {
      if (at >= p.width) return;
      float gate = total(row, n);
      float up = total(row, tiles.height + n);
      if (p.bias != nullptr) {
        gate += load_element(p.bias, p.bias_dtype, at);
        up += load_element(p.bias, p.bias_dtype, p.width + at);
      }
      static_cast<T*>(p.out)[row * p.out_row + at] = from_float<T>(gate / (1.0f + expf(-gate)) * up);
    } else {
      store(p, row, 0, at, total(row, n));
    }
  }

  __device__ __forceinline__ float total(int row, int n) const {
    float sum = 0.0f;
#pragma unroll
    for (int of = 0; of < kConsumers; ++of) sum += shared.sums[of][row][n];
    return sum;
  }

  __device__ void run() const {
    RingPlace<kStages> place(shared.ring);
    wait_for_previous();  // before the output is touched
    const int mine = tiles.mine(p.width);
    for (int tile = 0; tile < mine; ++tile) {
      float sums[kMatrices][4] = {};
      for (int column = 0; column < p.cols; column += kColumns) {
        place.wait_full();
        multiply_stage(shared.stages[place.stage()], sums);
        __syncwarp();
        barrier_arrive_if(lane == 0, place.empty());
        place.advance();
      }
      store_tile(tile, sums);
    }
  }

  const Product<T>& p;
  const Tiles& tiles;
  Block& shared;
  int warp;
  int lane;
};

/// out = in * weight, or if kIsGated silu(gate) * up of its two halves, of p.product.width rows each.
template <class T, int kRows, int kStages, bool kIsGated>
__global__ void __launch_bounds__(kThreads) product_kernel(const __grid_constant__ Params<T> p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kRows, kStages>*>(memory);
  start_next();
  if (threadIdx.x == 0) {
    shared.ring.init(1, kConsumers);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kConsumerThreads) {
    Consumer<T, kRows, kStages, kIsGated>(p, shared).run();
  } else if (threadIdx.x == kConsumerThreads) {
    copy_tiles<T, kRows, kStages, kIsGated>(p, shared);
  }
#endif
}

}  // namespace helix::cuda::few_rows
