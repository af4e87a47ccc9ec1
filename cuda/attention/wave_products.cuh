// SPDX-License-Identifier: Apache-2.0
// The consumer warp groups of the kernel for many query rows (waves.cuh), with 64 query rows each.
//
// scores = queries keys^T reads both operands from shared memory. Weights stay in registers, where their
// layout is that of the next product's operand. A warp group issues the scores of the next KV tile before the
// product of this tile's weights and values, so that the tensor cores work while it computes weights. The
// groups take turns at issuing, so that one computes weights while the other's products run
// (FlashAttention-3, section 3).
//
// warp_uniform() tells the compiler what all lanes of a warp have in common: places in rings, counts and
// operands are then computed once a warp (4096 tokens after 28672, 64 / 8 heads: 6711 us, 7045 without).
// Issuing the first scores of the next query tile before the results of this one are written cost 9 %, and 5
// to 7 % with the results packed to 16 bits first: there are not enough registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/attention/wave_block.cuh"
#include "cuda/attention/wave_copies.cuh"
#include "cuda/attention/wave_result.cuh"
#include "cuda/attention/wave_softmax.cuh"
#include "cuda/runtime/wgmma_product.cuh"

namespace helix::cuda {

/// A thread of a multiplying warp group, for q and out of type T over KV of type KV.
template <class T, class KV, class S, bool kIsBox>
struct WaveProducts {
  static constexpr int kTurnBarrier = 1;                           // one a group, from this number on
  static constexpr int kGroupBarrier = kTurnBarrier + S::kGroups;  // one a group, from this number on
  static constexpr int kBlockBarrier = kGroupBarrier + S::kGroups;
  /// wgmma steps of a KV tile's product with values.
  static constexpr int kValueSteps = S::kTokens / kProductDepth;

  using Element = MultipliedAs<KV>;  // type of the products' operands
  using Softmax = WaveSoftmax<KV, S>;
  using Scores = typename Softmax::Scores;
  using Weights = typename Softmax::Weights;

  const AttentionParams& p;
  const WaveMaps& maps;
  WaveShared<S>& s;
  int thread;  // number among the multiplying threads
  int group;   // number among the multiplying warp groups
  RingPlace<1> query_place;
  RingPlace<S::kStages> key_place;
  RingPlace<S::kStages> value_place;

  // State of the current part.
  Softmax softmax;
  unsigned queries = 0;  // lower word of the queries' operand
  int bounds_stage = 0;

  __device__ WaveProducts(const AttentionParams& params, const WaveMaps& the_maps, WaveShared<S>& shared)
      : p(params),
        maps(the_maps),
        s(shared),
        thread(static_cast<int>(threadIdx.x) - kWarpGroup),
        group(warp_uniform(thread / kWarpGroup)),
        query_place(shared.query_barriers),
        key_place(shared.key_barriers),
        value_place(shared.value_barriers),
        softmax{params, thread} {}

  __device__ __forceinline__ const RowBounds<S::kRows>& bounds() const { return s.bounds[bounds_stage]; }
  /// Releases the stage at `place` for this warp as soon as `sum` is computed. `sum` is never negative;
  /// testing it ties the arrival to it, as otherwise the assembler may first wait for the products whose wait
  /// follows.
  template <class Place>
  __device__ __forceinline__ void leave(Place& place, float sum = 0.0f) const {
    barrier_arrive_if(thread % kWarp == 0 && !(sum < 0.0f), place.empty());
    place.advance();
  }

  __device__ __forceinline__ void wait_turn() const {
    if constexpr (S::kTakeTurns && S::kGroups > 1) group_sync(kTurnBarrier + group, 2 * kWarpGroup);
  }
  __device__ __forceinline__ void end_turn() const {
    if constexpr (S::kTakeTurns && S::kGroups > 1)
      group_arrive(kTurnBarrier + (group + 1) % S::kGroups, 2 * kWarpGroup);
  }

  __device__ __forceinline__ void begin_part(int head) {
    if constexpr (Softmax::kIsFp8) {
      const float k_scale = p.k_scale == nullptr ? 1.0f : p.k_scale[head];
      softmax.scales.values = p.v_scale == nullptr ? 1.0f : p.v_scale[head];
      float2 inverse{1.0f, 1.0f};
      if constexpr (std::is_same_v<T, bf16>) {
        inverse = make_queries_f16<S>(s.queries, thread / kWarp * kMmaRows);
        fence_before_copy();
        group_sync(kGroupBarrier + group, kWarpGroup);
      }
      softmax.scales.scores[0] = score_factor(p.scale * k_scale * inverse.x);
      softmax.scales.scores[1] = score_factor(p.scale * k_scale * inverse.y);
    }
    softmax.begin_part(bounds());
    const unsigned at = shared_at(s.queries) + static_cast<unsigned>(group) * kGroupRows * 128u;
    queries = warp_uniform(static_cast<unsigned>(rows_operand(at)));
  }

  /// Issues scores = queries keys^T.
  __device__ __forceinline__ void ask_scores(Scores& scores) const {
    const std::uint64_t rows = rows_operand(0) >> 32 << 32 | queries;
    const std::uint64_t keys = rows_operand(shared_at(s.keys[key_place.stage()]));
#pragma unroll
    for (int k = 0; k < S::kDim / kProductDepth; ++k) {
      const int chunk = k / 4;
      const int step = k % 4;
      product<Element, S::kTokens, false>(scores, operand_at(rows, chunk * S::kRows * 128 + step * 32),
                                          operand_at(keys, chunk * S::kTokens * 128 + step * 32), k > 0);
    }
    products_commit();
  }

  /// Issues found += weights values for the KV tile's first kSteps * 16 tokens.
  template <int kSteps = kValueSteps>
  __device__ __forceinline__ void ask_values(const Weights& weights, RowSums<S::kValueDim>& found) const {
    const std::uint64_t values = columns_operand(shared_at(s.values[value_place.stage()]), S::kTokens * 128u);
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      product<Element, S::kValueDim, true>(found.d, weights[k], operand_at(values, k * 2048), 1);
    products_commit();
  }

  /// Adds the values of a part's last KV tile, of which `steps` steps are seen, more than kSteps - 2. Nothing
  /// overlaps this product, so it skips the other steps: 4096 tokens without a context take 237 us, 254 with
  /// all steps (32 / 8 heads, H100).
  template <int kSteps = 2>
  __device__ __forceinline__ void add_last_values(const Weights& weights, RowSums<S::kValueDim>& found,
                                                  int steps) const {
    if constexpr (kSteps < kValueSteps) {
      if (steps > kSteps) return add_last_values<kSteps + 2>(weights, found, steps);
    }
    products_fence();
    ask_values<(kSteps < kValueSteps ? kSteps : kValueSteps)>(weights, found);
    products_wait<0>();
    pin(found.d);
  }

  /// Zeroes the values of the KV tile's tokens [0, first) and [last, end): what lies there may be infinite.
  /// Each warp group writes all of these zeros, even if others write the same ones at the same time.
  __device__ void clear_values(int first, int last, int end) const {
    constexpr int kRowParts = S::kValueChunks * 8;  // 16-byte parts of a row
    std::byte* values = s.values[value_place.stage()];
    first = ::max(first, 0);
    const int rows = first + ::max(end - last, 0);
#pragma unroll 1
    for (int i = thread % kWarpGroup; i < rows * kRowParts; i += kWarpGroup) {
      const int row = i / kRowParts;
      const int token = row < first ? row : last + row - first;
      const int part = i % kRowParts;
      reinterpret_cast<uint4*>(values)[(part / 8 * S::kTokens + token) * 8 + part % 8] = uint4{0, 0, 0, 0};
    }
    fence_before_copy();
    group_sync(kGroupBarrier + group, kWarpGroup);
  }

  /// Waits for the values of the KV tile at `token`, and zeroes those that are not seen. Returns the steps of
  /// their product up to the last token that is seen: an even number, or all. It is the same for all warps:
  /// where all rows of one warp see the whole tile, all its steps are seen.
  __device__ __forceinline__ int ready_values(int query_tile, int token) const {
    value_place.wait_full();
    if constexpr (!kIsBox) fence_before_copy();
    if (softmax.is_inner(token)) return kValueSteps;
    const int first = s.plan.begin_token[query_tile] - token;
    const int last = ::min(s.plan.end_token[query_tile] - token, S::kTokens);
    const int seen = warp_uniform((::max(last, 0) + kProductDepth - 1) / kProductDepth);
    const int steps = ::min(::max((seen + 1) / 2 * 2, 2), kValueSteps);
    if (first > 0 || last < steps * kProductDepth) clear_values(first, last, steps * kProductDepth);
    return steps;
  }
  __device__ __forceinline__ void ready_keys() const {
    key_place.wait_full();
    if constexpr (!kIsBox) fence_before_copy();
  }

  /// Attends to the `count` KV tiles of a part.
  __device__ __forceinline__ void attend(const WavePart& part, int count, RowSums<S::kValueDim>& found) {
    const int query_tile = part.query_tile;
    int token = warp_uniform(s.plan.first_kv_tile_token(query_tile) + part.kv_tile * S::kTokens);
    const int last_token = token + (count - 1) * S::kTokens;
    key_place.make_uniform();
    value_place.make_uniform();
    found.clear();
    Scores scores;
    Weights weights;
    float shrink[2];
    ready_keys();
    products_fence();
    ask_scores(scores);
    products_wait<0>();
    pin(scores);
    leave(key_place);
    if (S::kGivesQueriesEarly && token == last_token) leave(query_place);
    softmax.cap_and_mask(bounds(), scores, token);
    softmax.weigh(scores, found, shrink);
    Softmax::pack_weights(scores, weights);

#pragma unroll 1
    for (; token < last_token; token += S::kTokens) {
      ready_keys();
      wait_turn();
      products_fence();
      ask_scores(scores);
      ready_values(query_tile, token);
      products_fence();
      ask_values(weights, found);
      end_turn();
      products_wait<1>();
      pin(scores);
      if (S::kGivesQueriesEarly && token + S::kTokens == last_token) leave(query_place);
      softmax.cap_and_mask(bounds(), scores, token + S::kTokens);
      softmax.weigh(scores, found, shrink);
      leave(key_place, found.sum[0]);
      products_wait<0>();
      pin(found.d);
      leave(value_place);
      Softmax::shrink_sums(found, shrink);
      Softmax::pack_weights(scores, weights);
    }
    if constexpr (!S::kGivesQueriesEarly) leave(query_place);
    add_last_values(weights, found, ready_values(query_tile, token));
    leave(value_place);
  }

  /// Skips a part of which this warp group has no rows: releases all stages that the copies fill.
  __device__ __forceinline__ void pass(int count) {
    leave(query_place);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (i > 0) {
        wait_turn();
        end_turn();
      }
      key_place.wait_full();
      leave(key_place);
      value_place.wait_full();
      leave(value_place);
    }
  }

  /// Writes a part's rows to out and lse, or as split partials.
  __device__ __forceinline__ void finish(const WavePart& part, RowSums<S::kValueDim>& found) const {
    const QueryTile query_tile = s.plan.query_tiles[part.query_tile];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      found.sum[h] += __shfl_xor_sync(~0u, found.sum[h], 1);
      found.sum[h] += __shfl_xor_sync(~0u, found.sum[h], 2);
    }
    if constexpr (Softmax::kIsFp8) {
#pragma unroll
      for (float& sum : found.d) sum *= softmax.scales.values;
    }
    if (maps.combines_later && thread == 0 &&
        (part.splits.count == 1 || static_cast<int>(blockIdx.x) == part.splits.first_block))
      p.split_tiles[part.query_tile * p.kv_heads + part.head] = {query_tile, part.splits};
    if (part.splits.count == 1) {
      write_rows<T>(p, query_tile, part.head, softmax.row(), found);
    } else {
      const SplitPartials partials{p, part.splits};
      write_partials(partials, softmax.row(), query_tile.num_rows, found);
      if (!maps.combines_later) {
        combine_wave_splits(partials, query_tile, part.query_tile, part.head, thread, S::kConsumers,
                            s.is_last, [] { group_sync(kBlockBarrier, S::kConsumers); });
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (S::kTakeTurns && S::kGroups > 1 && group == S::kGroups - 1) end_turn();
    RowSums<S::kValueDim> found;
    for (unsigned i = 0;; ++i) {
      query_place.wait_full();
      const WavePart& part = s.parts[i % kPartStages];
      const int count = warp_uniform(part.count);
      if (count == 0) return;
      bounds_stage = static_cast<int>(i % S::kBoundStages);
      if (group * kGroupRows < warp_uniform(s.plan.query_tiles[part.query_tile].num_rows)) {
        begin_part(part.head);
        attend(part, count, found);
      } else {
        pass(count);
      }
      finish(part, found);
    }
  }
};

}  // namespace helix::cuda
