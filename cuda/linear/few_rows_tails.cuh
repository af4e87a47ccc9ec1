// SPDX-License-Identifier: Apache-2.0
// Tails of products of few rows: what becomes of a sum once it is whole, and so which weight rows a tile has.
#pragma once

#include <cstdint>

#include "cuda/linear/few_rows_block.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"

namespace helix::cuda::few_rows {

/// What tails have in common that need no more than the sums. Coordinates of their map: columns of a chunk,
/// rows of a half, halves, chunks.
struct PlainTail {
  static constexpr bool kPrepares = false;  ///< Whether a warp of its own has prepare() to do.
  static constexpr bool kReceives = false;  ///< Whether receive() of what peers send ends it.
  /// Whether the device knows which tiles and activation rows there are: begin() finds them before anything
  /// is copied, and Memory::num_tiles says how many tiles are the block's, row_of() a tile's activation row.
  static constexpr bool kFindsTiles = false;
  struct Memory {};  ///< Of a block, that prepare() or begin() fills.

  static __device__ __forceinline__ void copy_weights(unsigned to, const CUtensorMap& map, const Tiles& tiles,
                                                      const Memory&, int tile, int chunk, unsigned barrier) {
    copy_box_once(to, map, 0, tiles.begin(tile), 0, chunk, barrier);
  }
};

/// out = in * weight, as Product says.
struct Stored : PlainTail {
  static constexpr int kHalves = 1;  ///< Weight rows for each row of a tile.

  /// Stores what is made of row n of tile `tile`, of which total(n) is the sum over the columns for
  /// activation row `row`; total(tiles.height + n) is the second half's.
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
