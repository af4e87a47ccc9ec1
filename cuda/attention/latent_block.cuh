// SPDX-License-Identifier: Apache-2.0
// What the warps of a block share that attends to latents: sizes, shared memory, and the parts of its work.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/schedule.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/warp_groups.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace helix::cuda {

inline constexpr int kLatentColumns = 512;    ///< Of a key, and all of a value.
inline constexpr int kRopeColumns = 64;       ///< Of a key only.
inline constexpr int kLatentTileTokens = 64;  ///< Of a KV tile.

namespace latent {

/// A KV tile is twice as long as the short ones, and a query tile's partials are 16 times as large.
struct Limits {
  static constexpr int kEpilogueTiles = 3;
  static constexpr int kShortSplitTiles = 2;
  static constexpr int kSplitTiles = 2;
};

inline constexpr int kGroups = 2;  // of consumers
inline constexpr int kConsumers = kGroups * kWarpGroup;
inline constexpr int kThreads = kConsumers + kWarpGroup;
inline constexpr int kGroupColumns = kLatentColumns / kGroups;  // of the values
// A KV tile is copied and released in five units: four of two chunks that are values too, one of rope.
inline constexpr int kUnitChunks = 2;
inline constexpr int kUnitColumns = kUnitChunks * kChunkColumns;
inline constexpr int kGroupUnits = kGroupColumns / kUnitColumns;  // of a group's values
inline constexpr int kRopeUnit = kGroups * kGroupUnits;
inline constexpr int kUnits = kRopeUnit + 1;
inline constexpr int kValueChunks = kLatentColumns / kChunkColumns;
inline constexpr int kChunks = kValueChunks + kRopeColumns / kChunkColumns;
inline constexpr unsigned kRowBytes = kChunkColumns * 2u;  // in a chunk
inline constexpr unsigned kChunkBytes = kLatentTileTokens * kRowBytes;
inline constexpr unsigned kTileBytes = kChunks * kChunkBytes;
inline constexpr int kSteps = kChunkColumns / kProductDepth;  // of a chunk, or of a tile's tokens

/// Named barriers of the block.
enum Barrier { kAllConsumers = 1, kLeadsWeights, kFollowersWeights, kOneGroup };

/// The block's part of a work item that belongs to one query tile.
struct Part {
  QueryTileSpan span;
  KvSplits splits;
  int query_tile;
  int first_token;  // local, of the first KV tile
  int count;        // KV tiles; 0: there are no more parts
  bool is_first;    // of the query tile

  __device__ int tile_token(int i) const { return first_token + i * kLatentTileTokens; }
};

/// The shared memory of a block, of `kBlocks` that have a work item together.
template <int kBlocks>
struct Shared {
  alignas(
      1024) std::byte queries[kTileBytes];  // the last chunk, once it is in registers: the follower's weights
  std::byte kv[2][kTileBytes];
  std::byte weights[kChunkBytes];  // the lead's
  float row[kGroups][kGroupRows];  // max of each group's tile and those before, at the end the sum of weights
  unsigned long long full[2][kUnits];  // of a KV buffer
  unsigned long long empty[2][kUnits];
  unsigned long long part_full[2];
  unsigned long long part_empty[2];
  Part parts[2];  // those that the consumers work on, and the next
  SmallAttentionPlan<kLatentTileTokens, Limits, kBlocks> plan;
};
static_assert(sizeof(Shared<1>) <= 227 * 1024);

using Sums = float[kGroupUnits][kUnitColumns / 2];
using Scores = float[kLatentTileTokens / 2];
using Operand = unsigned[kSteps][4];  // 64 rows x 64 columns in the registers of a warp group

__device__ inline unsigned at(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

/// Number of this block in the schedule.
template <int kBlocks>
__device__ inline int scheduled_block() {
  return static_cast<int>(blockIdx.x) / kBlocks;
}

/// Whether this block asks for the copies of a unit, for all blocks of the cluster.
template <int kBlocks>
__device__ inline bool asks_for(int unit) {
  return kBlocks == 1 || cluster_rank() == (unit < kGroupUnits ? 0u : 1u);
}

/// By one thread of the block.
template <int kBlocks>
__device__ inline void init_barriers(Shared<kBlocks>& s) {
  constexpr unsigned kWarpsOfGroup = kWarpGroup / kWarp;
  for (int buffer = 0; buffer < 2; ++buffer) {
    for (int unit = 0; unit < kUnits; ++unit) {
      barrier_init(at(&s.full[buffer][unit]), 1);
      barrier_init(at(&s.empty[buffer][unit]),
                   asks_for<kBlocks>(unit) ? kBlocks * kWarpsOfGroup : kWarpsOfGroup);
    }
    barrier_init(at(&s.part_full[buffer]), 1);
    barrier_init(at(&s.part_empty[buffer]), kGroups * kWarpsOfGroup);
  }
  fence_barrier_init();
}

/// Keeps the compiler from computing what follows from `x` once for all places: operands would fill
/// registers.
__device__ inline std::uint64_t fresh(std::uint64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

/// Tells the compiler that all lanes have the same `x`: products in a branch that lanes may leave one by
/// one would wait for each other.
__device__ inline int uniform(int x) {
  return __shfl_sync(~0u, x, 0);
}

}  // namespace latent
}  // namespace helix::cuda
