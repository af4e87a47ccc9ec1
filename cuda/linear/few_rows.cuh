// SPDX-License-Identifier: Apache-2.0
// Products of up to 16 activation rows, bound by the bandwidth of reading the weights (compute capability
// 9.0).
//
// Each block takes an equal share of the weight rows, in tiles of up to 16 to 64 rows, and reads every byte
// once. A producer thread copies parts of 16 or 32 KiB into a ring of stages, one box at a time (copying row
// by row, 512 bytes per copy, reached half the rate). Eight consumer warps multiply the parts on tensor cores
// and add their sums at the end of a tile. The ring is filled with weights before the previous kernel has
// ended; only activations wait for it. Until then a block has no more copies in flight than keep memory busy:
// the previous kernel (a norm, an attention or an exchange) is a chain of memory accesses, and each of them
// queues after all copies in flight.
//
// Measured on an H200 with the products of a Llama-3.1-8B layer, 436 MB, one after another: one row 99.3 us,
// 8 rows 101.8, 16 rows 106.0; a kernel that only copies takes 94 to 97. Stage rows 512 bytes apart, so that
// two share banks, cost 3 us; boxes with rows past the last activation row, which arrive as zeros, as much.
// Weights leave L2 first, so data and instructions of the kernels between products stay there: a layer takes
// 5 us less with one row, 7 with 8. What does not help: half as many instructions (weights as their side of
// 16), the next product's ring beside this one's, dynamic assignment of tiles, prefetching weights into L2
// while attention leaves memory idle, or the next product's first weights at this one's end.
#pragma once

#include <cstdint>

#include "cuda/linear/few_rows_block.cuh"
#include "cuda/linear/few_rows_tails.cuh"
#include "cuda/linear/product.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/warp_groups.cuh"

namespace helix::cuda::few_rows {

/// The number of tiles of this block.
template <class S, class T, class Tail>
__device__ __forceinline__ int tiles_of_block(const Params<T, Tail>& p, const Shared<S, Tail>& shared) {
  if constexpr (Tail::kFindsTiles) {
    return shared.tail.num_tiles;
  } else {
    return p.tiles.mine(p.product.width);
  }
}

/// Copies a part of a tile's activation rows to a stage; `barrier` counts the bytes.
template <class S, class T, class Tail>
__device__ __forceinline__ void copy_rows(const Params<T, Tail>& p, Shared<S, Tail>& shared, int stage,
                                          int tile, int part, unsigned barrier) {
  int first = 0;
  if constexpr (Tail::kFindsTiles) first = p.tail.row_of(shared.tail, tile);
  copy_box(static_cast<unsigned>(__cvta_generic_to_shared(shared.stages[stage].rows)), p.rows, 0, first, 0,
           part * S::kChunks, barrier);
}

/// The number of parts of a tile.
template <class S, class T>
__device__ __forceinline__ int parts_of(const Product<T>& p) {
  return ceil_div(p.cols, S::kColumns);
}

/// Copies the activations for the block's first round of the ring. A consumer thread does this, because it is
/// the first to know that they are ready; the producer may still be waiting for weights.
template <class S, class T, class Tail>
__device__ void copy_first_rows(const Params<T, Tail>& p, Shared<S, Tail>& shared) {
  const int parts = parts_of<S>(p.product);
  const int ahead = min(tiles_of_block(p, shared) * parts, S::kStages);
  const auto arrived = static_cast<unsigned>(__cvta_generic_to_shared(&shared.first_rows));
  barrier_expect(arrived, kChunkRowBytes * S::kChunks * static_cast<unsigned>(p.product.rows * ahead));
  for (int i = 0; i < ahead; ++i) copy_rows(p, shared, i, i / parts, i % parts, arrived);
}

/// The producer thread.
template <class S, class T, class Tail>
__device__ void copy_tiles(const Params<T, Tail>& p, Shared<S, Tail>& shared) {
  const int parts = parts_of<S>(p.product);
  const int all = tiles_of_block(p, shared) * parts;
  const int ahead = min(all, S::kStages);
  constexpr unsigned kPartRowBytes = kChunkRowBytes * S::kChunks;
  const unsigned weight_bytes = kPartRowBytes * static_cast<unsigned>(p.tiles.height * Tail::kHalves);
  const unsigned row_bytes = kPartRowBytes * static_cast<unsigned>(p.product.rows);
  const auto copy_weights = [&](const RingPlace<S::kStages>& place, int tile, int part, unsigned bytes) {
    barrier_expect(place.full(), bytes);
    p.tail.copy_weights(static_cast<unsigned>(__cvta_generic_to_shared(shared.stages[place.stage()].weights)),
                        p.weights, p.tiles, shared.tail, tile, part * S::kChunks, place.full());
  };
  RingPlace<S::kStages> place(shared.ring);
  RingPlace<S::kStages> arriving(shared.ring);
  int arrived = 0;
  // Called before copy `i`: waits until fewer than `most` copies are in flight.
  const auto hold = [&](int i, int most) {
    for (; arrived <= i - most; ++arrived, arriving.advance()) arriving.wait_full();
  };
  for (int i = 0; i < ahead; ++i, place.advance()) {
    hold(i, S::kFewUnderWay);
    copy_weights(place, i / parts, i % parts, weight_bytes);  // copy_first_rows() copies the activations
  }
  wait_for_previous();
  int tile = ahead / parts;
  int part = ahead % parts;
  for (int i = ahead; i < all; ++i, place.advance()) {
    hold(i, S::kMaxUnderWay);
    place.wait_empty();
    copy_weights(place, tile, part, weight_bytes + row_bytes);
    copy_rows(p, shared, place.stage(), tile, part, place.full());
    if (++part == parts) {
      part = 0;
      ++tile;
    }
  }
}

/// The consumer warps.
template <class T, class S, class Tail>
struct Consumer {
  using Block = Shared<S, Tail>;
  using Found = float[S::kMatrices][4];
  static constexpr bool kIsWide = S::kRows > 8;

  __device__ Consumer(const Params<T, Tail>& all, Block& block)
      : params(all),
        shared(block),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        lane(static_cast<int>(threadIdx.x) % kWarp),
        height(all.tiles.height * Tail::kHalves) {}

  /// This lane's 16 bytes of a row: 8 columns of a chunk. Even warps take the even groups of eight columns,
  /// odd warps the odd ones, so that two rows that swizzling places side by side share no bank.
  __device__ __forceinline__ uint4 load(const unsigned char* rows, int row) const {
    const int eight = (lane % 4 * 2 + warp % 2) ^ (row % 8);
    return *reinterpret_cast<const uint4*>(rows + row * static_cast<int>(kChunkRowBytes) + eight * 16);
  }

  /// Multiplies a stage. A lane's columns are not those of the instruction, but the same in both operands, so
  /// the sum is the same. Columns past the last are zero in both. A warp's columns and their order, and so
  /// the bits of the sums, are the same for all shapes.
  __device__ __forceinline__ void multiply_stage(const typename Block::Stage& stage, Found& found) const {
    const int row = lane / 4;
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      const int chunk = step * (kStepColumns / kChunkColumns) + warp / 2;
      const int first = chunk * p.rows + (S::kRows < 8 ? row % S::kRows : row);
      const uint4 low = load(stage.rows, first);
      const uint4 high = kIsWide ? load(stage.rows, first + 8) : uint4{};
      uint4 weights[S::kMatrices];
#pragma unroll
      for (int i = 0; i < S::kMatrices; ++i)
        weights[i] = load(stage.weights, chunk * height + i * kMatrixWidth + row);
#pragma unroll
      for (int i = 0; i < S::kMatrices; ++i) {
        multiply<T>(found[i], low.x, high.x, low.y, high.y, weights[i].x, weights[i].y);
        multiply<T>(found[i], low.z, high.z, low.w, high.w, weights[i].z, weights[i].w);
      }
    }
  }

  /// Adds the warps' sums of the block's tile number `tile` in warp order and stores them. A warp that is
  /// done continues if the next tile's sums are in other memory.
  __device__ void store_tile(int tile, const Found& found) const {
    auto& sums = shared.sums[tile % S::kSums];
    if (lane / 4 < S::kRows) {
#pragma unroll
      for (int i = 0; i < S::kMatrices; ++i) {
        float* to = &sums[warp][lane / 4][i * kMatrixWidth + lane % 4 * 2];
        *reinterpret_cast<float2*>(to) = {found[i][0], found[i][1]};
        if constexpr (kIsWide)
          *reinterpret_cast<float2*>(to + 8 * (S::kTileWidth + kMatrixWidth)) = {found[i][2], found[i][3]};
      }
    }
    if (Tail::kPrepares && tile == 0) {  // also waits until the tail has prepared its data
      group_sync(kTailIsPrepared, kConsumerThreads + kWarp);
    } else {
      group_sync(kConsumersMeet, kConsumerThreads);
    }
    for (int i = static_cast<int>(threadIdx.x); i < p.rows * S::kTileWidth; i += kConsumerThreads) {
      const int row = i / S::kTileWidth;
      const int n = i % S::kTileWidth;
      if (n < tiles.height)
        params.tail.store(p, tiles, shared.tail, tile, row, n, [&](int of) { return total(sums, row, of); });
    }
    if constexpr (S::kSums == 1) group_sync(kConsumersMeet, kConsumerThreads);
  }

  static __device__ __forceinline__ float total(const typename Block::Sums& sums, int row, int n) {
    float sum = 0.0f;
#pragma unroll
    for (int of = 0; of < kConsumers; ++of) sum += sums[of][row][n];
    return sum;
  }

  __device__ void run() const {
    RingPlace<S::kStages> place(shared.ring);
    wait_for_previous();  // before the output is written
    if (threadIdx.x == 0) copy_first_rows(params, shared);
    barrier_wait(static_cast<unsigned>(__cvta_generic_to_shared(&shared.first_rows)), 0);
    const int mine = tiles_of_block(params, shared);
    for (int tile = 0; tile < mine; ++tile) {
      Found found = {};
      for (int column = 0; column < p.cols; column += S::kColumns) {
        place.wait_full();
        multiply_stage(shared.stages[place.stage()], found);
        __syncwarp();
        barrier_arrive_if(lane == 0, place.empty());
        place.advance();
      }
      store_tile(tile, found);
    }
    if constexpr (Tail::kReceives) params.tail.receive(p, tiles, shared.tail);
  }

  const Params<T, Tail>& params;
  const Product<T>& p = params.product;
  const Tiles& tiles = params.tiles;
  Block& shared;
  int warp;
  int lane;
  int height;  // rows of a tile, all halves
};

/// Threads of a block.
template <class Tail>
inline constexpr int kBlockThreads = kThreads + (Tail::kPrepares ? kWarp : 0);

/// Computes the sums of p.product and stores them through p.tail. A tail that prepares or finds tiles calls
/// start_next() itself.
template <class T, class S, class Tail>
__global__ void __launch_bounds__(kBlockThreads<Tail>, S::kBlocksPerSm)
    product_kernel(const __grid_constant__ Params<T, Tail> p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<S, Tail>*>(memory);
  if constexpr (Tail::kFindsTiles) {
    p.tail.begin(p.tiles, shared.tail);
  } else if constexpr (!Tail::kPrepares) {
    start_next();
  }
  if (threadIdx.x == 0) {
    shared.ring.init(1, kConsumers);
    barrier_init(static_cast<unsigned>(__cvta_generic_to_shared(&shared.first_rows)), 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kConsumerThreads) {
    Consumer<T, S, Tail>(p, shared).run();
  } else if (threadIdx.x == kConsumerThreads) {
    copy_tiles(p, shared);
  } else if constexpr (Tail::kPrepares) {
    if (threadIdx.x >= kThreads) {
      p.tail.prepare(p.product, p.tiles, shared.tail);
      group_arrive(kTailIsPrepared, kConsumerThreads + kWarp);
    }
  }
#endif
}

}  // namespace helix::cuda::few_rows
