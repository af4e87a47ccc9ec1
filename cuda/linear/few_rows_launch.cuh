// SPDX-License-Identifier: Apache-2.0
// What the launches of all products of few rows share.
#pragma once

#include <cstdint>

#include "cuda/linear/few_rows.cuh"
#include "cuda/linear/few_rows.hpp"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/tensor_map.cuh"

namespace helix::cuda::few_rows {

/// With few activation rows per tile, tiles of 16 rows and two blocks per SM are better (99.3 us for a
/// layer's products instead of 100.0).
using OneOrTwo = Shape<2, 16, 6, 2>;
using UpToEight = Shape<8, 32, 10, 1>;
using UpToSixteen = Shape<kMaxFewRows, 32, 7, 1>;

inline constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_NONE;  // 256 bytes: 7 % slower

/// Divides `runs` runs of `width` weight rows (`halves` rows for each) into tiles of one run each, so that a
/// block copies the least: its weights, plus the activations once per tile.
inline Tiles cut_runs(int runs, int width, int halves, int rows, int most_height, int most_blocks) {
  const auto copied = [&](const Tiles& tiles) { return tiles.count * (halves * tiles.height + rows); };
  Tiles best = Tiles::of(1, runs * width, most_blocks);
  for (int height = 2; height <= most_height; ++height) {
    const Tiles tiles = Tiles::of(height, runs * ceil_div(width, height), most_blocks);
    if (copied(tiles) <= copied(best)) best = tiles;
  }
  return best;
}

/// Queues the product in shape S, divided into `tiles`. The tail copies weights through the map `weights`. A
/// tile uses p.rows of the `in_rows` activation rows at p.in.
template <class S, class Tail, class T>
void launch_product(const Product<T>& p, std::int64_t in_rows, const CUtensorMap& weights, const Tiles& tiles,
                    const Tail& tail, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared<S, Tail>));
  static_assert(S::kBlocksPerSm * (kBytes + 1024) <= 228 * 1024, "its blocks do not fit on an SM");
  constexpr std::int64_t kElement = sizeof(T);
  const Params<T, Tail> params{.weights = weights,
                               .rows = rows_map<4>(const_cast<T*>(p.in), kDTypeOf<T>,
                                                   {kChunkColumns, in_rows, 1, p.cols / kChunkColumns},
                                                   {p.in_row * kElement, 16, kChunkRowBytes},
                                                   {kChunkColumns, p.rows, 1, S::kChunks}, kPromotion),
                               .product = p,
                               .tiles = tiles,
                               .tail = tail};
  const auto kernel = product_kernel<T, S, Tail>;
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_early(kernel, tiles.blocks, kBlockThreads<Tail>, kBytes, stream, true, params);
}

}  // namespace helix::cuda::few_rows
