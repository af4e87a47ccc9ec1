// SPDX-License-Identifier: Apache-2.0
// Partial attention for many query rows by Hopper's wgmma, for q of 16 bits and KV of the same type or of
// e4m3: out = softmax(scale q k^T) v and its lse, for prefill and drafts of several tokens.
//
// One block an SM, with a producer warp group that copies (wave_copies.cuh) and two or three consumer warp
// groups that multiply (wave_products.cuh), each with 64 query rows of the same query tile. Shared memory
// holds the queries and rings of two stages for keys and values. Each block computes the schedule
// (wave_schedule.cuh) itself from device memory.
//
// For a KV tile of 160 tokens with D = 128 a block reads 80 KiB for 10.5 MFLOP. At 640 TFLOP/s that is 5.0
// TB/s from the L2 cache, which gives 5.4. Still, clusters of two blocks that read each KV tile once for both
// were slower (4096 tokens after 28672: 10975 us, 3532 without).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/kernel.hpp"
#include "cuda/attention/wave_products.cuh"
#include "cuda/exchange/header.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {

/// The producer warp group: a warp copies keys, a warp values, two warps queries. Copies with kWarps = 2 have
/// the last two copy keys and values too, after the queries of each part. One thread finds the parts.
template <class S, template <int, int> class Copies>
struct WaveProducer {
  template <int kColumns>
  using TileCopies = Copies<kColumns, S::kTokens>;
  static constexpr int kTileWarps = TileCopies<S::kDim>::kWarps;
  static constexpr int kQueryThreads = 2 * kWarp;
  static constexpr int kFirstQueryThread = 2 * kWarp;

  const AttentionParams& p;
  const WaveMaps& maps;
  WaveShared<S>& s;

  __device__ __forceinline__ void run() const {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    if (kTileWarps == 1 && warp >= 2) {
      if constexpr (kTileWarps == 1) copy<0>(warp, keys(), s.key_barriers, s.keys);
    } else if (warp % 2 == 0) {
      copy<S::kDim>(warp, keys(), s.key_barriers, s.keys);
    } else {
      copy<S::kValueDim>(warp, values(), s.value_barriers, s.values);
    }
    // These warps are the first to have nothing left to do.
    if (p.headers.message != nullptr && blockIdx.x == gridDim.x - 1 && warp == 2) write_headers(p.headers);
  }

 private:
  __device__ __forceinline__ WaveSource keys() const {
    return {p, p.k, maps.k, maps.box_tokens, shared_at(s.stored_key_barriers)};
  }
  __device__ __forceinline__ WaveSource values() const {
    return {p, p.v, maps.v, maps.box_tokens, shared_at(s.stored_value_barriers)};
  }

  /// Copies what warp `warp` copies of all parts: its share of the rows of kColumns columns, if any, and, if
  /// it is one of the last two, queries.
  template <int kColumns>
  __device__ __forceinline__ void copy(int warp, const WaveSource& source, RingBarriers<S::kStages>& barriers,
                                       const void* ring) const {
    constexpr bool kMayHaveQueries = kColumns == 0 || kTileWarps > 1;
    RingPlace<kPartStages> part_place(s.part_barriers);
    RingPlace<1> query_place(s.query_barriers);
    RingPlace<S::kStages> place(barriers);
    for (unsigned i = 0;; ++i) {
      if (kMayHaveQueries && threadIdx.x == kFirstQueryThread) find_part(i, part_place, query_place);
      part_place.wait_full();
      const WavePart part = s.parts[part_place.stage()];
      part_place.advance();
      if (kMayHaveQueries && warp >= 2) give_queries(i, part, query_place);
      if (part.count == 0) return;
      if constexpr (kColumns > 0) {
        TileCopies<kColumns>{source}.copy(s.plan, part, shared_at(ring), place, warp / 2);
      }
    }
  }

  /// Finds the i-th part, or the end, and gives it to all copying warps; one thread.
  __device__ __forceinline__ void find_part(unsigned i, const RingPlace<kPartStages>& place,
                                            const RingPlace<1>& query_place) const {
    WavePart& part = s.parts[place.stage()];
    if (i == 0) s.walk.begin(s.plan);
    s.walk.find_next(p, s.plan, part);
    // Asked for after keys and values, the first queries would wait for these. Later on keys and values come
    // first, while the previous part's queries are in use.
    if (i == 0 && maps.has_queries && part.count > 0) ask_queries(part, query_place);
    barrier_arrive(place.full());
  }

  /// Copies a part's queries as boxes; one thread.
  __device__ __forceinline__ void ask_queries(const WavePart& part, const RingPlace<1>& place) const {
    const int first_token = s.plan.query_tiles[part.query_tile].token(p, 0);
    barrier_expect_more(place.full(), S::kQueryBytes);
    for (int chunk = 0; chunk < S::kKeyChunks; ++chunk) {
      copy_query_box(shared_at(s.queries) + static_cast<unsigned>(chunk) * (S::kRows * 128u), maps.q,
                     chunk * kChunkColumns, part.head * p.group, first_token, place.full());
    }
  }

  /// Gives the queries and row bounds of the i-th part, or the end, to those who multiply.
  __device__ __forceinline__ void give_queries(unsigned i, const WavePart& part, RingPlace<1>& place) const {
    const int thread = static_cast<int>(threadIdx.x) - kFirstQueryThread;
    const bool has_part = part.count > 0;
    const auto find_bounds = [&] {
      const int u = part.query_tile;
      find_row_bounds<kQueryThreads>(p, s.plan.query_tiles[u], {s.plan.begin_token[u], s.plan.end_token[u]},
                                     s.bounds[i % S::kBoundStages], thread);
    };
    if (S::kBoundStages > 1 && has_part) find_bounds();
    place.wait_empty();
    if (has_part) {
      if (!maps.has_queries) {
        copy_queries<S::kDim, S::kRows, kQueryThreads>(p, s.plan.query_tiles[part.query_tile], part.head,
                                                       shared_at(s.queries), thread);
      } else if (thread == 0 && i > 0) {
        ask_queries(part, place);
      }
      if (S::kBoundStages == 1) find_bounds();
      if (!maps.has_queries) {
        wait_for_copies<0>();
        fence_before_copy();
      }
    }
    barrier_arrive(place.full());
    place.advance();
  }
};

template <class T, class KV, class S, template <int, int> class Copies>
__global__ __launch_bounds__(S::kThreads, 1) void attend_waves(const __grid_constant__ AttentionParams p,
                                                               const __grid_constant__ WaveMaps maps) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  // Three consumer groups leave the producer no more than 32.
  constexpr int kCopyRegisters = S::kGroups == 2 ? Copies<S::kDim, S::kTokens>::kRegisters : 32;
  extern __shared__ __align__(1024) std::byte memory[];
  auto& s = *reinterpret_cast<WaveShared<S>*>(memory);
  prefetch_params(p);
  if (threadIdx.x == kWarp) {
    if constexpr (Copies<S::kDim, S::kTokens>::kHasMaps) {
      prefetch_map(maps.k);
      prefetch_map(maps.v);
    }
    if (maps.has_queries) prefetch_map(maps.q);
  }
  if (threadIdx.x == 0) {
    constexpr unsigned kWarps = S::kConsumers / kWarp;
    s.part_barriers.init(1, 1);
    s.query_barriers.init(2 * kWarp, kWarps);
    s.key_barriers.init(Copies<S::kDim, S::kTokens>::kFills, kWarps);
    s.value_barriers.init(Copies<S::kDim, S::kTokens>::kFills, kWarps);
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(shared_at(&s.stored_key_barriers[i]), 1);
      barrier_init(shared_at(&s.stored_value_barriers[i]), 1);
    }
    fence_barrier_init();
  }
  if (!p.reads_ahead) follow_previous(p);
  make_wave_plan(p, s.plan);
  if (p.reads_ahead) {  // the plan alone is made ahead
    follow_previous(p);
    __syncthreads();
  }
  if (warp_uniform(threadIdx.x / kWarpGroup) == 0) {
    give_registers<kCopyRegisters>();
    WaveProducer<S, Copies>{p, maps, s}.run();
  } else {
    take_registers<S::product_registers(kCopyRegisters)>();
    WaveProducts<T, KV, S, Copies<S::kDim, S::kTokens>::kIsBox>(p, maps, s).run();
  }
#endif
}

}  // namespace helix::cuda
