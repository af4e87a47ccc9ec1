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
using UpToSixteen = Shape<kMostFewRows, 32, 7, 1>;

inline constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_NONE;  // by 256 bytes: 7 % slower

/// Queues the product in shape S, cut into `tiles`, of which `weights` is the map that the tail copies by.
template <class S, class Tail, class T>
void launch_product(const Product<T>& p, const CUtensorMap& weights, const Tiles& tiles, const Tail& tail,
                    cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared<S, Tail>));
  static_assert(S::kBlocksPerSm * (kBytes + 1024) <= 228 * 1024, "its blocks do not fit on an SM");
  constexpr std::int64_t kElement = sizeof(T);
  const Params<T, Tail> params{.weights = weights,
                               .rows = rows_map<4>(const_cast<T*>(p.in), kDTypeOf<T>,
                                                   {kChunkColumns, p.rows, 1, p.cols / kChunkColumns},
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
