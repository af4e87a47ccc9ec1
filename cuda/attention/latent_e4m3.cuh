// SPDX-License-Identifier: Apache-2.0
// Partial attention over latents of e4m3 (MLA) by Hopper's wgmma: out = softmax(scale q k^T) v and its lse. A
// key has 512 latent columns, which are also the value, and 64 rope columns; rows have one scale, or four
// scales and a rope of bf16.
//
// KV tiles stay e4m3 in shared memory and are widened to f16 on the way to registers. They are the register
// operand of both products: tokens or value columns are the products' rows, query rows their columns. So
// widened values do not pass through shared memory, which would take twice as long as the products' operands
// leave time for, and few query rows need few columns. Transposed ldmatrix loads bring pairs of tokens of the
// values.
//
// A block has up to 64 query rows, a producer warp group and two consumer warp groups. One consumer computes
// scores and weights of even KV tiles, the other of odd ones, and each accumulates half of the value columns
// of all tiles in registers. They run half a step apart: while one computes scores, the other adds values.
// They run the same code: with code of its own, each waits for instructions (492 us against 484; 128 heads, 8
// sequences of 131072 tokens, H200).
//
// Whatever passes through the queue of memory instructions (shared memory, votes, reductions, barriers) waits
// there behind the products of both groups, 50 to 300 cycles in place of 30. So the way from scores to
// weights, which each group waits for the other to go, has few of these.
//
// Scores by e4m3 products, with queries as two terms that are exact for bf16, were 2 % faster, but missed lse
// by up to 6e-4, and by up to 6e-3 over mixed rows: Hopper accumulates such products with some 13 bits.
// Prefetching tiles into the L2 cache lost 10 %.
#pragma once

#include "cuda/attention/latent_e4m3_producer.cuh"
#include "cuda/attention/latent_e4m3_products.cuh"
#include "cuda/attention/latent_e4m3_rows.cuh"
#include "cuda/attention/latent_e4m3_softmax.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {
namespace latent_e4m3 {

/// The loop of one consumer group over the KV tiles of a part.
template <class K>
struct PartLoop {
  const Products<K> products;
  const Softmax<K> softmax;
  const Part& part;
  TokenRange whole;
  StagePlace<K> place;
  Totals<K>& totals;
  Sums<K>& sums;
  bool are_unset = true;  // Shared::are_unset, as far as this group has seen it

  __device__ __forceinline__ StagePlace<K> next_place() {
    const StagePlace<K> now = place;
    place.advance();
    return now;
  }

  /// Waits for the weights of the other group's tile, and rescales this group's sums if that tile raised
  /// pivots.
  __device__ __forceinline__ void follow_other() {
    group_sync(kWeights + 1 - softmax.group, kConsumers);
    if (!softmax.s.is_raised[1 - softmax.group]) return;
    are_unset = softmax.s.are_unset;
    softmax.shrink_sums(1 - softmax.group, sums);
    softmax.shrink_totals(1 - softmax.group, totals);
  }
  __device__ __forceinline__ void finish_sums() { latent::finish(sums[0], sums[1], sums[2], sums[3]); }

  /// Computes the weights of this group's tile `i`. Returns whether it raised pivots. Those of tile i - 2
  /// have been read: the other group had added that tile's values before it weighed tile i - 1, which this
  /// group has followed.
  __device__ __forceinline__ bool find_weights(int i, int token, const TokenScales& scales,
                                               Scores<K>& scores) {
    const float most = softmax.find_exponents(token, i >= whole.begin && i < whole.end, scales, scores);
    const bool raises = group_or(kOneGroup + softmax.group, most > kMaxExponent || are_unset);
    if (raises) {
      are_unset = softmax.raise(scores);
      softmax.shrink_totals(softmax.group, totals);
    }
    if (threadIdx.x % kWarpGroup == 0) softmax.s.is_raised[softmax.group] = raises;
    softmax.weigh(scales, scores, totals);
    group_arrive(kWeights + softmax.group, kConsumers);
    return raises;
  }

  __device__ __forceinline__ void run() {
    const int count = warp_uniform(part.count);
    const int first_token = warp_uniform(part.first_token);
    Scores<K> scores;
    TokenScales scales;
    int i = softmax.group;
#pragma unroll 1
    for (; i < count; i += 2) {
      StagePlace<K> others = place;
      if (i > 0) others = next_place();
      const StagePlace<K> own = next_place();
      const latent::OperandPlace queries = products.queries();
      products.multiply_keys(own, queries, scores, scales);
      finish_sums();
      if (i > 0) {
        follow_other();
        products.add_values(others, queries, 1 - softmax.group, sums);
        finish_sums();
      }
      const bool raises = find_weights(i, first_token + i * kLatentTileTokens, scales, scores);
      if (raises) softmax.shrink_sums(softmax.group, sums);
      group_sync(kOneGroup + softmax.group, kWarpGroup);
      products.add_values(own, queries, softmax.group, sums);
      finish_sums();
    }
    finish_sums();
    if (i == count) {
      follow_other();
      products.add_values(next_place(), products.queries(), 1 - softmax.group, sums);
      finish_sums();
    }
  }
};

/// Runs both consumer warp groups: takes each part of the work item from its queries to rows of out or of
/// split partials.
template <class K>
__device__ __forceinline__ void consume(const AttentionParams& p, Shared<K>& s) {
  const int group = warp_uniform(static_cast<int>(threadIdx.x) / kWarpGroup);
  const float kv_scale = !K::kIsMixed && p.k_scale != nullptr ? *p.k_scale : 1.0f;
  unsigned done = 0;  // KV tiles of earlier parts
  for (unsigned number = 0;; ++number) {
    const unsigned place = number % 2;
    barrier_wait(at(&s.part_full[place]), number / 2 & 1u);
    const Part& part = s.parts[place];
    if (warp_uniform(part.count) == 0) return;
    QueryRows<K> queries{p, s, part, kv_scale};
    const TokenRange whole = queries.begin();
    Totals<K> totals;
    Sums<K> sums;
#pragma unroll
    for (float& x : totals) x = 0.0f;
#pragma unroll
    for (auto& block : sums) {
#pragma unroll
      for (float& x : block) x = 0.0f;
    }
    PartLoop<K>{{s, group}, {p, s, group}, part, whole, StagePlace<K>(done), totals, sums}.run();
    queries.end(totals, sums);
    done += static_cast<unsigned>(warp_uniform(part.count));
    barrier_arrive_if(threadIdx.x % kWarp == 0, at(&s.part_empty[place]));
  }
}

}  // namespace latent_e4m3

template <class K>
__global__ __launch_bounds__(latent::kThreads,
                             1) void attend_latent_e4m3(const __grid_constant__ AttentionParams p,
                                                        const __grid_constant__ latent_e4m3::Maps maps) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  auto& s = latent_e4m3::shared<K>();
  prefetch_params(p);
  if (threadIdx.x == 0) latent_e4m3::init_barriers(s);
  if (threadIdx.x == latent::kConsumers && maps.box_tokens > 0) {
    prefetch_map(maps.latents);
    prefetch_map(maps.ropes);
    if constexpr (K::kIsMixed) prefetch_map(maps.scales);
  }
  if (!p.reads_ahead) latent::wait_then_start_next();
  make_plan(p, s.plan);
  if (p.reads_ahead)
    latent::wait_then_start_next();  // keys copied ahead too gain nothing, and cost registers
  if (threadIdx.x >= latent::kConsumers) {
    give_registers<latent_e4m3::kProducerRegisters>();
    latent_e4m3::Copier<K>(p, s, maps).run();
  } else {
    take_registers<latent_e4m3::kConsumerRegisters>();
    latent_e4m3::consume(p, s);
  }
  finish_messages(p);
#endif
}

}  // namespace helix::cuda
