// SPDX-License-Identifier: Apache-2.0
// Partial attention over latents (MLA) by Hopper's wgmma, q and KV of one 16-bit type: out = softmax(scale q
// k^T) v and its lse. A key has 512 latent columns, which are also the value, and 64 rope columns.
//
// A block has 64 query rows, a producer warp group and two consumer warp groups. The lead consumer computes
// the scores of even KV tiles, the follower those of odd ones. Each accumulates half of the value columns of
// all rows in registers, so both need the weights of both tiles and exchange them through shared memory. The
// scores of two tiles are in flight at a time: one group's products run while the other computes weights.
//
// The queries and two KV tiles take a third of the shared memory each. Each half of a tile's values is copied
// and released on its own, so that the next tile arrives while the last products of this one run. The loop is
// bound by its chain of latencies: the last product of a half, its copy (1400 cycles), scores, weights, that
// product again. The lead's tile has the longer chain, so the follower issues half of its products with the
// lead's weights before it computes its own weights: 425 us, against 443 with none of them first (128 heads,
// 8 sequences of 131072 tokens, H200). Issuing all of them first delays the follower, because a warp waits
// before it can issue a third product of 256 columns: 474 us, against 453 with none first. Issuing them one
// by one between the weights delays it too.
//
// TMA copies queries and KV tiles as boxes. Boxes of KV of fewer than 8 tokens would be so many that they
// bound the loop; then the producer warps copy rows by cp.async (latent_row_copier.cuh).
//
// With more than 64 query rows two blocks read the same KV tiles at about the same time, and the second finds
// them in the L2 cache. If each block reads one half of a tile for both, they wait for each other: 460 us
// against 453. Prefetching tiles into the L2 cache is slower too: 385 us against 330 with 64 heads.
#pragma once

#include <cstddef>

#include <cuda.h>

#include "cuda/attention/latent_consumer.cuh"
#include "cuda/attention/latent_producer.cuh"
#include "cuda/attention/latent_row_copier.cuh"
#include "cuda/attention/latent_rows.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {
namespace latent {

/// The consumer warp group of even KV tiles.
template <class T, int kBlocks>
__device__ __forceinline__ void lead(Consumer<T, kBlocks, 0> self, const Part& part, Sums& sums) {
  // A single block is bound by memory: it issues the next scores as soon as their keys are there. Two blocks
  // are bound by products: they release the previous tile first, so that its copy starts earlier. 8 sequences
  // of 131072 tokens, scores first and release first: 312 and 318 us with 64 heads, 485 and 464 with 128.
  constexpr bool kKeysFirst = kBlocks == 1;
  Scores scores;
  float top[2];
  float shrink[2];
  self.clear_unseen(part, 0);
  self.multiply_keys(scores);
  finish(scores);
#pragma unroll 1
  for (int i = 0;; i += 2) {
    self.find_top(part, i, scores, top);
    self.raise(top, shrink);
    self.weigh(scores);
    group_arrive(kLeadsWeights, kConsumers);
    self.scale_sums(sums, shrink);
    self.add_own_values(sums);
    ++self.uses[0];
    finish(sums);
    self.release(0);
    if (i + 1 >= self.tiles.count) break;
    if (i + 2 >= self.tiles.clear_from && i + 2 < self.tiles.count) self.clear_unseen(part, i + 2);
    group_sync(kFollowersWeights, kConsumers);
    self.follow_max(shrink);
    self.scale_sums(sums, shrink);
    self.add_other_values(sums);
    if (kKeysFirst && i + 2 < self.tiles.count) {
      self.multiply_keys(scores, [&] {
        products_wait<1>();
        self.release(1);
      });
      finish(scores, sums);
      continue;
    }
    finish(sums);
    self.release(1);
    if (i + 2 >= self.tiles.count) break;
    self.multiply_keys(scores);
    finish(scores);
  }
}

/// The consumer warp group of odd KV tiles. It adds the values of the lead's tile before those of its own, so
/// that the lead's buffer becomes free.
template <class T, int kBlocks>
__device__ __forceinline__ void follow(Consumer<T, kBlocks, 1> self, const Part& part, Sums& sums) {
  constexpr unsigned kStepsAhead = kSteps / 2;
  Scores scores;
  float top[2];
  float lead_shrink[2];
  float shrink[2];
  int i = 1;
  if (i < self.tiles.count) {
    self.clear_unseen(part, i);
    self.multiply_keys(scores);
    finish(scores);
#pragma unroll 1
    while (true) {
      self.find_top(part, i, scores, top);
      group_sync(kLeadsWeights, kConsumers);
      self.follow_max(lead_shrink);
      self.raise(top, shrink);
      self.scale_sums(sums, lead_shrink);
      self.template add_other_values<0, kStepsAhead>(sums);
      self.weigh(scores);
      group_arrive(kFollowersWeights, kConsumers);
      self.template add_other_values<kStepsAhead, kSteps>(sums);
      finish(sums);
      self.release(0);
      self.scale_sums(sums, shrink);
      self.add_own_values(sums);
      ++self.uses[1];
      finish(sums);
      self.release(1);
      i += 2;
      if (i >= self.tiles.count) break;
      if (i >= self.tiles.clear_from) self.clear_unseen(part, i);
      self.multiply_keys(scores);
      finish(scores);
    }
  }
  if (i == self.tiles.count) {
    group_sync(kLeadsWeights, kConsumers);
    self.follow_max(shrink);
    self.scale_sums(sums, shrink);
    self.add_other_values(sums);
    finish(sums);
    self.release(0);
  }
}

/// Runs both consumer warp groups: takes each part of the work item from its queries to rows of out or of
/// split partials.
template <class T, int kBlocks>
__device__ __forceinline__ void consume(const AttentionParams& p, Shared<kBlocks>& s,
                                        const QueryBoxes& boxes) {
  unsigned uses[2] = {0, 0};
  const bool leads = uniform(static_cast<int>(threadIdx.x) / kWarpGroup) == 0;
  for (unsigned number = 0;; ++number) {
    const unsigned place = number % 2;
    barrier_wait(at(&s.part_full[place]), number / 2 & 1u);
    const Part& part = s.parts[place];
    if (uniform(part.count) == 0) return;
    QueryRows<T, kBlocks> queries{p, s, part, boxes};
    Rows rows;
    queries.begin(number, rows);
    const TileRange tiles = queries.find_tiles(rows);
    Operand held[kHeldChunks];
    queries.load_held(held);
    Sums sums;
#pragma unroll
    for (float& x : sums) x = 0.0f;
    if (leads) {
      lead<T, kBlocks>({p, s, rows, held, tiles, uses, {}}, part, sums);
    } else {
      follow<T, kBlocks>({p, s, rows, held, tiles, uses, {}}, part, sums);
    }
    queries.end(rows, sums);
    barrier_arrive_if(threadIdx.x % kWarp == 0, at(&s.part_empty[place]));
  }
}

/// Runs a block. Its producer warps call produce(s).
template <class T, int kBlocks, class Produce>
__device__ __forceinline__ void attend(const AttentionParams& p, const QueryBoxes& boxes,
                                       const Produce& produce) {
  auto& s = shared<kBlocks>();
  if (threadIdx.x == 0) init_barriers(s);
  if (!p.reads_ahead) wait_then_start_next();
  make_plan(p, s.plan);
  if (threadIdx.x >= kConsumers) {
    give_registers<kProducerRegisters>();
    produce(s);
    wait_for_previous();  // in case there was nothing to copy
  } else {
    take_registers<kConsumerRegisters>();
    if (p.reads_ahead) wait_then_start_next();
    consume<T>(p, s, boxes);
  }
  finish_messages(p);
}

}  // namespace latent

/// The kernel over latents of q's type, from pages that boxes of 8 tokens or more divide.
template <class T, int kBlocks>
__global__ __launch_bounds__(latent::kThreads, 1) void attend_latent(
    const __grid_constant__ AttentionParams p, const __grid_constant__ latent::QueryBoxes queries,
    const __grid_constant__ CUtensorMap latents, const __grid_constant__ CUtensorMap ropes, int box_tokens) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  prefetch_params(p);
  if (threadIdx.x == latent::kConsumers) {
    prefetch_map(latents);
    prefetch_map(ropes);
    prefetch_map(queries.map);
  }
  latent::attend<T, kBlocks>(p, queries, [&](latent::Shared<kBlocks>& s) {
    latent::BoxCopier<kBlocks>(p, s, latents, ropes, box_tokens).run();
  });
#endif
}

/// The same kernel for pages of any size.
template <class T, int kBlocks>
__global__ __launch_bounds__(latent::kThreads,
                             1) void attend_latent_rows(const __grid_constant__ AttentionParams p,
                                                        const __grid_constant__ latent::QueryBoxes queries) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  prefetch_params(p);
  if (threadIdx.x == latent::kConsumers) prefetch_map(queries.map);
  latent::attend<T, kBlocks>(p, queries,
                             [&](latent::Shared<kBlocks>& s) { latent::RowCopier<kBlocks>(p, s).run(); });
#endif
}

}  // namespace helix::cuda
