// SPDX-License-Identifier: Apache-2.0
// The block of the kernel for many query rows (waves.cuh): sizes and shared memory.
#pragma once

#include <cstddef>

#include "cuda/attention/wave_copies.cuh"
#include "cuda/attention/wave_walk.cuh"
#include "cuda/runtime/warp_groups.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace helix::cuda {

/// Sizes of the kernel for one head size.
template <int kHeadDim, int kVDim, int kTileTokens, int kWarpGroups, bool kTurns>
struct WaveSizes {
  static constexpr int kDim = kHeadDim;
  static constexpr int kValueDim = kVDim;
  static constexpr int kTokens = kTileTokens;  ///< Tokens of a KV tile.
  static constexpr int kGroups = kWarpGroups;  ///< Warp groups that multiply.
  static constexpr bool kTakeTurns = kTurns;
  /// Whether the queries are released after the last scores, before the last product with values, so that the
  /// next part's queries arrive meanwhile. 4096 tokens after 28672, 64 / 8 heads: 6429 us, 6491 without; D =
  /// 96 and 256 are 1 % slower with it.
  static constexpr bool kGivesQueriesEarly = kDim == 128 || kDim == 192;
  /// Row bounds that the block holds. With early release: those of the part whose last scores are masked, of
  /// the part whose queries are there, and of the next part, looked up meanwhile.
  static constexpr int kBoundStages = kGivesQueriesEarly ? 3 : 1;
  static constexpr int kStages = 2;
  static constexpr int kRows = kGroups * kGroupRows;
  static constexpr int kThreads = (kGroups + 1) * kWarpGroup;
  static constexpr int kConsumers = kGroups * kWarpGroup;
  static constexpr int kKeyChunks = (kDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr int kValueChunks = (kValueDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr int kQueryBytes = kRows * kKeyChunks * 128;
  static constexpr int kKeyBytes = kTokens * kKeyChunks * 128;
  static constexpr int kValueBytes = kTokens * kValueChunks * 128;
  /// Registers of a thread at launch: an SM has 65536, allocated by eights.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  /// Registers of a multiplying thread, if a copying thread has `copy_registers`: together no more than at
  /// launch, or warp groups would wait for more for ever.
  static constexpr int product_registers(int copy_registers) {
    return ((kGroups + 1) * kLaunchRegisters - copy_registers) / kGroups / 8 * 8;
  }
};

/// Places for parts. No more than three are in use at a time: one whose results some warps have yet to write,
/// one whose queries are there, and one that was found meanwhile. So a place is free when its turn comes.
inline constexpr int kPartStages = 4;

template <class S>
struct WaveShared {
  alignas(1024) std::byte queries[S::kQueryBytes];
  alignas(1024) std::byte keys[S::kStages][S::kKeyBytes];
  alignas(1024) std::byte values[S::kStages][S::kValueBytes];
  RowBounds<S::kRows> bounds[S::kBoundStages];
  WavePart parts[kPartStages];
  WaveWalk walk;
  WavePlan<S::kTokens> plan;
  RingBarriers<kPartStages> part_barriers;
  RingBarriers<1> query_barriers;
  RingBarriers<S::kStages> key_barriers;
  RingBarriers<S::kStages> value_barriers;
  unsigned long long stored_key_barriers[S::kStages];  // WaveSource::stored_barriers
  unsigned long long stored_value_barriers[S::kStages];
  int is_last;
};

}  // namespace helix::cuda
