// SPDX-License-Identifier: Apache-2.0
// The tails of products of few rows that multiply one token by its chosen experts (compute capability 9.0):
// of gate and up, and of down with the weighted sum.
//
// Which experts is known on the device alone, when the router has ended, so tiles are found there. The
// product of down knows them before gate and up has ended, and begins its copies meanwhile.
#pragma once

#include <cstdint>

#include "cuda/linear/few_rows_block.cuh"
#include "cuda/moe/expert_items.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

inline constexpr int kMostTokenChoices = kWarp;  ///< A warp finds those of this rank.
inline constexpr int kMostTokenFeatures = 16;    ///< Of a tile.

/// What both have in common. Coordinates of their maps: columns of a chunk, rows of a half, halves, chunks,
/// experts.
struct TokenExperts {
  static constexpr bool kPrepares = false;
  static constexpr bool kReceives = false;
  static constexpr bool kFindsTiles = true;

  struct Memory {
    int count;  // of the choices that are this rank's, in their order
    std::int32_t experts[kMostTokenChoices];
    std::int32_t choices[kMostTokenChoices];
    float weights[kMostTokenChoices];
    float sums[kMostTokenFeatures];  // of a tile's features over the experts so far
  };

  Choices choices;
  int tiles_per_expert;

 protected:
  /// Begins begin(): by a warp, which has `memory` to itself.
  __device__ __forceinline__ void find_experts(Memory& memory) const {
    if (threadIdx.x >= kWarp) return;
    const int choice = static_cast<int>(threadIdx.x);
    const bool is_choice = choice < choices.num_pairs;
    const int expert = is_choice ? local_expert(choices, choice) : -1;
    const float weight = is_choice ? __ldcg(choices.weights + choice) : 0.0f;
    const unsigned all = __ballot_sync(~0u, expert >= 0);
    if (expert >= 0) {
      const int at = __popc(all & ((1u << choice) - 1));
      memory.experts[at] = expert;
      memory.choices[at] = choice;
      memory.weights[at] = weight;
    }
    if (choice == 0) memory.count = __popc(all);
  }
};

/// hidden[choice, f] = silu(g) * u. An expert's tiles follow each other, and all of them are dealt out
/// evenly.
struct TokenGateUp : TokenExperts {
  static constexpr int kHalves = 2;

  __device__ __forceinline__ void begin(Memory& memory) const {
    wait_for_previous();
    start_next();  // not before: down begins with the experts
    find_experts(memory);
  }

  __device__ __forceinline__ int tiles_of_block(const few_rows::Tiles&, const Memory& memory) const {
    return max(0, min(share(memory), memory.count * tiles_per_expert - number(memory, 0)));
  }
  /// The token, whichever the expert.
  static __device__ __forceinline__ int row_of(const Memory&, int) { return 0; }

  __device__ __forceinline__ void copy_weights(unsigned to, const CUtensorMap& map,
                                               const few_rows::Tiles& tiles, const Memory& memory, int tile,
                                               int chunk, unsigned barrier) const {
    const int at = number(memory, tile);
    copy_box_once(to, map, 0, at % tiles_per_expert * tiles.height, 0, chunk,
                  memory.experts[at / tiles_per_expert], barrier);
  }

  template <class T, class Total>
  __device__ __forceinline__ void store(const Product<T>& p, const few_rows::Tiles& tiles,
                                        const Memory& memory, int tile, int, int n,
                                        const Total& total) const {
    const int at = number(memory, tile);
    const int feature = at % tiles_per_expert * tiles.height + n;
    if (feature >= p.width) return;
    static_cast<T*>(p.out)[memory.choices[at / tiles_per_expert] * p.out_row + feature] =
        from_float<T>(swiglu(total(n), total(tiles.height + n)));
  }

 private:
  /// Most tiles of a block.
  __device__ __forceinline__ int share(const Memory& memory) const {
    const int blocks = static_cast<int>(gridDim.x);
    return (memory.count * tiles_per_expert + blocks - 1) / blocks;
  }
  /// Number of the block's tile `tile` among all.
  __device__ __forceinline__ int number(const Memory& memory, int tile) const {
    return static_cast<int>(blockIdx.x) * share(memory) + tile;
  }
};

/// out[f] += sum over the choices, in their order, of weight * (hidden[choice] . weight[f]). A block has the
/// tiles of the same features of all experts one after the other.
struct TokenDown : TokenExperts {
  static constexpr int kHalves = 1;

  __device__ __forceinline__ void begin(Memory& memory) const {
    start_next();
    find_experts(memory);
  }

  __device__ __forceinline__ int tiles_of_block(const few_rows::Tiles& tiles, const Memory& memory) const {
    const int left = tiles_per_expert - static_cast<int>(blockIdx.x) * tiles.count;
    return max(0, min(tiles.count, left)) * memory.count;
  }
  __device__ __forceinline__ int row_of(const Memory& memory, int tile) const {
    return memory.choices[tile % memory.count];
  }

  __device__ __forceinline__ void copy_weights(unsigned to, const CUtensorMap& map,
                                               const few_rows::Tiles& tiles, const Memory& memory, int tile,
                                               int chunk, unsigned barrier) const {
    copy_box_once(to, map, 0, tiles.begin(tile / memory.count), 0, chunk, memory.experts[tile % memory.count],
                  barrier);
  }

  /// A feature is one thread's in all of its tiles.
  template <class T, class Total>
  __device__ __forceinline__ void store(const Product<T>& p, const few_rows::Tiles& tiles, Memory& memory,
                                        int tile, int, int n, const Total& total) const {
    const int expert = tile % memory.count;
    float sum = expert == 0 ? 0.0f : memory.sums[n];
    sum = fmaf(memory.weights[expert], total(n), sum);
    memory.sums[n] = sum;
    const int feature = tiles.begin(tile / memory.count) + n;
    if (expert < memory.count - 1 || feature >= p.width) return;
    T& out = static_cast<T*>(p.out)[feature];
    out = from_float<T>(to_float(out) + sum);
  }
};

}  // namespace helix::cuda
