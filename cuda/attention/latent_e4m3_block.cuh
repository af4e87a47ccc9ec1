// SPDX-License-Identifier: Apache-2.0
// The block of the kernel over latents of e4m3: sizes, shared memory and barriers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/latent_block.cuh"

namespace helix::cuda::latent_e4m3 {

using latent::at;
using latent::block_of_item;
using latent::kConsumerRegisters;
using latent::kConsumers;
using latent::kGroupColumns;
using latent::kGroups;
using latent::kProducerRegisters;
using latent::kProducerWarps;
using latent::kSteps;
using latent::kThreads;
using latent::Part;
using latent::scheduled_block;

/// One kernel of the family: q and out have type TheT, a block has kTheRows query rows, kTheBlocks blocks
/// share a work item. A row of the cache has 576 columns of e4m3; if kMixed, 512 of e4m3, four scales of f32
/// and 64 columns of bf16.
template <class TheT, int kTheRows, int kTheBlocks, bool kMixed>
struct Kind {
  using T = TheT;
  static constexpr int kRows = kTheRows;
  static constexpr int kBlocks = kTheBlocks;
  static constexpr bool kIsMixed = kMixed;
  // A KV tile holds chunks of 128 latent columns, then rope columns, then scales; within each, the tokens'
  // rows follow one another.
  static constexpr unsigned kRopeBytes = kRopeColumns * (kMixed ? 2 : 1);  // rope bytes of a row
  static constexpr unsigned kScaleBytes = kMixed ? 16 : 0;
  static constexpr unsigned kRopeAt = kLatentTileTokens * kLatentColumns;
  static constexpr unsigned kScalesAt = kRopeAt + kLatentTileTokens * kRopeBytes;
  static constexpr unsigned kTileBytes = kScalesAt + kLatentTileTokens * kScaleBytes;
  static constexpr unsigned kQueryChunkBytes = kRows * latent::kRowBytes;
  static constexpr unsigned kQueryBytes = latent::kChunks * kQueryChunkBytes;
  static constexpr int kStages =
      static_cast<int>((227 * 1024 - 8 * 1024 - kQueryBytes - 2 * latent::kChunkBytes) / kTileBytes);
  /// ldmatrix loads between two waits for products; two products follow each load. 64 query rows over mixed
  /// rows lack the registers for two loads.
  static constexpr int kStageLoads = kRows < 64 || !kIsMixed ? 2 : 1;
  static_assert(kRows % 16 == 0 && kRows <= kGroupRows && kStages >= 3 && kTileBytes % 1024 == 0);
};

inline constexpr int kTileChunkColumns = 128;  ///< Latent columns of a swizzled chunk of a KV tile.
inline constexpr unsigned kTileChunkBytes = kLatentTileTokens * kTileChunkColumns;

/// Byte offset of 16-byte part `part` of row `row` among rope columns of e4m3: rows of 64 bytes in TMA's
/// 64-byte swizzle.
__device__ __forceinline__ constexpr unsigned swizzled_half(unsigned row, unsigned part) {
  return row * 64u + ((part ^ (row / 2u % 4u)) * 16u);
}

/// Place of token `token` of a KV tile among Shared::ratios: a lane finds those of the four tokens of its
/// part of a product's operand side by side.
__device__ __forceinline__ constexpr unsigned ratio_place(unsigned token) {
  const unsigned step = token / kProductDepth;
  return token % 8u / 2u * (kLatentTileTokens / 4) + step * 4u + token % kProductDepth / 8u * 2u + token % 2u;
}

/// The schedule and, until the first weights are written, the spans of the query tiles.
template <class K>
struct Plan : SmallAttentionPlan<kLatentTileTokens, latent::Limits, K::kBlocks> {
  /// Lies in the memory of the weights: valid until the first ones are written.
  static __device__ QueryTileSpan& span(int u);
  static __device__ void keep(int u, const QueryTileSpan& of) { span(u) = of; }
};

/// Turns a score of a query row, a capped one if scores are capped, into its exponent, base 2: score * factor
/// - pivot.
struct RowTerms {
  float factor;
  float pivot;
};

template <class K>
struct Shared {
  alignas(1024) std::byte queries[K::kQueryBytes];  // later the staged results
  /// Weights of each group's tile: [token][query row]. Before the first ones, the spans of the query tiles.
  alignas(1024) std::byte weights[kGroups][latent::kChunkBytes];
  alignas(1024) std::byte tiles[K::kStages][K::kTileBytes];
  alignas(16) RowTerms row[K::kRows];
  alignas(16) float cap_factor[K::kRows];      // of raw scores, if scores are capped
  alignas(16) float raise[kGroups][K::kRows];  // by how much each group's tile raised the pivots
  alignas(16) float top[kGroups][4][K::kRows];
  int low[K::kRows];  // local tokens that each row sees: [low, high)
  int high[K::kRows];
  /// TokenScales::ratio of each group's tile: [columns / 128][ratio_place(token)].
  alignas(16) std::uint16_t ratios[kGroups][4][K::kIsMixed ? kLatentTileTokens : 1];
  bool is_unset[K::kRows];  // whether the row has no pivot yet
  bool are_unset;           // whether any row has no pivot yet
  bool is_raised[kGroups];
  unsigned long long full[K::kStages];
  unsigned long long empty[K::kStages];
  unsigned long long part_full[2];
  unsigned long long part_empty[2];
  Part parts[2];  // the one that consumers work on, and the next
  Plan<K> plan;
};

template <class K>
__device__ __forceinline__ Shared<K>& shared() {
  static_assert(sizeof(Shared<K>) <= 227 * 1024);
  static_assert(kMaxQueryTiles * sizeof(QueryTileSpan) <= latent::kChunkBytes);
  extern __shared__ __align__(1024) std::byte memory[];
  return *reinterpret_cast<Shared<K>*>(memory);
}

template <class K>
__device__ __forceinline__ QueryTileSpan& Plan<K>::span(int u) {
  return reinterpret_cast<QueryTileSpan*>(shared<K>().weights[0])[u];
}

/// Named barriers of the block. All but kAllConsumers exist once a group, at number + group.
enum Barrier { kAllConsumers = latent::kAllConsumers, kOneGroup = 2, kWeights = 4 };

/// A KV tile's stage in the ring, and its phase.
template <class K>
struct StagePlace {
  unsigned stage;
  unsigned parity;

  /// The place of the KV tile that follows `count` others since the start of the kernel.
  explicit __device__ StagePlace(unsigned count)
      : stage(count % K::kStages), parity(count / K::kStages & 1u) {}
  __device__ __forceinline__ void advance() {
    const bool wraps = stage + 1 == K::kStages;
    stage = wraps ? 0 : stage + 1;
    parity ^= wraps ? 1u : 0u;
  }
};

/// Initialises the mbarriers; one thread of the block.
template <class K>
__device__ inline void init_barriers(Shared<K>& s) {
  constexpr unsigned kWarpsOfGroup = kWarpGroup / kWarp;
  for (int stage = 0; stage < K::kStages; ++stage) {
    barrier_init(at(&s.full[stage]), kProducerWarps * kWarp);
    barrier_init(at(&s.empty[stage]), kGroups * kWarpsOfGroup);
  }
  for (int place = 0; place < 2; ++place) {
    barrier_init(at(&s.part_full[place]), 1);
    barrier_init(at(&s.part_empty[place]), kGroups * kWarpsOfGroup + kProducerWarps - 1);
  }
  fence_barrier_init();
}

}  // namespace helix::cuda::latent_e4m3
