// SPDX-License-Identifier: Apache-2.0
// The rings through which KV tiles get into shared memory ahead of their products, in the kernels of mma.cuh
// and mma_latent.cuh. `Kernel` is Mma or MmaLatent.
#pragma once

#include "cuda/attention/mma_rows.cuh"
#include "cuda/runtime/async_copy.cuh"

namespace helix::cuda {

/// The ring of half-tiles for the part of a work item that belongs to one query tile.
template <class Kernel>
struct MmaRing {
  typename Kernel::Shared& s;
  TokenLookUp<typename Kernel::Plan> look_up;
  RowSource keys;
  RowSource values;
  int halves;
  int width;
  int next = 0;
  int stage = 0;  ///< Stage of half-tile `next`.

  /// Issues the copies of the next half-tile, if there is one. Between two calls, and after the last read of
  /// the stage, there must be a barrier. With a tile's keys it also starts to look up the places of the next
  /// tile's tokens.
  __device__ __forceinline__ void ask() {
    if (next < halves) {
      const int tile = next / 2;
      const TokenPlace* places = s.places[tile % 2];
      const auto to = static_cast<unsigned>(__cvta_generic_to_shared(s.stages[stage]));
      if (next % 2 == 0) {
        if (keys.is_split()) {
          copy_rows<true, Kernel::kKeyBytes, Kernel::Plan::kKvTileTokens, Kernel::kThreads>(keys, places, to,
                                                                                            width);
        } else {
          copy_rows<false, Kernel::kKeyBytes, Kernel::Plan::kKvTileTokens, Kernel::kThreads>(keys, places, to,
                                                                                             width);
        }
        look_up.ask(tile + 1);
      } else {
        copy_rows<false, Kernel::kValueBytes, Kernel::Plan::kKvTileTokens, Kernel::kThreads>(values, places,
                                                                                             to, width);
        look_up.keep(s.places[(tile + 1) % 2]);
      }
    }
    commit_copies();
    ++next;
    stage = stage + 1 == Kernel::kRingStages ? 0 : stage + 1;
  }

  /// Issues the copies of the first half-tiles.
  __device__ __forceinline__ void begin() {
    look_up.ask(0);
    look_up.keep(s.places[0]);
#pragma unroll
    for (int i = 0; i < Kernel::kRingStages - 1; ++i) {
      __syncthreads();
      ask();
    }
  }
};

/// The ring of KV tiles for the part of a work item that belongs to one query tile.
template <class Kernel>
struct MmaLatentTiles {
  typename Kernel::Shared& s;
  TokenLookUp<typename Kernel::Plan> look_up;
  RowSource rows;
  int count;
  int width;
  int next = 0;

  /// Issues the copies of the next tile, if there is one. Between two calls, and after the last read of the
  /// stage, there must be a barrier.
  __device__ __forceinline__ void ask() {
    if (next < count) {
      copy_rows<true, Kernel::kRowBytes, Kernel::Plan::kKvTileTokens, Kernel::kThreads>(
          rows, s.places[next % 2],
          static_cast<unsigned>(__cvta_generic_to_shared(s.stages[next % Kernel::kTileStages])), width);
      look_up.keep(s.places[(next + 1) % 2]);
      look_up.ask(next + 2);
    }
    commit_copies();
    ++next;
  }
  __device__ __forceinline__ void begin() {
    look_up.ask(0);
    look_up.keep(s.places[0]);
    look_up.ask(1);
    __syncthreads();
    if constexpr (Kernel::kTileStages > 1) ask();
  }
  /// Waits for the next tile and returns its address. All threads.
  __device__ __forceinline__ unsigned wait() {
    if constexpr (Kernel::kTileStages == 1) {
      __syncthreads();
      ask();
      wait_for_copies<0>();
      __syncthreads();
      return static_cast<unsigned>(__cvta_generic_to_shared(s.stages));
    } else {
      static_assert(Kernel::kTileStages == 2);
      wait_for_copies<0>();
      __syncthreads();
      ask();
      return static_cast<unsigned>(__cvta_generic_to_shared(s.stages[next % Kernel::kTileStages]));
    }
  }
};

}  // namespace helix::cuda
