// SPDX-License-Identifier: Apache-2.0
// How a product of few activation rows is divided into blocks, tiles and stages, and a block's shared memory.
#pragma once

#include <helix/integers.hpp>

#include "cuda/linear/product.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/warp_groups.cuh"

namespace helix::cuda::few_rows {

inline constexpr int kConsumers = 8;  // consumer warps
inline constexpr int kConsumerThreads = kConsumers * kWarp;
inline constexpr int kThreads = kConsumerThreads + kWarp;
inline constexpr int kMatrixWidth = 8;                          // weight rows of one instruction
inline constexpr int kWarpColumns = 32;                         // of a warp at a time
inline constexpr int kStepColumns = kConsumers * kWarpColumns;  // of all warps at a time
inline constexpr unsigned kChunkRowBytes = 2 * kChunkColumns;   // of a chunk's row in shared memory
inline constexpr int kConsumersMeet = 1;                        // barrier; 0 is the block's
inline constexpr int kTailIsPrepared = 2;                       // barrier: consumers and the tail's warp

/// Bytes of weights in flight per SM while the previous kernel runs: some two microseconds of its share of
/// memory bandwidth. Eight layers of the 8B shape, ms on one H200, two with KVP 2, two with TPA 2: 32 KiB
/// 1.145, 0.775 and 0.684; 64 KiB 1.127, 0.777 and 0.687; 96 KiB 1.141, 0.790 and 0.703; 192 KiB, all of the
/// ring, 1.159, 0.801 and 0.711.
inline constexpr int kFewBytesUnderWay = 65536;
/// The limit from then on: 96 KiB 1.116, 0.773 and 0.686 in another run; 128 KiB 1.118, 0.771 and 0.682; 192
/// KiB 1.124, 0.775 and 0.685.
inline constexpr int kMaxBytesUnderWay = 131072;

/// The sizes that a kernel is built for: up to kMaxRows activation rows, tiles of up to kWidth weight rows, a
/// ring of kRingStages stages with kStageElements weights each, kSmBlocks blocks per SM, and room for the
/// sums of kTileSums tiles.
template <int kMaxRows, int kWidth, int kRingStages, int kSmBlocks, int kStageElements = 8192,
          int kTileSums = 2>
struct Shape {
  static constexpr int kRows = kMaxRows;
  static constexpr int kTileWidth = kWidth;
  static constexpr int kStages = kRingStages;
  static constexpr int kBlocksPerSm = kSmBlocks;
  static constexpr int kSums = kTileSums;
  static constexpr int kColumns = kStageElements / kTileWidth;             // columns of a stage
  static constexpr int kSmStageBytes = kStageElements * 2 * kBlocksPerSm;  // one stage of each block of an SM
  /// Most stages of a block in flight: in the ring's first round, while the previous kernel runs, and later.
  static constexpr int kFewUnderWay = kFewBytesUnderWay / kSmStageBytes;
  static constexpr int kMaxUnderWay = smaller(kMaxBytesUnderWay / kSmStageBytes, kStages);
  static constexpr int kChunks = kColumns / kChunkColumns;
  static constexpr int kSteps = kColumns / kStepColumns;
  static constexpr int kMatrices = kTileWidth / kMatrixWidth;
  static_assert(kSteps * kStepColumns == kColumns && kFewUnderWay >= 1);
};

/// Shared memory of a block of a kernel of shape S whose tail is `Tail`.
template <class S, class Tail>
struct Shared {
  /// Swizzled chunks of 64 columns; the rows of a chunk are consecutive.
  struct Stage {
    unsigned char weights[S::kChunks * S::kTileWidth * kChunkRowBytes];
    unsigned char rows[S::kChunks * S::kRows * kChunkRowBytes];
  };
  /// The warps' sums of a tile, padded so that rows share no banks.
  using Sums = float[kConsumers][S::kRows][S::kTileWidth + kMatrixWidth];

  Stage stages[S::kStages];
  Sums sums[S::kSums];  // alternate between tiles
  RingBarriers<S::kStages> ring;
  unsigned long long first_rows;  // barrier: the activations of the ring's first round have arrived
  typename Tail::Memory tail;
  static_assert(sizeof(Stage) % 1024 == 0);
};

/// How the weight rows (or pairs, if gate and up are one product) are divided. All blocks but the last have
/// equally many tiles, and all tiles equally many rows.
struct Tiles {
  int height;  ///< Rows, or pairs, of a tile.
  int count;   ///< Tiles of a block.
  int blocks;

  Tiles(int width, int most_height, int most_blocks) {
    const int share = (width + most_blocks - 1) / most_blocks;
    count = (share + most_height - 1) / most_height;
    height = (share + count - 1) / count;
    blocks = (width + height * count - 1) / (height * count);
  }
  /// `all` tiles of `of_height` rows each.
  static Tiles of(int of_height, int all, int most_blocks) {
    Tiles tiles(all, 1, most_blocks);
    tiles.height = of_height;
    return tiles;
  }

  /// Index of the block's tile `tile` among the tiles of all blocks.
  __device__ int number(int tile) const { return static_cast<int>(blockIdx.x) * count + tile; }
  __device__ int begin(int tile) const { return number(tile) * height; }
  /// The number of tiles of this block.
  __device__ int mine(int width) const {
    const int left = (width - begin(0) + height - 1) / height;
    return min(count, left);
  }
};

/// Kernel parameters.
template <class T, class Tail>
struct Params {
  CUtensorMap weights;  ///< See Tail::copy_weights(); a box is a tile's part.
  CUtensorMap rows;     ///< Columns of a chunk, activation rows, 1, chunks; a box is a part of them all.
  Product<T> product;
  Tiles tiles;
  Tail tail;
};

}  // namespace helix::cuda::few_rows
