// SPDX-License-Identifier: Apache-2.0
// The tail of a product whose sums are heads of q, k and v: rope, and the append to the pages.
//
// Saves a kernel between the product and attention. The 8B shape on H200s, measured alternately, ms: one GPU
// 3.710 to 3.698 with 512 tokens and 7.659 to 7.607 with 131072; KVP 2 2.646 to 2.607 and 4.716 to 4.657;
// eight sequences, 8 layers, 1.196 to 1.187. It is not more because attention now waits for the product's
// shared memory; before, it read its page lists while the kernel between ran.
//
// Most of a short product's weights are in the ring when the previous kernel ends. The tail then delays the
// product unless it has read ahead: TPA 2 2.225 to 2.192 ms.
#pragma once

#include <cstdint>

#include "cuda/elementwise/rotation.cuh"
#include "cuda/kv_cache/appended_tokens.cuh"
#include "cuda/kv_cache/paged_rows.cuh"
#include "cuda/linear/few_rows_block.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda::few_rows {

inline constexpr int kQkvSequences = kWarp;           ///< Most sequences, including those without a token.
inline constexpr int kLanePairs = 2;                  ///< Per lane of the warp that prepares.
inline constexpr int kQkvPairs = kLanePairs * kWarp;  ///< Most pairs of a block.

/// A tile is `height` pairs of one head: its rows n and n + pairs, or 2n and 2n + 1. If the head ends before
/// the tile does, the rest of the tile is zeros and is not stored; Product::width counts those pairs too.
/// Takes up to kMaxRows activation rows.
template <int kMaxRows>
struct Qkv {
  static constexpr int kHalves = 2;
  static constexpr bool kPrepares = true;
  static constexpr bool kReceives = false;
  static constexpr bool kFindsTiles = false;

  struct Memory {
    Rotation rotations[kQkvPairs * kMaxRows];  // [tile][pair][row]
    std::int64_t page[kMaxRows];
    std::int64_t in_page[kMaxRows];  // place of the row's token in its page; -1: not stored here
  };

  /// Rows of keys or of values in the pages.
  struct PageRows {
    PagedRows rows;
    const float* scales;  // [heads] or null
  };

  int head_tiles;
  int pairs;        // of a head
  int first_head;   // first head that this product computes
  int query_heads;  // come first; then as many of k as of v
  int kv_heads;
  bool is_interleaved;
  const float* inverse_frequency;  // [pairs]
  float magnitude;
  AppendedTokens appended;  // for the activation rows
  PageLists lists;
  std::int64_t page_tokens;
  bool reads_ahead;  // reads positions, slots and page lists before the previous kernel ends
  PageRows keys;
  PageRows values;
  DType stored_dtype;

  /// Map coordinates: columns of a chunk, a head's pairs, their two rows, heads, chunks.
  __device__ __forceinline__ void copy_weights(unsigned to, const CUtensorMap& map, const Tiles& tiles,
                                               const Memory&, int tile, int chunk, unsigned barrier) const {
    const int number = tiles.number(tile);
    copy_box_once(to, map, 0, number % head_tiles * tiles.height, 0, number / head_tiles, chunk, barrier);
  }

  /// By one warp while the others multiply: the rotations, and where the rows' tokens go in the pages. Memory
  /// accesses queue after the weights in flight, so it makes two trips, three for a CSR list, and loads
  /// constants ahead.
  template <class T>
  __device__ void prepare(const Product<T>& p, const Tiles& tiles, Memory& memory) const {
    prepare(p, tiles, memory, [] { start_next(); });  // not before: see AttentionParams::reads_ahead
  }

  /// Stores a pair's two sums, as T and rotated if of q or k, to the output. A pair of k or v is also stored
  /// in the page row of its token.
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

  /// Does the work of prepare(); calls begin() as soon as the previous kernel has ended.
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
    unsigned sequence = 0;  // of row `lane`: the number of sequences that end at or before it
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

  /// Index within its head of pair `n` of the block's tile `tile`. An index of `pairs` or more is no pair.
  __device__ __forceinline__ int pair_of(const Tiles& tiles, int tile, int n) const {
    return tiles.number(tile) % head_tiles * tiles.height + n;
  }
  /// Index, among all heads, of the head of the block's tile `tile`.
  __device__ __forceinline__ int head_of(const Tiles& tiles, int tile) const {
    return first_head + tiles.number(tile) / head_tiles;
  }

  /// Makes a pair from its two sums.
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

  /// Stores a pair to the output and, if of k or v, in the page row of its token.
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
  /// The elements of a head that form a pair.
  __device__ __forceinline__ int first_of(int pair) const {
    return is_interleaved ? 2 * pair : pair;
  }
  __device__ __forceinline__ int second_of(int pair) const {
    return is_interleaved ? 2 * pair + 1 : pair + pairs;
  }

  /// Finds where a row's token goes in the pages. Called by the lane of that row.
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
