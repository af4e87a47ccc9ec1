// SPDX-License-Identifier: Apache-2.0
// Tails of products of few rows: what happens to a complete sum, and hence which weight rows a tile has.
#pragma once

#include <cstdint>

#include "cuda/linear/few_rows_block.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"

namespace helix::cuda::few_rows {

/// Base of tails that need only the sums. Map coordinates: columns of a chunk, rows of a half, halves,
/// chunks.
struct PlainTail {
  static constexpr bool kPrepares = false;  ///< Whether an extra warp calls prepare().
  static constexpr bool kReceives = false;  ///< Whether receive() runs at the end, for what peers send.
  /// Whether only the device knows the tiles and activation rows. If so, begin() finds them before anything
  /// is copied, Memory::num_tiles is the block's number of tiles, and row_of() gives a tile's activation row.
  static constexpr bool kFindsTiles = false;
  struct Memory {};  ///< Per block; filled by prepare() or begin().

  static __device__ __forceinline__ void copy_weights(unsigned to, const CUtensorMap& map, const Tiles& tiles,
                                                      const Memory&, int tile, int chunk, unsigned barrier) {
    copy_box_once(to, map, 0, tiles.begin(tile), 0, chunk, barrier);
  }
};

/// out = in * weight, as described at Product.
struct Stored : PlainTail {
  static constexpr int kHalves = 1;  ///< Weight rows per row of a tile.

  /// Stores the result of row n of tile `tile`. total(n) is its sum over the columns for activation row
  /// `row`, and total(tiles.height + n) is that of the second half.
  template <class T, class Total>
  static __device__ __forceinline__ void store(const Product<T>& p, const Tiles& tiles, const Memory&,
                                               int tile, int row, int n, const Total& total) {
    cuda::store(p, row, 0, tiles.begin(tile) + n, total(n));
  }
};

/// out = silu(gate) * up of the product's two halves, of p.width rows each.
struct Gated : PlainTail {
  static constexpr int kHalves = 2;

  template <class T, class Total>
  static __device__ __forceinline__ void store(const Product<T>& p, const Tiles& tiles, const Memory&,
                                               int tile, int row, int n, const Total& total) {
    const int at = tiles.begin(tile) + n;
    if (at >= p.width) return;
    float gate = total(n);
    float up = total(tiles.height + n);
    if (p.bias != nullptr) {
      gate += load_element(p.bias, p.bias_dtype, at);
      up += load_element(p.bias, p.bias_dtype, p.width + at);
    }
    static_cast<T*>(p.out)[row * p.out_row + at] = from_float<T>(swiglu(gate, up));
  }
};

}  // namespace helix::cuda::few_rows
