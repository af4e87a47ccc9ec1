// SPDX-License-Identifier: Apache-2.0
// What the warps of a block share that attends to latents: sizes, shared memory, and the parts of its work.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/attention/kernel.hpp"
#include "cuda/attention/schedule.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/warp_groups.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace helix::cuda {

inline constexpr int kLatentColumns = 512;    ///< Of a key, and all of a value.
inline constexpr int kRopeColumns = 64;       ///< Of a key only.
inline constexpr int kLatentTileTokens = 64;  ///< Of a KV tile.

/// Whether rows are latents of the size that these kernels are built for.
inline bool is_latent_shape(std::int64_t head_dim, std::int64_t value_dim) {
  return head_dim == kLatentColumns + kRopeColumns && value_dim == kLatentColumns;
}

/// What Hopper's kernels over latents need whatever type these have: the device, q of 16 bits, aligned rows
/// that the copy engine can walk.
inline bool fits_latents(const AttentionCall& call) {
  const KvFormat& format = call.kv.format;
  return call.is_hopper && format.is_latent && is_latent_shape(format.head_dim, format.value_dim) &&
         size_bytes(call.dtype) == 2 && call.q_alignment == 16 && call.kv_alignment == 16 &&
         call.has_tensor_maps;
}

inline constexpr int kMaxLatentSplits = 256;  ///< Of a query tile.

/// Blocks to launch, `item_blocks` of which take a work item together.
inline int latent_blocks(const AttentionGrid& grid, int item_blocks) {
  return std::clamp(grid.blocks / kBlocksPerSm / item_blocks, 1, kMaxLatentSplits) * item_blocks;
}

namespace latent {

/// A KV tile is twice as long as the short ones, and a query tile's partials are 16 times as large.
struct Limits : ShortTileLimits {
  static constexpr int kEpilogueTiles = 3;
  static constexpr int kShortSplitTiles = 2;
  static constexpr int kSplitTiles = 2;
  static constexpr int kPaddingTiles = 6;  // 10 us and 1.7 a KV tile, of two blocks (H100)
};

inline constexpr int kGroups = 2;  // of consumers
inline constexpr int kConsumers = kGroups * kWarpGroup;
inline constexpr int kThreads = kConsumers + kWarpGroup;
inline constexpr int kGroupColumns = kLatentColumns / kGroups;  // of the values
inline constexpr int kValueChunks = kLatentColumns / kChunkColumns;
inline constexpr int kChunks = kValueChunks + kRopeColumns / kChunkColumns;
// A KV tile is freed in two halves, the values of one group each, and comes in four units of two chunks; the
// last one has the rope chunk too.
inline constexpr int kHalves = kGroups;
inline constexpr int kHalfChunks = kValueChunks / kHalves;
inline constexpr int kUnitChunks = 2;
inline constexpr int kUnits = kValueChunks / kUnitChunks;
inline constexpr int kHalfUnits = kUnits / kHalves;
inline constexpr int kProducerWarps = 2 * kHalves;         // a warp for each half of each KV buffer
inline constexpr unsigned kRowBytes = kChunkColumns * 2u;  // in a chunk
inline constexpr unsigned kChunkBytes = kLatentTileTokens * kRowBytes;
inline constexpr unsigned kTileBytes = kChunks * kChunkBytes;
inline constexpr int kSteps = kChunkColumns / kProductDepth;  // of a chunk, or of a tile's tokens

/// Weights of T are powers of two of a score over a row's pivot: it is raised where one exceeds
/// 2^kMaxExponent, so that sums are scaled rarely, and the largest becomes 2^kTopExponent. In f16 that is
/// well above 1, so that what is 2^-31 of the largest still counts.
template <class T>
inline constexpr float kTopExponent = std::is_same_v<T, f16> ? 7.0f : 0.0f;
template <class T>
inline constexpr float kMaxExponent = kTopExponent<T> + 8.0f;

/// Named barriers of the block.
enum Barrier { kAllConsumers = 1, kLeadsWeights, kFollowersWeights, kOneGroup };

/// The block's part of a work item that belongs to one query tile.
struct Part {
  QueryTileSpan span;
  KvSplits splits;  // told later than the rest, before the first KV tile is there
  int query_tile;
  int first_token;  // local, of the first KV tile
  int count;        // KV tiles; 0: there are no more parts
  bool is_first;    // of the query tile

  __device__ int tile_token(int i) const { return first_token + i * kLatentTileTokens; }
};

/// The schedule, and at the beginning what is known of the query tiles.
template <int kBlocks>
struct Plan : SmallAttentionPlan<kLatentTileTokens, Limits, kBlocks> {
  /// In shared memory, until there are weights.
  static __device__ QueryTileSpan& span(int u);
  static __device__ void keep(int u, const QueryTileSpan& of) { span(u) = of; }
};

/// The shared memory of a block, of `kBlocks` that have a work item together.
template <int kBlocks>
struct Shared {
  alignas(
      1024) std::byte queries[kTileBytes];  // the last chunk, once it is in registers: the follower's weights
  std::byte kv[2][kTileBytes];
  alignas(1024) std::byte weights[kChunkBytes];  // the lead's; before any, the spans of the query tiles
  float row[kGroups][kGroupRows];                // max of each group's tile and those before
  unsigned long long full[2][kUnits];            // of a KV buffer
  unsigned long long empty[2][kHalves];
  unsigned long long part_full[2];
  unsigned long long part_empty[2];
  Part parts[2];  // those that the consumers work on, and the next
  Plan<kBlocks> plan;
};
static_assert(kMaxQueryTiles * sizeof(QueryTileSpan) <= kChunkBytes);
static_assert(sizeof(Shared<1>) <= 227 * 1024);

template <int kBlocks>
__device__ __forceinline__ Shared<kBlocks>& shared() {
  extern __shared__ __align__(1024) std::byte memory[];
  return *reinterpret_cast<Shared<kBlocks>*>(memory);
}

template <int kBlocks>
__device__ __forceinline__ QueryTileSpan& Plan<kBlocks>::span(int u) {
  return reinterpret_cast<QueryTileSpan*>(shared<kBlocks>().weights)[u];
}

using Sums = float[kGroupColumns / 2];
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

/// Number of this block among those of a work item.
template <int kBlocks>
__device__ inline int block_of_item() {
  return static_cast<int>(blockIdx.x) % kBlocks;
}

/// Chunks of the queries that are in registers, the last ones: products of 64 columns read more shared memory
/// than there is time for.
inline constexpr int kHeldChunks = 3;
inline constexpr int kConsumerRegisters = 240;
inline constexpr int kProducerRegisters = 24;
// As many as the block was launched with, or the last to take some would wait for ever.
static_assert(kConsumers * kConsumerRegisters + kWarpGroup * kProducerRegisters <=
              65536 / kThreads / 8 * 8 * kThreads);

/// By one thread of the block.
template <int kBlocks>
__device__ inline void init_barriers(Shared<kBlocks>& s) {
  constexpr unsigned kWarpsOfGroup = kWarpGroup / kWarp;
  for (int buffer = 0; buffer < 2; ++buffer) {
    for (int unit = 0; unit < kUnits; ++unit) barrier_init(at(&s.full[buffer][unit]), 1);
    for (int half = 0; half < kHalves; ++half) barrier_init(at(&s.empty[buffer][half]), kWarpsOfGroup);
    barrier_init(at(&s.part_full[buffer]), 1);
    barrier_init(at(&s.part_empty[buffer]), kGroups * kWarpsOfGroup + kProducerWarps - 1);
  }
  fence_barrier_init();
}

/// An operand of which only the lower word is computed: a carry into the upper one would take as long as the
/// product. The compiler is kept from computing operands once for all places: they would fill registers.
struct OperandPlace {
  unsigned low;

  __device__ __forceinline__ explicit OperandPlace(std::uint64_t operand)
      : low(static_cast<unsigned>(operand)) {
    asm volatile("" : "+r"(low));
  }
  /// The same, computed once a warp where branches hide from the compiler that all lanes have the same (8
  /// sequences of 131072 tokens: e4m3 474 us, so 463; the kernel of 16 bits 413, so 420).
  static __device__ __forceinline__ OperandPlace once_a_warp(std::uint64_t operand) {
    OperandPlace place;
    place.low = warp_uniform(static_cast<unsigned>(operand));
    return place;
  }
  __device__ __forceinline__ std::uint64_t at(unsigned bytes) const {
    constexpr auto kHigh = static_cast<std::uint64_t>(rows_operand(0) >> 32);
    static_assert(kHigh == columns_operand(0, 0) >> 32);
    return kHigh << 32 | (low + bytes / 16u);
  }

 private:
  OperandPlace() = default;
};

/// Tells the compiler that all lanes have the same `x`: products in a branch that lanes may leave one by
/// one would wait for each other. warp_uniform() tells it more, which costs the kernel of 16 bits 2 %.
__device__ inline int uniform(int x) {
  return __shfl_sync(~0u, x, 0);
}

/// Nothing that was asked for is on its way any more. The compiler serialises products that are on their
/// way where branches of which it cannot tell that a warp takes them as one meet, so there none is.
template <class... Registers>
__device__ __forceinline__ void finish(Registers&... registers) {
  products_wait<0>();
  (pin(registers), ...);
}

}  // namespace latent
}  // namespace helix::cuda
