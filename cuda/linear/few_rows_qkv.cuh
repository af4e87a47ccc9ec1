// SPDX-License-Identifier: Apache-2.0
// The tail of a product whose sums are heads of q, k and v: rope, and the append to the pages.
//
// A kernel less on the way from the product to attention. The 8B shape on H200s, in turn, ms: one GPU 3.710
// to 3.698 with 512 tokens and 7.659 to 7.607 with 131072, KVP 2 2.646 to 2.607 and 4.716 to 4.657; with
// eight sequences, 8 layers, 1.196 to 1.187. It is not more because attention waits for the product's shared
// memory now, where it asked for its page lists beside the kernel between.
//
// A short product is in the ring, most of it, when the kernel ahead ends. The tail then holds it up unless it
// has read ahead: TPA 2 2.225 to 2.192 ms.
#pragma once

#include <cstdint>

#include "cuda/elementwise/rotation.cuh"
#include "cuda/kv_cache/appended_tokens.cuh"
#include "cuda/kv_cache/paged_rows.cuh"
#include "cuda/linear/few_rows_block.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda::few_rows {

inline constexpr int kQkvSequences = kWarp;           ///< Most sequences, those without a token too.
inline constexpr int kLanePairs = 2;                  ///< Of a lane of the warp that prepares.
inline constexpr int kQkvPairs = kLanePairs * kWarp;  ///< Most pairs of a block.

/// A tile is `height` pairs of one head: rows n and n + pairs of it, or 2n and 2n + 1. Where the head ends
/// before the tile does, the rest is zeros and nobody's; Product::width counts pairs, those too. Up to
/// kMaxRows activation rows.
template <int kMaxRows>
struct Qkv {
  static constexpr int kHalves = 2;
  static constexpr bool kPrepares = true;
  static constexpr bool kReceives = false;
  static constexpr bool kFindsTiles = false;

  struct Memory {
    Rotation rotations[kQkvPairs * kMaxRows];  // [tile][pair][row]
    std::int64_t page[kMaxRows];
    std::int64_t in_page[kMaxRows];  // of the row's token; -1: not stored here
  };

  /// Rows of keys or of values in the pages.
  struct PageRows {
    PagedRows rows;
    const float* scales;  // [heads] or null
  };

  int head_tiles;
  int pairs;        // of a head
  int first_head;   // of those that this product has
  int query_heads;  // the first ones of all; then as many of k as of v
  int kv_heads;
  bool is_interleaved;
  const float* inverse_frequency;  // [pairs]
  float magnitude;
  AppendedTokens appended;  // of the rows
  PageLists lists;
  std::int64_t page_tokens;
  bool reads_ahead;  // positions, slots and page lists, before the kernel ahead has ended
  PageRows keys;
  PageRows values;
  DType stored_dtype;

  /// Coordinates: columns of a chunk, a head's pairs, their two rows, heads, chunks.
  __device__ __forceinline__ void copy_weights(unsigned to, const CUtensorMap& map, const Tiles& tiles,
                                               const Memory&, int tile, int chunk, unsigned barrier) const {
    const int number = tiles.number(tile);
    copy_box_once(to, map, 0, number % head_tiles * tiles.height, 0, number / head_tiles, chunk, barrier);
  }

  /// By a warp, while the others multiply: the rotations, and where the rows' tokens go. Each trip to memory
  /// queues behind the weights, so it makes two, or three for a CSR list, and loads what is constant ahead.
  template <class T>
  __device__ void prepare(const Product<T>& p, const Tiles& tiles, Memory& memory) const {
    prepare(p, tiles, memory, [] { start_next(); });  // not before: see AttentionParams::reads_ahead
  }

  /// A pair's two sums, as T, turned if it is of q or k, to the output and, of k and v, to the row's token in
  /// the pages.
  template <class T, class Total>
  __device__ __forceinline__ void store(const Product<T>& p, const Tiles& tiles, const Memory& memory,
                                        int tile, int row, int n, const Total& total) const {
    const int pair = pair_of(tiles, tile, n);
    if (pair >= pairs) return;
    const int head = head_of(tiles, tile);
    put(p, memory, head, pair, row, make_pair(p, tiles, memory, tile, row, n, head, pair, total));
  }

 protected:
  /// The two elements of a pair.
  template <class T>
  struct Pair {
    T first;
    T second;
  };

  /// What prepare() does; calls begin() as soon as the kernel ahead has ended.
  template <class T, class Begin>
  __device__ __forceinline__ void prepare(const Product<T>& p, const Tiles& tiles, Memory& memory,
                                          const Begin& begin) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int mine = tiles.mine(p.width) * tiles.height;
    float frequencies[kLanePairs];
#pragma unroll
    for (int k = 0; k < kLanePairs; ++k) {
      const int i = lane + k * kWarp;
      const int pair = pair_of(tiles, i / tiles.height, i % tiles.height);
      frequencies[k] = i < mine && pair < pairs ? inverse_frequency[pair] : 0.0f;
    }
    const auto follow = [&] {
      wait_for_previous();
      begin();
    };
    if (!reads_ahead) follow();
    const bool is_sequence = lane < appended.sequences;
    const std::int32_t end = is_sequence ? appended.query_offsets[lane + 1] : 0;
    const std::int32_t slot = is_sequence ? appended.sequence_slots[lane] : 0;
    const std::int64_t position = lane < p.rows ? appended.positions[lane] : -1;
    unsigned sequence = 0;  // of row `lane`: those that end at or before it come before its own
    for (int row = 0; row < p.rows; ++row) {
      const auto before = static_cast<unsigned>(__popc(__ballot_sync(~0u, is_sequence && end <= row)));
      if (lane == row) sequence = before;
    }
    place_row(lane, position, __shfl_sync(~0u, slot, static_cast<int>(sequence)), p.rows, memory);
    for (int begin = 0; begin < mine * p.rows; begin += kWarp) {
      const int i = begin + lane;
      const int pair = i / p.rows;
      float frequency = 0.0f;
#pragma unroll
      for (int k = 0; k < kLanePairs; ++k) {
        const float other = __shfl_sync(~0u, frequencies[k], pair % kWarp);
        if (pair / kWarp == k) frequency = other;
      }
      const std::int64_t at = __shfl_sync(~0u, position, i % p.rows);
      if (pair < mine) memory.rotations[i] = Rotation::at(at, frequency, magnitude);
    }
    if (reads_ahead) follow();
  }

  /// Pair of its head that is pair `n` of the block's tile `tile`; from `pairs` on it is none.
  __device__ __forceinline__ int pair_of(const Tiles& tiles, int tile, int n) const {
    return tiles.number(tile) % head_tiles * tiles.height + n;
  }
  /// Head of all that the block's tile `tile` is of.
  __device__ __forceinline__ int head_of(const Tiles& tiles, int tile) const {
    return first_head + tiles.number(tile) / head_tiles;
  }

  /// Of a pair's two sums.
  template <class T, class Total>
  __device__ __forceinline__ Pair<T> make_pair(const Product<T>& p, const Tiles& tiles, const Memory& memory,
                                               int tile, int row, int n, int head, int pair,
                                               const Total& total) const {
    const auto found = [&](int of, int at) {
      const float bias = p.bias == nullptr ? 0.0f : load_element(p.bias, p.bias_dtype, head * 2 * pairs + at);
      return to_float(from_float<T>(total(of) + bias));
    };
    float x = found(n, first_of(pair));
    float y = found(tiles.height + n, second_of(pair));
    if (head < query_heads + kv_heads) memory.rotations[(tile * tiles.height + n) * p.rows + row].turn(x, y);
    return {from_float<T>(x), from_float<T>(y)};
  }

  /// A pair to the output and, of k and v, to the row's token in the pages.
  template <class T>
  __device__ __forceinline__ void put(const Product<T>& p, const Memory& memory, int head, int pair, int row,
                                      Pair<T> x) const {
    T* out = static_cast<T*>(p.out) + row * p.out_row + head * 2 * pairs;
    out[first_of(pair)] = x.first;
    out[second_of(pair)] = x.second;
    const std::int64_t in_page = memory.in_page[row];
    if (head < query_heads || in_page < 0) return;
    const bool is_value = head >= query_heads + kv_heads;
    const PageRows& to = is_value ? values : keys;
    const int of = head - query_heads - (is_value ? kv_heads : 0);
    std::byte* stored = to.rows.at(memory.page[row], of, in_page);
    const float scale = to.scales == nullptr ? 1.0f : to.scales[of];
    const auto store = [&](int element, float value) {
      store_element(stored, stored_dtype, element, scale == 1.0f ? value : value / scale);
    };
    store(first_of(pair), to_float(x.first));
    store(second_of(pair), to_float(x.second));
  }

 private:
  /// Elements of a head that are a pair.
  __device__ __forceinline__ int first_of(int pair) const {
    return is_interleaved ? 2 * pair : pair;
  }
  __device__ __forceinline__ int second_of(int pair) const {
    return is_interleaved ? 2 * pair + 1 : pair + pairs;
  }

  /// By the lane of a row: where its token goes in the pages.
  __device__ __forceinline__ void place_row(int row, std::int64_t position, std::int64_t slot, int rows,
                                            Memory& memory) const {
    if (row >= rows) return;
    std::int64_t page = 0;
    std::int64_t in_page = -1;
    if (appended.has(row, position)) {
      const std::int64_t local = appended.layout.local(position);
      page = lists.pages[lists.first_of(slot) + local / page_tokens];
      in_page = local % page_tokens;
    }
    memory.page[row] = page;
    memory.in_page[row] = in_page;
  }
};

}  // namespace helix::cuda::few_rows
