// SPDX-License-Identifier: Apache-2.0
// Tails of products of few rows that multiply a few tokens by their chosen experts (compute capability 9.0):
// one of gate and up, and one of down with the weighted sum.
//
// Each expert that some token chose multiplies all tokens, because rows cost tensor cores nothing while
// memory is the limit. Results of tokens that did not choose it are not stored. Only the device knows the
// chosen experts, once the router has ended, so the kernels find their tiles there. Down knows them before
// gate and up has ended, and starts its copies meanwhile.
#pragma once

#include <cstdint>

#include "cuda/linear/few_rows_block.cuh"
#include "cuda/moe/expert_items.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/warp_groups.cuh"

namespace helix::cuda {

/// Most (token, choice) pairs that a shape of up to `rows` tokens takes.
constexpr int most_few_rows_pairs(int rows) {
  return 8 * (rows < 4 ? 4 : rows);
}

/// Base of both tails, for shape S. Map coordinates: columns of a chunk, rows of a half, halves, chunks,
/// experts.
template <class S>
struct FewRowsExperts {
  static constexpr bool kPrepares = false;
  static constexpr bool kReceives = false;
  static constexpr bool kFindsTiles = true;
  static constexpr int kMaxPairs = most_few_rows_pairs(S::kRows);
  static constexpr int kPairsMeet = 3;  // barrier of kMaxPairs threads, one per pair
  static_assert(kMaxPairs <= few_rows::kThreads && kMaxPairs % kWarp == 0);

  struct Memory {
    unsigned chosen[kMaxLocalExperts / kWarp];  // bit e: a token chose expert e
    std::int32_t expert_of[kMaxPairs];          // -1: another rank's
    float weight_of[kMaxPairs];
    int count;                            // number of chosen experts
    int first_tile;                       // of the block, among all tiles of gate and up
    int num_tiles;                        // of the block
    std::int32_t experts[kMaxPairs];      // chosen experts, ascending
    unsigned tokens[kMaxPairs];           // bit t: token t chose the expert
    float weights[kMaxPairs][S::kRows];   // the token's weight for the expert
    float sums[S::kRows][S::kTileWidth];  // of down's tile, over the experts so far
  };

  Choices choices;
  Divisor top_k;
  Divisor tiles_per_expert;
  int num_tokens;

 protected:
  /// Expert and features of a tile.
  struct Place {
    int expert;  // index in Memory::experts
    int part;    // index among the expert's feature tiles, or the block's
  };

  /// Prepares find_experts(), before the choices are known.
  __device__ __forceinline__ void clear(Memory& memory) const {
    const int pair = static_cast<int>(threadIdx.x);
    if (pair >= kMaxPairs) return;
    for (int word = pair; word < words(); word += kMaxPairs) memory.chosen[word] = 0;
    memory.tokens[pair] = 0;
    group_sync(kPairsMeet, kMaxPairs);
  }

  /// Fills the memory except the block's tiles and sums. Called by all threads, before a barrier.
  __device__ __forceinline__ void find_experts(Memory& memory) const {
    const int pair = static_cast<int>(threadIdx.x);
    if (pair >= kMaxPairs) return;
    const bool is_pair = pair < choices.num_pairs;
    const int token = pair / top_k;
    const int choice = pair % top_k;
    const int expert = is_pair ? local_expert(choices, token, choice) : -1;
    memory.expert_of[pair] = expert;
    memory.weight_of[pair] =
        is_pair ? __ldcg(choices.weights + token * choices.weight_stride + choice) : 0.0f;
    if (expert >= 0) atomicOr(&memory.chosen[expert / kWarp], 1u << expert % kWarp);
    group_sync(kPairsMeet, kMaxPairs);

    int before = 0;  // chosen experts with a lower index
    int count = 0;
    for (int word = 0; word < words(); ++word) {
      const unsigned chosen = memory.chosen[word];
      const int bits = expert - word * kWarp;
      if (bits > 0) before += __popc(bits < kWarp ? chosen & ((1u << bits) - 1) : chosen);
      count += __popc(chosen);
    }
    if (pair == 0) memory.count = count;
    if (expert < 0) return;
    memory.experts[before] = expert;
    atomicOr(&memory.tokens[before], 1u << token);
    float weight = 0.0f;  // sum over the token's choices of this expert, usually one
    for (int other = token * top_k; other < (token + 1) * top_k; ++other)
      if (memory.expert_of[other] == expert) weight += memory.weight_of[other];
    memory.weights[before][token] = weight;
  }

 private:
  __device__ __forceinline__ int words() const { return (choices.num_experts + kWarp - 1) / kWarp; }
};

/// hidden[n, t, f] = silu(g) * u for the n-th expert and the tokens that chose it. The tiles of an expert are
/// consecutive, and all tiles are divided evenly among blocks.
template <class S>
struct ExpertsGateUp : FewRowsExperts<S> {
  using Memory = typename FewRowsExperts<S>::Memory;
  static constexpr int kHalves = 2;

  __device__ __forceinline__ void begin(const few_rows::Tiles&, Memory& memory) const {
    this->clear(memory);
    wait_for_previous();
    start_next();  // not before: down then reads the choices
    this->find_experts(memory);
    __syncthreads();
    if (threadIdx.x != 0) return;
    const int all = memory.count * this->tiles_per_expert;
    const auto blocks = static_cast<int>(gridDim.x);
    const int share = (all + blocks - 1) / blocks;
    memory.first_tile = static_cast<int>(blockIdx.x) * share;
    memory.num_tiles = max(0, min(share, all - memory.first_tile));
  }
  /// The activation rows are the tokens, for every expert.
  static __device__ __forceinline__ int row_of(const Memory&, int) { return 0; }

  __device__ __forceinline__ void copy_weights(unsigned to, const CUtensorMap& map,
                                               const few_rows::Tiles& tiles, const Memory& memory, int tile,
                                               int chunk, unsigned barrier) const {
    const auto [expert, part] = place(memory, tile);
    copy_box_once(to, map, 0, part * tiles.height, 0, chunk, memory.experts[expert], barrier);
  }

  template <class T, class Total>
  __device__ __forceinline__ void store(const Product<T>& p, const few_rows::Tiles& tiles,
                                        const Memory& memory, int tile, int token, int n,
                                        const Total& total) const {
    const auto [expert, part] = place(memory, tile);
    const int feature = part * tiles.height + n;
    if (feature >= p.width || (memory.tokens[expert] >> token & 1) == 0) return;
    static_cast<T*>(p.out)[(std::int64_t{expert} * p.rows + token) * p.out_row + feature] =
        from_float<T>(swiglu(total(n), total(tiles.height + n)));
  }

 private:
  __device__ __forceinline__ typename FewRowsExperts<S>::Place place(const Memory& memory, int tile) const {
    const int at = memory.first_tile + tile;
    return {at / this->tiles_per_expert, at % this->tiles_per_expert};
  }
};

/// out[t, f] += sum over the token's experts, ascending, of weight * (hidden[n, t] . weight[f]). A token's
/// sum does not depend on the other tokens. A block takes the tiles of the same features for all experts, one
/// after another.
template <class S>
struct ExpertsDown : FewRowsExperts<S> {
  using Memory = typename FewRowsExperts<S>::Memory;
  static constexpr int kHalves = 1;

  __device__ __forceinline__ void begin(const few_rows::Tiles& tiles, Memory& memory) const {
    start_next();
    this->clear(memory);
    this->find_experts(memory);
    __syncthreads();
    if (threadIdx.x != 0) return;
    const int left = this->tiles_per_expert - tiles.number(0);
    memory.num_tiles = max(0, min(tiles.count, left)) * memory.count;
  }
  /// Each expert has its own rows, one per token.
  __device__ __forceinline__ int row_of(const Memory& memory, int tile) const {
    return place(memory, tile).expert * this->num_tokens;
  }

  __device__ __forceinline__ void copy_weights(unsigned to, const CUtensorMap& map,
                                               const few_rows::Tiles& tiles, const Memory& memory, int tile,
                                               int chunk, unsigned barrier) const {
    const auto [expert, part] = place(memory, tile);
    copy_box_once(to, map, 0, tiles.begin(part), 0, chunk, memory.experts[expert], barrier);
  }

  /// The same thread handles a token's feature in all of its tiles.
  template <class T, class Total>
  __device__ __forceinline__ void store(const Product<T>& p, const few_rows::Tiles& tiles, Memory& memory,
                                        int tile, int token, int n, const Total& total) const {
    const auto [expert, part] = place(memory, tile);
    float sum = expert == 0 ? 0.0f : memory.sums[token][n];
    if (memory.tokens[expert] >> token & 1) sum = fmaf(memory.weights[expert][token], total(n), sum);
    memory.sums[token][n] = sum;
    const int feature = tiles.begin(part) + n;
    if (expert < memory.count - 1 || feature >= p.width) return;
    T& out = static_cast<T*>(p.out)[token * p.out_row + feature];
    out = from_float<T>(to_float(out) + sum);
  }

 private:
  /// A block has few parts: a loop, no division.
  static __device__ __forceinline__ typename FewRowsExperts<S>::Place place(const Memory& memory, int tile) {
    int part = 0;
    for (; tile >= memory.count; tile -= memory.count) ++part;
    return {tile, part};
  }
};

}  // namespace helix::cuda
