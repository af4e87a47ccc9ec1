// SPDX-License-Identifier: Apache-2.0
// Partial attention over latents (MLA) by Hopper's warp-group products: 512 columns that are key and value,
// 64 rope columns, q and KV of one 16-bit type.
//
// A block has 64 query rows, and two consumer warp groups share them: the lead computes the scores of even KV
// tiles, the follower those of odd ones, and each has half of the value columns of all rows in its registers.
// So both need the weights of both tiles, which go through shared memory. The scores of two tiles are on
// their way at a time: while one group weighs its scores the other's products run.
//
// A KV tile fills a third of the shared memory, so that there are two. Each half of the values is copied and
// released for itself, so that the next tile comes while the last products of this one run. What bounds the
// loop is the way around: the last product of a half, its copy (1400 cycles), scores, weights, that product.
// The lead's tile has the longer one, so the follower asks for half of its products with the lead's weights
// before it weighs its own scores: 425 us, where none of them before took 443 (128 heads, 8 sequences of
// 131072 tokens, H200). All of them make it late, as a warp waits to ask for a third product of 256 columns:
// 474 where none took 453; so does asking for them one by one while it weighs.
//
// With more than 64 query rows two blocks have the same KV tiles at about the same time, and the second finds
// them in the L2 cache. Where each half is read by one of them for both they wait for each other: 460 us
// where these took 453. Tiles brought to the L2 cache ahead take longer, too: 64 heads 385 us against 330.
#pragma once

#include <cstddef>

#include <cuda.h>

#include "cuda/attention/latent_consumer.cuh"
#include "cuda/attention/latent_producer.cuh"
#include "cuda/attention/latent_rows.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {
namespace latent {

/// The consumer of even tiles.
template <class T, int kBlocks>
__device__ __forceinline__ void lead(Consumer<T, kBlocks, 0> self, const Part& part, Sums& sums) {
  // One block waits for memory, and asks for products as soon as keys are there; two wait for products, and
  // copies come first (8 sequences of 131072 tokens: 64 heads 312 us against 318, 128 heads 485 against 464).
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

/// The consumer of odd tiles. The values of the lead's tile come first, so that its place becomes free.
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

/// Both consumers: each part of the work item from its queries to its rows of out or of split partials.
template <class T, int kBlocks>
__device__ __forceinline__ void consume(const AttentionParams& p, Shared<kBlocks>& s) {
  unsigned uses[2] = {0, 0};
  const bool leads = uniform(static_cast<int>(threadIdx.x) / kWarpGroup) == 0;
  for (unsigned number = 0;; ++number) {
    const unsigned place = number % 2;
    barrier_wait(at(&s.part_full[place]), number / 2 & 1u);
    const Part& part = s.parts[place];
    if (uniform(part.count) == 0) return;
    QueryRows<T, kBlocks> queries{p, s, part};
    Rows rows;
    queries.begin(rows);
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

/// Attention of a block, whose producers call produce(s).
template <class T, int kBlocks, class Produce>
__device__ __forceinline__ void attend(const AttentionParams& p, const Produce& produce) {
  auto& s = shared<kBlocks>();
  if (threadIdx.x == 0) init_barriers(s);
  const auto follow = [] {
    wait_for_previous();
    start_next();  // not before: what follows would take the memory from this step's q and KV
  };
  if (!p.reads_ahead) follow();
  make_plan(p, s.plan);
  if (threadIdx.x >= kConsumers) {
    give_registers<kProducerRegisters>();
    produce(s);
    wait_for_previous();  // where nothing was to be copied
  } else {
    take_registers<kConsumerRegisters>();
    if (p.reads_ahead) follow();
    consume<T>(p, s);
  }
  finish_messages(p);
}

}  // namespace latent

/// Over latents of q's type.
template <class T, int kBlocks>
__global__ __launch_bounds__(latent::kThreads,
                             1) void attend_latent(const __grid_constant__ AttentionParams p,
                                                   const __grid_constant__ CUtensorMap latents,
                                                   const __grid_constant__ CUtensorMap ropes,
                                                   int box_tokens) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  prefetch_params(p);
  if (threadIdx.x == latent::kConsumers) {
    prefetch_map(latents);
    prefetch_map(ropes);
  }
  latent::attend<T, kBlocks>(p, [&](latent::Shared<kBlocks>& s) {
    latent::Copier<kBlocks>(p, s, latents, ropes, box_tokens).run();
  });
#endif
}

}  // namespace helix::cuda
