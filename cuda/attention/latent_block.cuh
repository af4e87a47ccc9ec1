// SPDX-License-Identifier: Apache-2.0
// The block of the kernel over latents: sizes, shared memory, barriers and the parts of its work item.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/attention/kernel.hpp"
#include "cuda/attention/latent_shape.hpp"
#include "cuda/attention/schedule.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/warp_groups.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace helix::cuda {

inline constexpr int kLatentTileTokens = 64;  ///< Tokens of a KV tile.

/// Whether boxes of TMA that hold 8 tokens or more divide the pages. Smaller boxes take as much time each as
/// large ones, and load units copy the rows instead.
inline bool has_latent_boxes(const KvFormat& format) {
  return format.page_tokens % kSwizzleRows == 0;
}

/// Whether a call has what all Hopper kernels over latents need, whatever the type of the cache: the device,
/// q of 16 bits, aligned rows that TMA, if it copies them, can address.
inline bool fits_latents(const AttentionCall& call) {
  const KvFormat& format = call.kv.format;
  return call.is_hopper && format.is_latent && is_latent_shape(format.head_dim, format.value_dim) &&
         size_bytes(call.dtype) == 2 && call.q_alignment == 16 && call.kv_alignment == 16 &&
         (call.has_tensor_maps || !has_latent_boxes(format));
}

inline constexpr int kMaxLatentSplits = 256;  ///< Most KV splits of a query tile.

/// Blocks to launch, if `item_blocks` of them share a work item.
inline int latent_blocks(const AttentionGrid& grid, int item_blocks) {
  return std::clamp(grid.blocks / kBlocksPerSm / item_blocks, 1, kMaxLatentSplits) * item_blocks;
}

namespace latent {

/// Limits of KV splits. Compared with ShortTileLimits, KV tiles are twice as long and the split partials of a
/// query tile 16 times as large.
struct Limits : ShortTileLimits {
  static constexpr int kEpilogueTiles = 3;
  static constexpr int kShortSplitTiles = 2;
  static constexpr int kSplitTiles = 2;
  // prologue and epilogue take 10 us, a KV tile 1.7 (two blocks, H100)
  static constexpr int kPaddingTiles = 6;
  /// Most KV tiles by which a block may be late where whole query tiles are dealt out (dealing.cuh). The
  /// other blocks leave it more of clock and memory: late by up to 24 and in equal shares 100 sequences of up
  /// to 8192 tokens take 222 and 244 us, 256 of up to 16384 925 and 952 (128 heads, H200). By 36 it does not
  /// pay: 120 and 107 us for 70 of 2048.
  static constexpr int kLateTiles = 24;
  /// Fewest rows of query tiles that are dealt out. Fewer are bound by memory, which late blocks leave to
  /// few: 200 sequences of up to 8192 tokens with 16 heads 277 us, and 257 in equal shares.
  static constexpr int kDealtRows = kGroupRows;
};

inline constexpr int kGroups = 2;  // consumer warp groups
inline constexpr int kConsumers = kGroups * kWarpGroup;
inline constexpr int kThreads = kConsumers + kWarpGroup;
inline constexpr int kGroupColumns = kLatentColumns / kGroups;  // value columns of a consumer group
inline constexpr int kValueChunks = kLatentColumns / kChunkColumns;
inline constexpr int kChunks = kValueChunks + kRopeColumns / kChunkColumns;
// A KV tile is released in two halves, each with the value columns of one consumer group. It arrives in four
// units of two chunks; the last unit also has the rope chunk.
inline constexpr int kHalves = kGroups;
inline constexpr int kHalfChunks = kValueChunks / kHalves;
inline constexpr int kUnitChunks = 2;
inline constexpr int kUnits = kValueChunks / kUnitChunks;
inline constexpr int kHalfUnits = kUnits / kHalves;
inline constexpr int kProducerWarps = 2 * kHalves;         // a warp for each half of each KV buffer
inline constexpr unsigned kRowBytes = kChunkColumns * 2u;  // bytes of a row within a chunk
inline constexpr unsigned kChunkBytes = kLatentTileTokens * kRowBytes;
inline constexpr unsigned kTileBytes = kChunks * kChunkBytes;
// wgmma steps along a chunk's columns, or along a tile's tokens
inline constexpr int kSteps = kChunkColumns / kProductDepth;

/// A weight is 2^(score - pivot), rounded to T. A row's pivot is raised only when a weight would exceed
/// 2^kMaxExponent, so that sums are rarely rescaled; the largest weight then becomes 2^kTopExponent. In f16
/// that is well above 1, so that weights down to 2^-31 of the largest still count.
template <class T>
inline constexpr float kTopExponent = std::is_same_v<T, f16> ? 7.0f : 0.0f;
template <class T>
inline constexpr float kMaxExponent = kTopExponent<T> + 8.0f;

/// Named barriers of the block.
enum Barrier { kAllConsumers = 1, kLeadsWeights, kFollowersWeights, kFirstCopies, kOneGroup };

/// The part of a block's work item that belongs to one query tile.
struct Part {
  QueryTileSpan span;
  KvSplits splits;  // written after the other fields, before the first KV tile is there
  int query_tile;
  int first_token;  // first local token of the first KV tile
  int count;        // KV tiles; 0 ends the work item
  bool is_first;    // whether it has the query tile's first KV tile

  __device__ int tile_token(int i) const { return first_token + i * kLatentTileTokens; }
};

/// The schedule and, until the first weights are written, the spans of the query tiles.
template <int kBlocks>
struct Plan : SmallAttentionPlan<kLatentTileTokens, Limits, kBlocks> {
  /// Lies in the memory of the weights: valid until the first ones are written.
  static __device__ QueryTileSpan& span(int u);
  static __device__ void keep(int u, const QueryTileSpan& of) { span(u) = of; }
};

/// Shared memory of a block; `kBlocks` blocks share a work item.
template <int kBlocks>
struct Shared {
  // The queries. Once their last chunk is in registers, its place holds the follower's weights.
  alignas(1024) std::byte queries[kTileBytes];
  std::byte kv[2][kTileBytes];
  // the lead's; before the first ones, the spans of the query tiles
  alignas(1024) std::byte weights[kChunkBytes];
  float row[kGroups][kGroupRows];      // running max that each group tells the other
  unsigned long long full[2][kUnits];  // units of a KV buffer
  unsigned long long empty[2][kHalves];
  unsigned long long part_full[2];
  unsigned long long part_empty[2];
  unsigned long long queries_full;
  Part parts[2];  // the one that consumers work on, and the next
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
  return shared_at(shared);
}

/// Waits for earlier kernels, then lets the next one start: not before, because it would take memory
/// bandwidth from this step's q and KV.
__device__ __forceinline__ void wait_then_start_next() {
  wait_for_previous();
  start_next();
}

/// Index of this block in the schedule, which counts the blocks of a work item as one.
template <int kBlocks>
__device__ inline int scheduled_block() {
  return static_cast<int>(blockIdx.x) / kBlocks;
}

/// Index of this block among those that share its work item.
template <int kBlocks>
__device__ inline int block_of_item() {
  return static_cast<int>(blockIdx.x) % kBlocks;
}

/// The last chunks of the queries, which stay in registers: products 64 columns wide with both operands in
/// shared memory read more of it than there is time for.
inline constexpr int kHeldChunks = 3;
inline constexpr int kConsumerRegisters = 240;
inline constexpr int kProducerRegisters = 24;
// The total may not exceed the registers of the launch, or the last warp group to take some waits for ever.
static_assert(kConsumers * kConsumerRegisters + kWarpGroup * kProducerRegisters <=
              65536 / kThreads / 8 * 8 * kThreads);

/// Initialises the mbarriers; one thread of the block.
template <int kBlocks>
__device__ inline void init_barriers(Shared<kBlocks>& s) {
  constexpr unsigned kWarpsOfGroup = kWarpGroup / kWarp;
  for (int buffer = 0; buffer < 2; ++buffer) {
    for (int unit = 0; unit < kUnits; ++unit) barrier_init(at(&s.full[buffer][unit]), 1);
    for (int half = 0; half < kHalves; ++half) barrier_init(at(&s.empty[buffer][half]), kWarpsOfGroup);
    barrier_init(at(&s.part_full[buffer]), 1);
    barrier_init(at(&s.part_empty[buffer]), kGroups * kWarpsOfGroup + kProducerWarps - 1);
  }
  barrier_init(at(&s.queries_full), 1);
  fence_barrier_init();
}

/// A wgmma shared-memory operand. Only its lower word is computed: a carry into the upper word would take as
/// long as the product. The asm keeps the compiler from computing the operands of all places in advance,
/// which would fill registers.
struct OperandPlace {
  unsigned low;

  __device__ __forceinline__ explicit OperandPlace(std::uint64_t operand)
      : low(static_cast<unsigned>(operand)) {
    asm volatile("" : "+r"(low));
  }
  /// An OperandPlace computed once a warp, for code whose branches hide from the compiler that all lanes have
  /// the same one. 8 sequences of 131072 tokens, without and with it: e4m3 474 and 463 us; 16 bits, which
  /// does not use it, 413 and 420.
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

/// Tells the compiler that all lanes have the same `x`. Otherwise it serialises products in branches on `x`,
/// which lanes might leave one by one. warp_uniform() tells it more, which costs the 16-bit kernel 2 %.
__device__ inline int uniform(int x) {
  return __shfl_sync(~0u, x, 0);
}

/// Waits for all products in flight. The compiler serialises products that are in flight where branches meet
/// that it cannot prove uniform in the warp, so none may be in flight there.
template <class... Registers>
__device__ __forceinline__ void finish(Registers&... registers) {
  products_wait<0>();
  (pin(registers), ...);
}

}  // namespace latent
}  // namespace helix::cuda
