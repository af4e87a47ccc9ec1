// SPDX-License-Identifier: Apache-2.0
// What all launches of products of few rows have alike.
#pragma once

#include <cstdint>

#include "cuda/linear/few_rows.cuh"
#include "cuda/linear/few_rows.hpp"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/tensor_map.cuh"

namespace helix::cuda::few_rows {

/// Tiles of 16 rows and two blocks an SM are better (99.3 us of a layer's products against 100.0) where the
/// activation rows beside each tile are few.
using OneOrTwo = Shape<2, 16, 6, 2>;
using UpToEight = Shape<8, 32, 10, 1>;
using UpToSixteen = Shape<kMaxFewRows, 32, 7, 1>;

inline constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_NONE;  // by 256 bytes: 7 % slower

/// Tiles of one run of `width` weight rows (or of `halves` for each) each, of which a block copies the least:
/// its weights, and as many activations a tile.
inline Tiles cut_runs(int runs, int width, int halves, int rows, int most_height, int most_blocks) {
  const auto copied = [&](const Tiles& tiles) { return tiles.count * (halves * tiles.height + rows); };
  Tiles best = Tiles::of(1, runs * width, most_blocks);
  for (int height = 2; height <= most_height; ++height) {
    const Tiles tiles = Tiles::of(height, runs * ceil_div(width, height), most_blocks);
    if (copied(tiles) <= copied(best)) best = tiles;
  }
  return best;
}

/// Queues the product in shape S, cut into `tiles`, of which `weights` is the map that the tail copies by. A
/// tile has p.rows activation rows of the `in_rows` at p.in.
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
