// SPDX-License-Identifier: Apache-2.0
// Products of experts on tensor cores, for activations and weights of one 16-bit type: 128 weight rows of an
// expert times up to 128 of its pairs, with warp-level matrix products (compute capability 8.0).
//
// Weight rows are the rows of the product and pairs its columns, so with few pairs, where reading the weights
// takes the time, warps multiply few columns. The gate and up rows of a feature are eight rows apart, so that
// one thread has both sums. A pair's sums do not depend on the other pairs of its item.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/moe/expert_items.cuh"
#include "cuda/runtime/async_copy.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace helix::cuda {

/// Most pairs of an item.
inline constexpr int kTilePairs = 128;

/// One product of an item: out[pair, f] = silu(gate) * up for `width` features f, or in . weight[f]. A grid
/// of eight warps computes it, with 32 weight rows and 64 pairs per warp.
template <class T, bool kIsGateUp>
struct ExpertTile {
  using Out = std::conditional_t<kIsGateUp, T, float>;
  using Product = ExpertProduct<T, Out>;
  static constexpr int kPairs = kTilePairs;
  static constexpr int kBlocks = 2;  // blocks per SM
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kPairWarps = 2;
  static constexpr int kRowWarps = kWarps / kPairWarps;
  static constexpr int kRowTiles = 2;                         // tiles of 16 weight rows per warp
  static constexpr int kPairTiles = kPairs / 8 / kPairWarps;  // tiles of 8 pairs per warp
  static constexpr int kWeightRows = 16 * kRowTiles * kRowWarps;
  static constexpr int kAhead = 2;  // steps requested ahead
  static constexpr int kStages = kAhead + 1;
  static constexpr int kTileFeatures = kIsGateUp ? 8 : 16;  // features in 16 weight rows
  static constexpr int kFeatures = kTileFeatures * (kWeightRows / 16);
  static constexpr unsigned kRowBytes = kChunkColumns * 2;
  static constexpr unsigned kPairsAt = kWeightRows * kRowBytes;  // offset of pairs in a stage
  static constexpr unsigned kStageBytes = kPairsAt + kPairs * kRowBytes;
  static constexpr unsigned kBytes = kStages * kStageBytes;
  // The results of a pair are contiguous, with 16 bytes of padding, so that neighbours do not share banks.
  static constexpr unsigned kResultBytes = kFeatures * sizeof(Out) + 16;
  static_assert(kPairs * kResultBytes <= kBytes);

  // A thread copies part `part` of every kCopyRows-th row.
  static constexpr int kParts = static_cast<int>(kRowBytes) / 16;
  static constexpr int kCopyRows = kThreads / kParts;
  static constexpr int kWeightCopies = kWeightRows / kCopyRows;
  static constexpr int kPairCopies = kPairs / kCopyRows;

  const Product& p;
  ExpertItem item;
  const T* weights;
  int first;  // feature
  unsigned memory;

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
  /// Row tile `m` of the warp, 16 weight rows.
  static __device__ int row_tile(int m) { return warp() % kRowWarps * kRowTiles + m; }
  static __device__ int first_pair() { return warp() / kRowWarps * (8 * kPairTiles); }
  static __device__ int part() { return static_cast<int>(threadIdx.x) % kParts; }
  static __device__ int copy_row() { return static_cast<int>(threadIdx.x) / kParts; }

  /// The feature of weight row `row` of the tile.
  __device__ __forceinline__ int feature_of(int row) const {
    return first + row / 16 * kTileFeatures + row % 16 % kTileFeatures;
  }

  /// Copies the columns [kChunkColumns * step, + kChunkColumns) of weight rows and pairs; zeros past the last
  /// column.
  __device__ __forceinline__ void copy(const T* const (&rows)[kPairCopies], int step) const {
    const unsigned to =
        stage(step) + swizzled(static_cast<unsigned>(copy_row()), static_cast<unsigned>(part()));
    static_assert(kCopyRows % kSwizzleRows == 0);
    const int column = step * kChunkColumns + part() * 8;
    const bool is_column = column < p.cols;
#pragma unroll
    for (int i = 0; i < kWeightCopies; ++i) {
      const int row = copy_row() + i * kCopyRows;
      const int feature = feature_of(row);
      const std::int64_t weight_row =
          feature + (kIsGateUp && row % 16 >= kTileFeatures ? std::int64_t{p.width} : 0);
      const bool is_there = is_column && feature < p.width;
      copy_chunk_or_zeros(to + static_cast<unsigned>(i * kCopyRows) * kRowBytes,
                          is_there ? weights + weight_row * p.cols + column : weights, is_there);
    }
#pragma unroll
    for (int i = 0; i < kPairCopies; ++i) {
      if (i * kCopyRows >= item.count) break;
      copy_chunk_or_zeros(to + kPairsAt + static_cast<unsigned>(i * kCopyRows) * kRowBytes,
                          is_column ? rows[i] + column : rows[i], is_column);
    }
  }

  /// A thread's sums. Element 4 * j + 2 * h + i is row lane / 4 + 8 * h of a row tile, pair 8 * j + lane % 4
  /// * 2 + i.
  using Sums = float[kRowTiles][kPairTiles * 4];

  __device__ __forceinline__ unsigned stage(int step) const {
    return memory + static_cast<unsigned>(step % kStages) * kStageBytes;
  }

  /// Multiplies this warp's part of a step, for the pairs that exist.
  __device__ __forceinline__ void multiply_step(int step, Sums& sums) const {
    const unsigned from = stage(step);
    const int pair_tiles = (item.count - first_pair() + 7) / 8;
    const auto weight_row = static_cast<unsigned>(row_tile(0) * 16 + lane() % 16);
    const auto pair_row = static_cast<unsigned>(first_pair() + lane() / 16 * 8 + lane() % 8);
#pragma unroll
    for (unsigned k = 0; k < kChunkColumns / kProductDepth; ++k) {
      unsigned a[kRowTiles][4];
#pragma unroll
      for (unsigned m = 0; m < kRowTiles; ++m)
        load_matrices(a[m], from + swizzled(weight_row + 16 * m, 2 * k + static_cast<unsigned>(lane()) / 16));
#pragma unroll
      for (int j = 0; j < kPairTiles; j += 2) {
        if (j >= pair_tiles) break;
        unsigned b[4];
        load_matrices(b, from + kPairsAt +
                             swizzled(pair_row + 8 * static_cast<unsigned>(j),
                                      2 * k + static_cast<unsigned>(lane()) / 8 % 2));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            multiply<T>(reinterpret_cast<float(&)[4]>(sums[m][4 * (j + i)]), a[m][0], a[m][1], a[m][2],
                        a[m][3], b[2 * i], b[2 * i + 1]);
        }
      }
    }
  }

  /// Writes the sums to shared memory as [pair][feature].
  __device__ __forceinline__ void stage_results(const Sums& sums) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int feature = row_tile(m) * kTileFeatures + lane() / 4;
#pragma unroll
      for (int j = 0; j < kPairTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Out* to = result(first_pair() + 8 * j + lane() % 4 * 2 + i) + feature;
          const float low = sums[m][4 * j + i];
          const float high = sums[m][4 * j + 2 + i];
          if constexpr (kIsGateUp) {
            *to = from_float<T>(swiglu(low, high));
          } else {
            to[0] = low;
            to[8] = high;
          }
        }
      }
    }
  }
  static __device__ Out* result(int pair) {
    extern __shared__ __align__(1024) std::byte expert_memory[];
    return reinterpret_cast<Out*>(expert_memory + static_cast<unsigned>(pair) * kResultBytes);
  }
  __device__ __forceinline__ void write_results() const {
    constexpr int kPieceFeatures = 16 / static_cast<int>(sizeof(Out));
    constexpr int kPieces = kFeatures / kPieceFeatures;
    for (int i = static_cast<int>(threadIdx.x); i < item.count * kPieces; i += kThreads) {
      const int feature = i % kPieces * kPieceFeatures;
      if (first + feature >= p.width) continue;
      const int pair = i / kPieces;
      Out* to = p.out + std::int64_t{p.pairs[item.begin + pair]} * p.width + first + feature;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(result(pair) + feature);
    }
  }

  /// Multiplies the stages as they arrive.
  __device__ __forceinline__ void walk(const T* const (&rows)[kPairCopies], Sums& sums) const {
    const int steps = (p.cols + kChunkColumns - 1) / kChunkColumns;
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      if (step < steps) copy(rows, step);
      commit_copies();
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_for_copies<kAhead - 1>();
      __syncthreads();
      if (step + kAhead < steps) copy(rows, step + kAhead);
      commit_copies();
      multiply_step(step, sums);
    }
  }

  __device__ __forceinline__ void run() const {
    const T* rows[kPairCopies];
#pragma unroll
    for (int i = 0; i < kPairCopies; ++i) {  // past the end, repeats the last pair; its sums are not stored
      const int pair = p.pairs[item.begin + min(copy_row() + i * kCopyRows, item.count - 1)];
      rows[i] = p.in + pair / p.pairs_per_row * p.in_stride;
    }
    Sums sums = {};
    walk(rows, sums);
    wait_for_all_copies();
    __syncthreads();
    stage_results(sums);
    __syncthreads();
    write_results();
  }
};

/// Grid: num_items blocks for each kFeatures features, so that the items of one expert, which are adjacent,
/// read its weights from L2 together. Columns and width are multiples of 8; rows are aligned to 16 bytes.
template <class T, bool kIsGateUp>
__global__ void __launch_bounds__(ExpertTile<T, kIsGateUp>::kThreads, ExpertTile<T, kIsGateUp>::kBlocks)
    expert_tile_kernel(const typename ExpertTile<T, kIsGateUp>::Product p,
                       const __grid_constant__ ExpertTable table) {
  using Tile = ExpertTile<T, kIsGateUp>;
  extern __shared__ __align__(1024) std::byte expert_memory[];
  follow_previous();
  const ExpertItem item = p.items[blockIdx.x % static_cast<unsigned>(p.num_items)];
  const auto* weights = static_cast<const T*>(weights_of(item, table));
  if (weights == nullptr) return;
  const int first = static_cast<int>(blockIdx.x / static_cast<unsigned>(p.num_items)) * Tile::kFeatures;
  Tile{p, item, weights, first, static_cast<unsigned>(__cvta_generic_to_shared(expert_memory))}.run();
}

}  // namespace helix::cuda
