// SPDX-License-Identifier: Apache-2.0
// The warp groups that multiply in the kernel of many query rows (waves.cuh): 64 query rows each.
//
// scores = queries keys^T come from shared memory; weights stay in registers, where their layout is that of
// the next product's operand. A warp group asks for the scores of the next KV tile before the product of this
// one's weights and values, so that the tensor cores work while it computes weights, and the groups take
// turns at asking, so that one computes weights while the other's products run (FlashAttention-3, section 3).
// Asking for the first scores of the next query tile before the results of this one are written cost 9 %: the
// registers do not suffice.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "cuda/attention/wave_copies.cuh"
#include "cuda/attention/wave_result.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace helix::cuda {

/// Sizes of the kernel for one head size.
template <int kHeadDim, int kVDim, int kTileTokens, int kWarpGroups, int kQueryBuffers, bool kTurns>
struct WaveSizes {
  static constexpr int kDim = kHeadDim;
  static constexpr int kValueDim = kVDim;
  static constexpr int kTokens = kTileTokens;  ///< Of a KV tile.
  static constexpr int kGroups = kWarpGroups;  ///< That multiply.
  static constexpr int kQueryStages = kQueryBuffers;
  static constexpr bool kTakeTurns = kTurns;
  static constexpr int kStages = 2;
  static constexpr int kRows = kGroups * kGroupRows;
  static constexpr int kThreads = (kGroups + 1) * kWarpGroup;
  static constexpr int kConsumers = kGroups * kWarpGroup;
  static constexpr int kKeyChunks = (kDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr int kValueChunks = (kValueDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr int kQueryBytes = kRows * kKeyChunks * 128;
  static constexpr int kKeyBytes = kTokens * kKeyChunks * 128;
  static constexpr int kValueBytes = kTokens * kValueChunks * 128;
  /// Registers of a thread that multiplies, where one that copies has these: 512 for one of each warp group.
  static constexpr int product_registers(int copy_registers) {
    return (512 - copy_registers) / kGroups / 8 * 8;
  }
};

/// Parts that the block holds: of the queries that are there, and one that some warps have yet to write.
inline constexpr int kPartStages = 4;

template <class S>
struct WaveShared {
  alignas(1024) std::byte queries[S::kQueryStages][S::kQueryBytes];
  alignas(1024) std::byte keys[S::kStages][S::kKeyBytes];
  alignas(1024) std::byte values[S::kStages][S::kValueBytes];
  RowBounds<S::kRows> bounds[S::kQueryStages];
  WavePart parts[kPartStages];
  WavePlan<S::kTokens> plan;
  RingBarriers<S::kQueryStages> query_barriers;
  RingBarriers<S::kStages> key_barriers;
  RingBarriers<S::kStages> value_barriers;
  int is_last;
};

/// `operand`, `bytes` further: its address lies in the lower bits, and is far from their end.
__device__ __forceinline__ std::uint64_t operand_at(std::uint64_t operand, int bytes) {
  const unsigned low = static_cast<unsigned>(operand) + static_cast<unsigned>(bytes >> 4);
  return (operand >> 32 << 32) | low;
}

/// Keeps what leads to `sum`, which is not negative, before the wait that follows: the assembler sees no
/// reason not to wait first.
__device__ __forceinline__ void compute_first(float sum) {
  asm volatile(
      "{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0f00000000;\n@never nanosleep.u32 0;\n}\n" ::"f"(sum)
      : "memory");
}

/// What a thread of a multiplying warp group does.
template <class T, class S, bool kIsBox>
struct WaveProducts {
  static constexpr int kTurnBarrier = 1;                           // and one for each group on
  static constexpr int kGroupBarrier = kTurnBarrier + S::kGroups;  // and one for each group on
  static constexpr int kBlockBarrier = kGroupBarrier + S::kGroups;

  using Scores = float[S::kTokens / 2];
  using Weights = unsigned[S::kTokens / kProductDepth][4];

  const AttentionParams& p;
  const WaveMaps& maps;
  WaveShared<S>& s;
  int thread;  // of the warp groups that multiply
  RingPlace<S::kQueryStages> query_place;
  RingPlace<S::kStages> key_place;
  RingPlace<S::kStages> value_place;

  // Of the part at hand.
  int inner_begin = 0;  // local tokens that all of the warp's rows see
  int inner_end = 0;
  std::uint64_t queries = 0;

  __device__ WaveProducts(const AttentionParams& params, const WaveMaps& the_maps, WaveShared<S>& shared)
      : p(params),
        maps(the_maps),
        s(shared),
        thread(static_cast<int>(threadIdx.x) - kWarpGroup),
        query_place(shared.query_barriers),
        key_place(shared.key_barriers),
        value_place(shared.value_barriers) {}

  __device__ __forceinline__ int group() const { return thread / kWarpGroup; }
  __device__ __forceinline__ int row() const {  // of the query tile, the first of this lane's
    return thread / kWarp * 16 + thread % kWarp / 4;
  }
  __device__ __forceinline__ void release(unsigned empty) const {
    if (thread % kWarp == 0) barrier_arrive(empty);
  }

  __device__ __forceinline__ void wait_turn() const {
    if constexpr (S::kTakeTurns && S::kGroups > 1) group_sync(kTurnBarrier + group(), 2 * kWarpGroup);
  }
  __device__ __forceinline__ void end_turn() const {
    if constexpr (S::kTakeTurns && S::kGroups > 1)
      group_arrive(kTurnBarrier + (group() + 1) % S::kGroups, 2 * kWarpGroup);
  }

  /// The factor of a score in the exponent.
  __device__ __forceinline__ float factor() const { return p.soft_cap > 0.0f ? kLog2E : p.scale * kLog2E; }
  __device__ __forceinline__ bool is_inner(int token) const {
    return token >= inner_begin && token + S::kTokens <= inner_end;
  }

  __device__ __forceinline__ void begin_part() {
    const RowBounds<S::kRows>& bounds = s.bounds[query_place.stage()];
    int first = 0;
    int last = INT_MAX;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      first = ::max(first, bounds.begin[row() + 8 * h]);
      last = ::min(last, bounds.end[row() + 8 * h]);
    }
    inner_begin = __reduce_max_sync(~0u, first);
    inner_end = __reduce_min_sync(~0u, last);
    queries = rows_operand(static_cast<unsigned>(__cvta_generic_to_shared(s.queries[query_place.stage()])) +
                           static_cast<unsigned>(__shfl_sync(~0u, group(), 0)) * kGroupRows * 128u);
  }

  /// scores = queries keys^T, on its way.
  __device__ __forceinline__ void ask_scores(Scores& scores) const {
    const std::uint64_t keys =
        rows_operand(static_cast<unsigned>(__cvta_generic_to_shared(s.keys[key_place.stage()])));
#pragma unroll
    for (int k = 0; k < S::kDim / kProductDepth; ++k) {
      const int chunk = k / 4;
      const int step = k % 4;
      product<T, S::kTokens, false>(scores, operand_at(queries, chunk * S::kRows * 128 + step * 32),
                                    operand_at(keys, chunk * S::kTokens * 128 + step * 32), k > 0);
    }
    products_commit();
  }

  /// found += weights values, on its way.
  __device__ __forceinline__ void ask_values(const Weights& weights, RowSums<S::kValueDim>& found) const {
    const std::uint64_t values = columns_operand(
        static_cast<unsigned>(__cvta_generic_to_shared(s.values[value_place.stage()])), S::kTokens * 128u);
#pragma unroll
    for (int k = 0; k < S::kTokens / kProductDepth; ++k)
      product<T, S::kValueDim, true>(found.d, weights[k], operand_at(values, k * 2048), 1);
    products_commit();
  }

  /// Zeros in the values of tokens outside of [first, last) of the KV tile: what lies there may be infinite.
  /// Each warp group writes them all, the same as others do at the same time.
  __device__ void clear_values(int first, int last) const {
    std::byte* values = s.values[value_place.stage()];
#pragma unroll 1
    for (int i = thread % kWarpGroup; i < S::kValueBytes / 16; i += kWarpGroup) {
      const int token = i / 8 % S::kTokens;  // chunks of 64 columns one after another
      if (token < first || token >= last) reinterpret_cast<uint4*>(values)[i] = uint4{0, 0, 0, 0};
    }
    fence_before_copy();
    group_sync(kGroupBarrier + group(), kWarpGroup);
  }

  __device__ __forceinline__ void cap_and_mask(Scores& scores, int token) const {
    if (p.soft_cap > 0.0f) {
      const float into = p.scale / p.soft_cap;
#pragma unroll
      for (int i = 0; i < S::kTokens / 2; ++i) scores[i] = p.soft_cap * fast_tanh(scores[i] * into);
    }
    if (is_inner(token)) return;
    const RowBounds<S::kRows>& bounds = s.bounds[query_place.stage()];
    const int lane_token = token + thread % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int begin = bounds.begin[row() + 8 * h] - lane_token;
      const int end = bounds.end[row() + 8 * h] - lane_token;
#pragma unroll
      for (int j = 0; j < S::kTokens / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 8 * j + i;
          if (at < begin || at >= end) scores[4 * j + 2 * h + i] = -kInfinity;
        }
      }
    }
  }

  /// One step of the running softmax: scores become weights, yet in f32. `shrink`: what was found until now
  /// is to be multiplied by.
  __device__ __forceinline__ void weigh(Scores& scores, RowSums<S::kValueDim>& found,
                                        float (&shrink)[2]) const {
    const float factor = this->factor();
    // Several maxima and sums of each row, as each waits for the one before it.
    constexpr int kChains = 4;
    float top[2][kChains];
    float added[2][kChains];
#pragma unroll
    for (int j = 0; j < S::kTokens / 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* x = &scores[4 * j + 2 * h];
        float& to = top[h][j % kChains];
        to = j < kChains ? fmaxf(x[0], x[1]) : fmaxf(to, fmaxf(x[0], x[1]));
      }
    }
    float pivot[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float highest = fmaxf(fmaxf(top[h][0], top[h][1]), fmaxf(top[h][2], top[h][3]));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      highest = fmaxf(highest * factor, found.max[h]);
      pivot[h] = highest == -kInfinity ? 0.0f : highest;
      shrink[h] = fast_exp2(found.max[h] - pivot[h]);
      found.max[h] = highest;
    }
#pragma unroll
    for (int j = 0; j < S::kTokens / 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* x = &scores[4 * j + 2 * h];
        x[0] = fast_exp2(fmaf(x[0], factor, -pivot[h]));
        x[1] = fast_exp2(fmaf(x[1], factor, -pivot[h]));
        float& to = added[h][j % kChains];
        to = j < kChains ? x[0] + x[1] : to + (x[0] + x[1]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      found.sum[h] = fmaf(found.sum[h], shrink[h], (added[h][0] + added[h][1]) + (added[h][2] + added[h][3]));
    }
  }

  static __device__ __forceinline__ void pack_weights(const Scores& scores, Weights& weights) {
#pragma unroll
    for (int k = 0; k < S::kTokens / kProductDepth; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][i] = pack<T>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
    }
  }

  static __device__ __forceinline__ void shrink_sums(RowSums<S::kValueDim>& found, const float (&shrink)[2]) {
    if (!__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < S::kValueDim / 2; ++i) found.d[i] *= shrink[i / 2 % 2];
  }

  /// Waits for the values of the KV tile at `token`.
  __device__ __forceinline__ void ready_values(int query_tile, int token) const {
    value_place.wait_full();
    if constexpr (!kIsBox) fence_before_copy();
    if (is_inner(token)) return;
    // Alike for all warps: what one warp's rows see is seen.
    const int first = s.plan.begin_token[query_tile] - token;
    const int last = s.plan.end_token[query_tile] - token;
    if (first > 0 || last < S::kTokens) clear_values(first, last);
  }
  __device__ __forceinline__ void ready_keys() const {
    key_place.wait_full();
    if constexpr (!kIsBox) fence_before_copy();
  }

  /// Whether this warp group has rows of a part.
  __device__ __forceinline__ bool has_rows(const WavePart& part) const {
    return part.count > 0 && group() * kGroupRows < s.plan.query_tiles[part.query_tile].num_rows;
  }
  __device__ __forceinline__ const WavePart& part_at(unsigned i) const {
    return s.parts[i % kPartStages];
  }

  /// All KV tiles of a part.
  __device__ __forceinline__ void attend(const WavePart& part, RowSums<S::kValueDim>& found) {
    const int query_tile = part.query_tile;
    int token = s.plan.first_kv_tile_token(query_tile) + part.kv_tile * S::kTokens;
    const int last_token = token + (part.count - 1) * S::kTokens;
#pragma unroll
    for (int i = 0; i < S::kValueDim / 2; ++i) found.d[i] = 0.0f;
    found.max[0] = found.max[1] = -kInfinity;
    found.sum[0] = found.sum[1] = 0.0f;

    Scores scores;
    Weights weights;
    float shrink[2];
    ready_keys();
    products_fence();
    ask_scores(scores);
    products_wait<0>();
    pin(scores);
    release(key_place.empty());
    key_place.advance();
    cap_and_mask(scores, token);
    weigh(scores, found, shrink);
    pack_weights(scores, weights);

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
      release(key_place.empty());
      key_place.advance();
      cap_and_mask(scores, token + S::kTokens);
      weigh(scores, found, shrink);
      compute_first(found.sum[0] + found.sum[1]);
      products_wait<0>();
      pin(found.d);
      release(value_place.empty());
      value_place.advance();
      shrink_sums(found, shrink);
      pack_weights(scores, weights);
    }
    release(query_place.empty());
    query_place.advance();
    ready_values(query_tile, token);
    products_fence();
    ask_values(weights, found);
    products_wait<0>();
    pin(found.d);
    release(value_place.empty());
    value_place.advance();
  }

  /// A part of which this warp group has no rows: what the copies bring is given back.
  __device__ __forceinline__ void pass(int count) {
    release(query_place.empty());
    query_place.advance();
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (i > 0) {
        wait_turn();
        end_turn();
      }
      key_place.wait_full();
      release(key_place.empty());
      key_place.advance();
      value_place.wait_full();
      release(value_place.empty());
      value_place.advance();
    }
  }

  /// Out and lse, or split partials, of a part.
  __device__ __forceinline__ void finish(const WavePart& part, RowSums<S::kValueDim>& found) const {
    const QueryTile query_tile = s.plan.query_tiles[part.query_tile];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      found.sum[h] += __shfl_xor_sync(~0u, found.sum[h], 1);
      found.sum[h] += __shfl_xor_sync(~0u, found.sum[h], 2);
    }
    if (maps.combines_later && thread == 0 &&
        (part.splits.count == 1 || static_cast<int>(blockIdx.x) == part.splits.first_block))
      p.split_tiles[part.query_tile * p.kv_heads + part.head] = {query_tile, part.splits};
    if (part.splits.count == 1) {
      write_rows<T>(p, query_tile, part.head, row(), found);
    } else {
      const SplitPartials partials{p, part.splits};
      write_partials(partials, row(), query_tile.num_rows, found);
      if (!maps.combines_later) {
        combine_waves<S::kConsumers>(partials, query_tile, part.query_tile, part.head, kBlockBarrier, thread,
                                     s.is_last);
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (S::kTakeTurns && S::kGroups > 1 && group() == S::kGroups - 1) end_turn();
    RowSums<S::kValueDim> found;
    for (unsigned i = 0;; ++i) {
      query_place.wait_full();
      const WavePart& part = s.parts[i % kPartStages];
      if (part.count == 0) return;
      if (group() * kGroupRows < s.plan.query_tiles[part.query_tile].num_rows) {
        begin_part();
        attend(part, found);
      } else {
        pass(part.count);
      }
      finish(part, found);
    }
  }
};

}  // namespace helix::cuda
