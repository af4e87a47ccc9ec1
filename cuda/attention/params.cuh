// SPDX-License-Identifier: Apache-2.0
// AttentionParams: the arguments of every attention kernel, and where query rows come from and go to.
#pragma once

#include <cstdint>

#include <helix/backend/exchange.hpp>
#include <helix/kv_layout.hpp>

#include "cuda/attention/kernel.hpp"
#include "cuda/exchange/header.cuh"
#include "cuda/exchange/target_place.cuh"
#include "cuda/kv_cache/paged_rows.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

inline constexpr int kMaxLaunchSequences = 256;  ///< Sequences of one launch.
inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

struct SplitQueryTile;

struct AttentionParams {
  DType dtype = DType::f32;  ///< Type of q and out.
  const void* q = nullptr;   ///< [tokens, heads, D]
  std::int64_t q_token_stride = 0;
  std::int64_t q_head_stride = 0;
  void* out = nullptr;  ///< [tokens, heads, Dv]
  std::int64_t out_token_stride = 0;
  std::int64_t out_head_stride = 0;
  float* lse = nullptr;
  std::int64_t lse_token_stride = 0;
  std::int64_t lse_head_stride = 0;
  int out_alignment = 1;                     ///< Bytes, up to 16, by which rows of out are aligned.
  int first_out_token = 0;                   ///< Token of the step at row 0 of out and lse.
  StampArgs headers{};                       ///< Headers of the messages that out and lse lie in.
  const std::uint64_t* exchanges = nullptr;  ///< TargetSlot::exchanges.
  std::int64_t out_slot_stride = 0;          ///< Elements of out to the other message slot.
  std::int64_t lse_slot_stride = 0;
  bool sends_lines = false;  ///< Whether out and lse are lines (LineRows), with the strides of lines.
  const std::uint32_t* gave_up = nullptr;        ///< TargetLines::gave_up.
  const std::int64_t* line_positions = nullptr;  ///< TargetLines::positions.
  std::int64_t line_tokens = 0;                  ///< TargetLines::tokens.

  const std::int64_t* positions = nullptr;
  const std::int32_t* sequence_slots = nullptr;
  int num_sequences = 0;
  int first_token = 0;  ///< First token of this launch's query tiles, counted in the step.
  int num_tokens = 0;
  int first_query_tile = 0;  ///< Query tile of its first sequence with which the launch begins.
  int num_query_tiles = 0;
  bool is_one_query_tile_each = false;  ///< Whether each sequence is one query tile.
  /// Whether earlier kernels that may still run write nothing that this one reads but q and KV rows of the
  /// step's own tokens; only with is_one_query_tile_each.
  bool reads_ahead = false;

  PagedRows k;  ///< Key rows; latent: their first key_columns columns.
  PagedRows v;  ///< Value rows; latent: the same as k.
  Divisor page_tokens;
  PageLists lists;
  const float* k_scale = nullptr;
  const float* v_scale = nullptr;
  KvLayout layout{1, 1};
  std::int64_t kvp_rank = 0;

  Divisor kv_heads;
  Divisor group;  ///< Query heads of a KV head.
  int head_dim = 0;
  int value_dim = 0;
  Divisor query_tile_rows;  ///< Most query rows of a query tile.
  float scale = 0.0f;
  float soft_cap = 0.0f;
  std::int64_t window = 0;

  /// [2 * blocks, query_tile_rows, partial_stride(value_dim)], followed by the results of a cluster's blocks
  /// in kernels whose AttentionKernel::sm_rows counts them.
  float* partial_out = nullptr;
  float* partial_max = nullptr;  ///< [2 * blocks, query_tile_rows], base 2
  float* partial_sum = nullptr;  ///< [2 * blocks, query_tile_rows]
  int* counters = nullptr;       ///< [query tiles * KV heads * blocks of a cluster], zero between launches
  /// [query tiles * KV heads], at most kMaxQueryTiles, for kernels that combine in a launch of their own.
  SplitQueryTile* split_tiles = nullptr;

  PagedRows rope;       ///< Latent only: key columns from key_columns on.
  int key_columns = 0;  ///< Columns of a key that lie in k.

  std::int32_t query_offsets[kMaxLaunchSequences + 1];  ///< Passed by value, which saves a trip to memory.
};

/// Loads the first arguments into the constant cache, 64 bytes by each warp of the block, all at once: one by
/// one each would cost a trip to memory.
__device__ inline void prefetch_params(const AttentionParams& p) {
  constexpr int kConstantLineWords = 16;
  const int word = static_cast<int>(threadIdx.x) / kWarp * kConstantLineWords;
  if (word < static_cast<int>(sizeof(AttentionParams) / sizeof(int)))
    asm volatile("" ::"r"(reinterpret_cast<const int*>(&p)[word]));
}

/// KvLayout::visible() as a function call: the code of its divisions is long.
__device__ __noinline__ inline TokenRange visible_shard(KvLayout layout, std::int64_t position,
                                                        std::int64_t window, std::int64_t kvp_rank) {
  return layout.visible(position, window, kvp_rank);
}

/// Local tokens that a query at `position` sees. kCalls: see AttentionPlan.
template <bool kCalls = false>
__device__ inline TokenRange visible(const AttentionParams& p, std::int64_t position) {
  if constexpr (!kCalls) return p.layout.visible(position, p.window, p.kvp_rank);
  if (p.layout.kvp() == 1 && p.window == 0) return {0, max(position + 1, std::int64_t{0})};
  return visible_shard(p.layout, position, p.window, p.kvp_rank);
}

/// Up to AttentionParams::query_tile_rows query rows of one sequence: query tokens times the heads of a KV
/// head's group.
struct QueryTile {
  int first_token;  ///< First token of the sequence, counted in the step.
  int first_row;    ///< First row, counted in the sequence; row / group counts tokens from first_token.
  int num_rows;

  __device__ int token(const AttentionParams& p, int row) const {
    return first_token + (first_row + row) / p.group;
  }
  __device__ int query_head(const AttentionParams& p, int head, int row) const {
    return head * p.group + (first_row + row) % p.group;
  }
};

/// Local tokens that the sequence had before the step. `query_tile` must be its only one. kCalls: see
/// AttentionPlan.
template <bool kCalls = false>
__device__ inline int settled_tokens(const AttentionParams& p, const QueryTile& query_tile) {
  std::int64_t settled = INT64_MAX;
#pragma unroll 1
  for (int token = query_tile.first_token; token <= query_tile.token(p, query_tile.num_rows - 1); ++token)
    settled = min(settled, kCalls ? visible<true>(p, p.positions[token] - 1).end
                                  : p.layout.length(p.positions[token], p.kvp_rank));
  return static_cast<int>(settled);
}

/// Reads from memory where this launch writes its results.
__device__ __forceinline__ TargetPlace read_target_place(const AttentionParams& p) {
  return p.exchanges == nullptr ? TargetPlace{} : TargetPlace(p.exchanges, p.gave_up);
}

/// The block's read_target_place(), in shared memory.
__device__ __forceinline__ TargetPlace& target_place() {
  __shared__ TargetPlace place;
  return place;
}

/// Fills in target_place(), before a barrier: reading it for each row would cost a trip to memory each time.
/// The last thread does so, because the first ones make the plan.
__device__ __forceinline__ void find_target_place(const AttentionParams& p) {
  if (threadIdx.x == blockDim.x - 1) target_place() = read_target_place(p);
}

/// follow_previous() for a kernel of attention, after whatever it does ahead; called before a barrier, as it
/// fills in target_place(). If this kernel sends lines, the next one reads them before this one ends, so it
/// may start only when all kernels before this one have ended.
__device__ __forceinline__ void follow_previous(const AttentionParams& p) {
  if (!p.sends_lines) start_next();
  wait_for_previous();
  if (p.sends_lines) start_next();
  find_target_place(p);
}

/// Where row (token, head) of out begins, in elements.
__device__ __forceinline__ std::int64_t out_row(const AttentionParams& p, const TargetPlace& place,
                                                std::int64_t token, std::int64_t head) {
  return place.slot * p.out_slot_stride + token * p.out_token_stride + head * p.out_head_stride;
}

/// Stores the log-sum-exp of row (token, head).
__device__ __forceinline__ void store_lse(const AttentionParams& p, const TargetPlace& place,
                                          std::int64_t token, std::int64_t head, float lse) {
  float* const to =
      p.lse + place.slot * p.lse_slot_stride + token * p.lse_token_stride + head * p.lse_head_stride;
  if (p.sends_lines) {
    store_line(to, __float_as_uint(lse), exchange_row_tag(p.line_positions, token, p.line_tokens),
               place.count);
  } else {
    *to = lse;
  }
}

/// Columns of a row of split partials in the workspace: whole float4s.
HELIX_HOST_DEVICE constexpr std::int64_t partial_stride(std::int64_t value_dim) {
  return (value_dim + 3) / 4 * 4;
}

/// Writes the headers of the packed messages that hold the results; one warp of the grid.
__device__ inline void finish_messages(const AttentionParams& p) {
  if (p.headers.message != nullptr && blockIdx.x == gridDim.x - 1 && threadIdx.x < kWarp)
    write_headers(p.headers);
}

}  // namespace helix::cuda
