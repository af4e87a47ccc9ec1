// SPDX-License-Identifier: Apache-2.0
// Partial attention over latents (MLA) by Hopper's warp-group products: 512 columns that are key and value,
// 64 rope columns, q and KV of one 16-bit type.
//
// A block has 64 query rows, and two consumer warp groups share them: the lead computes the scores of even KV
// tiles, the follower those of odd ones, and each has half of the value columns of all rows in its registers.
// So both need the weights of both tiles, which go through shared memory with the rows' max: first the
// lead's, then the follower's. While one group weighs its scores the other's products run.
//
// A KV tile fills a third of the shared memory, so that there are two. They are copied and released in units,
// so that the next tile comes while the last products of this one run. With more than 64 query rows two
// blocks form a cluster with the same KV tiles, and each unit is read by one of them for both: tiles of 128
// heads cross the L2 cache once.
#pragma once

#include <cstddef>

#include <cuda.h>

#include "cuda/attention/latent_consumer.cuh"
#include "cuda/attention/latent_producer.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {
namespace latent {

/// The consumer of even tiles: its weights go to the follower first.
template <class T, int kBlocks>
__device__ void lead(const AttentionParams& p, Shared<kBlocks>& s) {
  Consumer<T, kBlocks, 0> self(p, s);
  self.for_each_part([&](const Part& part) {
    Sums sums;
    Scores scores;
    self.begin(part, sums);
    self.clear_unseen(part, 0);
    self.multiply_keys(0, scores);
    finish(scores);
    self.release(0, kRopeUnit);
    self.lead_tile(part, 0, scores, sums);
    int i = 2;
#pragma unroll 1
    for (; i < part.count; i += 2) {
      self.clear_unseen(part, i);
      self.wait_for_weights();
      self.scale_to_other(sums);
      self.add_other_values(1, sums);
      self.multiply_keys(0, scores);
      self.template release_values<1>(1);
      finish(scores, sums);
      self.release(0, kRopeUnit);
      self.lead_tile(part, i, scores, sums);
    }
    if (i == part.count) {
      self.wait_for_weights();
      self.scale_to_other(sums);
      self.add_other_values(1, sums);
      self.template release_values<0>(1);
      finish(sums);
    }
    self.end(part, sums);
  });
}

/// The consumer of odd tiles. The values of the lead's tile come first, so that its place becomes free.
template <class T, int kBlocks>
__device__ void follow(const AttentionParams& p, Shared<kBlocks>& s) {
  Consumer<T, kBlocks, 1> self(p, s);
  self.for_each_part([&](const Part& part) {
    Sums sums;
    Scores scores;
    float shrink[2];
    self.begin(part, sums);
    int i = 0;
#pragma unroll 1
    for (; i + 1 < part.count; i += 2) {
      self.clear_unseen(part, i + 1);
      self.wait_for_weights();
      self.scale_to_other(sums);
      self.add_other_values(0, sums);
      self.multiply_keys(1, scores);
      self.template release_values<1>(0);
      finish(scores, sums);
      self.release(1, kRopeUnit);
      self.weigh(part, i + 1, scores, shrink);
      self.tell_weights();
      self.scale_sums(sums, shrink);
      self.add_own_values(1, sums);
      self.template release_values<0>(1);
      finish(sums);
    }
    if (i < part.count) {
      self.wait_for_weights();
      self.scale_to_other(sums);
      self.add_other_values(0, sums);
      self.template release_values<0>(0);
      finish(sums);
    }
    self.end(part, sums);
  });
}

template <class T, int kBlocks>
__device__ void attend(const AttentionParams& p, const CUtensorMap& latents, const CUtensorMap& ropes,
                       int box_tokens) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& s = *reinterpret_cast<Shared<kBlocks>*>(memory);
  if (threadIdx.x == 0) init_barriers(s);
  make_plan(p, s.plan);
  if constexpr (kBlocks > 1) sync_cluster();  // no copy before the barriers of both are there
  if (threadIdx.x >= kConsumers) {
    give_registers<24>();
    if (threadIdx.x < kConsumers + kWarp) Producer<kBlocks>{p, s, latents, ropes, box_tokens}.run();
  } else if (threadIdx.x < kWarpGroup) {
    take_registers<240>();
    lead<T>(p, s);
  } else {
    take_registers<240>();
    follow<T>(p, s);
  }
  if constexpr (kBlocks > 1) sync_cluster();  // nor an end while the other's copies and arrivals come
}

}  // namespace latent

template <class T, int kBlocks>
__global__ __launch_bounds__(latent::kThreads, 1)
    __cluster_dims__(kBlocks, 1, 1) void attend_latent(const __grid_constant__ AttentionParams p,
                                                       const __grid_constant__ CUtensorMap latents,
                                                       const __grid_constant__ CUtensorMap ropes,
                                                       int box_tokens) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  prefetch_params(p);
  wait_for_previous();
  start_next();
  latent::attend<T, kBlocks>(p, latents, ropes, box_tokens);
  finish_messages(p);
#endif
}

}  // namespace helix::cuda
